"""What layers, models and their configurations refuse, and how they say so."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.convolution import EPS
from qdelta_jax.checks import check_segment_ids

__all__ = [
    "check_along",
    "check_array",
    "check_cache_batch",
    "check_conv_implementation",
    "check_conv_width",
    "check_decay_lower_bound",
    "check_dtype",
    "check_dtypes",
    "check_flag",
    "check_hidden",
    "check_number",
    "check_tokens",
]


def check_hidden(x: Any, width: int) -> None:
    """Floating [B, T, width], B and T at least 1.

    Raises:
        ValueError: what came and what is wanted; so do all of this module.
    """
    if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
        raise ValueError(f"x: got {type(x).__name__}, want an array [B,T,width] with width = {width}")
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"x: got shape {x.shape}, want [B,T,width] with width = {width}")
    if 0 in x.shape:
        raise ValueError(f"x: got shape {x.shape}, want no empty axis [B,T,width]")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: got dtype {x.dtype}, want a floating dtype")


def check_tokens(tokens: Any, vocab: int, segment_ids: Any = None) -> None:
    """Integers [B, T], B and T at least 1; where values are known, within 0 .. vocab - 1 outside of padding."""
    if not hasattr(tokens, "ndim") or not hasattr(tokens, "dtype"):
        raise ValueError(f"tokens: got {type(tokens).__name__}, want an integer array [B,T]")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: got dtype {tokens.dtype}, want an integer dtype")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens: got shape {tokens.shape}, want [B,T], no axis empty")
    check_along(tokens.shape, segment_ids, None)
    if not _known(tokens) or (segment_ids is not None and not _known(segment_ids)):
        return
    values = np.asarray(tokens)
    values = values if segment_ids is None else values[np.asarray(segment_ids) != 0]
    if values.size and (values.min() < 0 or values.max() >= vocab):
        raise ValueError(f"tokens: got values {values.min()} .. {values.max()}, want them within 0 .. {vocab - 1}")


def _known(x: Any) -> bool:
    """Whether the values are there to be read: not traced, and not spread over other hosts."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def check_along(shape: tuple[int, ...], segment_ids: Any, positions: Any) -> None:
    """Segment ids and positions, where given: integers of that very shape [B, T]."""
    if segment_ids is not None:
        check_segment_ids(segment_ids, tuple(shape))
    if positions is None:
        return
    if not hasattr(positions, "ndim") or not hasattr(positions, "dtype"):
        raise ValueError(f"positions: got {type(positions).__name__}, want an integer array [B,T]")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions: got dtype {positions.dtype}, want an integer dtype")
    if positions.shape != tuple(shape):
        raise ValueError(f"positions: got shape {positions.shape}, want [B,T] = {tuple(shape)}")


def check_array(name: str, x: Any, axes: str, shape: tuple[int, ...], kind: str = "floating") -> None:
    """A floating (or integer) array of that very shape, whose axes are called so."""
    if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
        raise ValueError(f"{name}: got {type(x).__name__}, want an array {axes} = {shape}")
    if x.shape != shape:
        raise ValueError(f"{name}: got shape {x.shape}, want {axes} = {shape}")
    if not jnp.issubdtype(x.dtype, getattr(jnp, kind)):
        article = "a" if kind == "floating" else "an"
        raise ValueError(f"{name}: got dtype {x.dtype}, want {article} {kind} dtype")


def check_cache_batch(got: int, batch: int) -> None:
    if got != batch:
        raise ValueError(f"cache: got one of batch size {got}, want x's batch size {batch}")


def check_number(name: str, value: Any, wanted: str = "a finite number", *, positive: bool = False) -> float:
    """A finite real number that is known at compile time; if positive, one whose power -3/2, which the gradients of
    roots have, is finite in float32."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:  # an integer beyond float64
        number = math.inf
    least, most = EPS
    if not math.isfinite(number) or (positive and not least <= number <= most):
        wanted = f"a number above 0, {least:.3g} .. {most:.3g}" if positive else wanted
        raise ValueError(f"{name}: got {value!r}, want {wanted}")
    return number


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: got {value!r}, want True or False")
    return bool(value)


def check_dtype(name: str, value: Any, wanted: str = "a floating dtype") -> None:
    try:
        floating = value is not None and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except (TypeError, ValueError):  # no dtype at all
        floating = False
    if not floating:
        raise ValueError(f"{name}: got {value!r}, want {wanted}")


def check_dtypes(dtype: Any, param_dtype: Any) -> None:
    """Of a layer."""
    if dtype is not None:
        check_dtype("dtype", dtype, "a floating dtype, or None")
    check_dtype("param_dtype", param_dtype)


def check_decay_lower_bound(value: Any) -> None:
    if value is not None and check_number("decay_lower_bound", value, "a number below 0, or None") >= 0:
        raise ValueError(f"decay_lower_bound: got {value!r}, want a number below 0, or None")


def check_conv_implementation(value: Any, name: str = "conv_implementation") -> None:
    if value not in (None, "xla", "mosaic"):
        raise ValueError(f"{name}: got {value!r}, want None, 'xla' or 'mosaic'")


def check_conv_width(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"conv_width: got {value!r}, want an integer of at least 0")
