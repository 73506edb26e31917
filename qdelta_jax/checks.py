"""What `delta_rule` and `step` refuse, and how they say so."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from qdelta_jax.rules import Rule

DTYPES = tuple(jnp.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64))
"""What q, k and v may be."""


def compute_dtype(dtype: Any) -> Any:
    """float64 for float64 inputs, else float32: the dtype of gates, sums and states."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def check_inputs(
    q: Array, k: Array, v: Array, rule: Rule, gates: Mapping[str, Array], leading: tuple[str, ...]
) -> None:
    """Shapes and dtypes of one call, `leading` naming the axes before the head axis.

    Raises:
        ValueError: naming the argument, what came and what is wanted.
    """
    rank = len(leading) + 2
    axes = "".join(f"{name}," for name in leading)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
            raise ValueError(f"{name}: got {type(x).__name__}, want an array")
        if x.ndim != rank:
            last = "HV,V" if name == "v" else "H,K"
            raise ValueError(f"{name}: got shape {x.shape}, want {rank} axes [{axes}{last}]")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name}: got dtype {x.dtype}, want float32, bfloat16, float16 or float64")
        if x.dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{name}: got dtype float64 while jax_enable_x64 is off, want it on, or float32")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: got dtype {x.dtype}, want q's dtype {q.dtype}")
        if 0 in x.shape:
            raise ValueError(f"{name}: got shape {x.shape}, want no empty axis")
    if k.shape != q.shape:
        raise ValueError(f"k: got shape {k.shape}, want q's shape {q.shape}")
    n = len(leading)
    if v.shape[:n] != q.shape[:n]:
        raise ValueError(f"v: got shape {v.shape}, want [{axes}..] = {q.shape[:n]} as in q {q.shape}")
    heads, value_heads = q.shape[n], v.shape[n]
    if value_heads % heads:
        raise ValueError(f"v: got {value_heads} heads, want a multiple of the {heads} heads of q and k")
    check_gates(rule, gates, q.shape[:n], heads, value_heads, q.shape[-1], v.shape[-1], axes)


def check_gates(
    rule: Rule,
    gates: Mapping[str, Array],
    leading: tuple[int, ...],
    heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    axes: str,
) -> None:
    """The gates are those of the rule, each of its own shape."""
    if not isinstance(gates, Mapping):
        raise ValueError(f"gates: got {type(gates).__name__}, want a dict from gate names to arrays")
    missing, unknown = set(rule.gates) - set(gates), set(gates) - set(rule.gates)
    if missing or unknown:
        raise ValueError(
            f"gates: rule {rule.name!r} takes {list(rule.gates)}, got {list(gates)}"
            + (f"; missing: {sorted(missing)}" if missing else "")
            + (f"; unknown: {sorted(unknown)}" if unknown else "")
        )
    head_axis = len(leading)
    for name, gate in rule.gates.items():
        x = gates[name]
        if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
            raise ValueError(f"gates[{name!r}]: got {type(x).__name__}, want an array")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"gates[{name!r}]: got dtype {x.dtype}, want a floating dtype")
        trailing: list[tuple[int, ...]] = [()] if gate.axis == "head" else [(gate.size(key_dim, value_dim),)]
        if name == "log_decay" and gate.axis == "key":
            trailing.append(())
        fits = (
            x.ndim > head_axis
            and x.shape[:head_axis] == leading
            and x.shape[head_axis] in (heads, value_heads)
            and x.shape[head_axis + 1 :] in trailing
        )
        if not fits:
            head = f"{value_heads}" if heads == value_heads else f"{value_heads} or {heads}"
            sizes = " or ".join(f"[{axes}{','.join(['H', *map(str, t)])}]" for t in trailing)
            raise ValueError(
                f"gates[{name!r}]: got shape {x.shape}, want {sizes} with [{axes}..] = {leading} and H = {head} heads"
            )


def check_log_decay(gates: Mapping[str, Array], valid: Array | None) -> None:
    """No positive log_decay in a token that counts, [B, T] or [B] bool; looks at concrete values only."""
    x = gates.get("log_decay")
    if x is None or isinstance(x, jax.core.Tracer) or isinstance(valid, jax.core.Tracer):
        return
    values = np.asarray(x)
    if valid is not None:
        values = values[np.asarray(valid)]
    if np.any(values > 0):
        raise ValueError(
            f"gates['log_decay']: got a value of {np.nanmax(values)}, want log_decay <= 0 "
            "(it is the logarithm of a decay in [0, 1])"
        )


def check_state(name: str, state: Array, shape: tuple[int, ...], dtype: Any) -> None:
    if not hasattr(state, "shape") or not hasattr(state, "dtype"):
        raise ValueError(f"{name}: got {type(state).__name__}, want an array [B,HV,K,V] = {shape}")
    if state.shape != shape:
        raise ValueError(f"{name}: got shape {state.shape}, want [B,HV,K,V] = {shape}")
    if state.dtype != dtype:
        raise ValueError(f"{name}: got dtype {state.dtype}, want {jnp.dtype(dtype)} (states are never rounded)")


def check_segment_ids(segment_ids: Array, shape: tuple[int, ...] | None) -> None:
    """Integers [B, T], of that very shape where one is given."""
    if not hasattr(segment_ids, "ndim") or not hasattr(segment_ids, "dtype"):
        raise ValueError(f"segment_ids: got {type(segment_ids).__name__}, want an integer array [B,T]")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids: got dtype {segment_ids.dtype}, want an integer dtype")
    if segment_ids.ndim != 2 or shape not in (None, segment_ids.shape):
        raise ValueError(f"segment_ids: got shape {segment_ids.shape}, want [B,T] = {shape or '2 axes'}")
    if isinstance(segment_ids, np.ndarray) and segment_ids.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
        kept = np.iinfo(np.int32 if segment_ids.dtype.kind == "i" else np.uint32)
        low, high = (segment_ids.min(), segment_ids.max()) if segment_ids.size else (0, 0)
        if not kept.min <= low <= high <= kept.max:
            raise ValueError(
                f"segment_ids: got {segment_ids.dtype} values {low} .. {high}, want them within {kept.min} .. "
                f"{kept.max}: JAX takes 32 bits of them, unless jax_enable_x64 is set"
            )


def check_mask(mask: Array, batch: int) -> None:
    if getattr(mask, "shape", None) != (batch,) or mask.dtype != jnp.bool_:
        kind = f"shape {mask.shape} and dtype {mask.dtype}" if hasattr(mask, "dtype") else type(mask).__name__
        raise ValueError(f"mask: got {kind}, want [B] = ({batch},) bool")


def check_scale(scale: Any, key_dim: int) -> float:
    if scale is None:
        return key_dim**-0.5
    array = None if isinstance(scale, jax.core.Tracer) else np.asarray(scale)
    if array is None or array.ndim != 0 or array.dtype.kind not in "iuf":
        raise ValueError(f"scale: got {scale!r}, want a Python number (a compile-time constant) or None")
    if not np.isfinite(scale):
        raise ValueError(f"scale: got {scale!r}, want a finite number or None")
    return float(scale)


def check_count(name: str, count: Any) -> int:
    """A compile-time integer of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"{name}: got {count!r}, want an integer of at least 1")
    return int(count)


def own_values(config: Any) -> None:
    """NumPy's numbers, arrays and dtypes, and lists, in the fields of a frozen dataclass become Python's numbers,
    tuples and names, which JSON can hold. For the first line of `__post_init__`.

    Raises:
        ValueError: True or False is wanted, and something else came.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        own = _own(value)
        if field.name.endswith("dtype") and isinstance(own, type):
            own = jnp.dtype(own).name
        if own is not value:
            object.__setattr__(config, field.name, own)
        if field.type is bool and not isinstance(own, bool):
            raise ValueError(f"{field.name}: got {own!r}, want True or False")


def _own(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.longdouble):
        return float(value)
    if isinstance(value, np.generic | np.ndarray):
        return _own(value.tolist()) if value.shape else value.item()
    return tuple(map(_own, value)) if isinstance(value, list | tuple) else value


def check_precision(precision: Any, dtype: Any) -> Any:
    """HIGHEST for float32 and float64 where nothing is asked for."""
    if precision is None:
        return lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None
    if isinstance(precision, lax.Precision | lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return precision
    try:
        return lax.Precision(precision)
    except ValueError as error:
        wanted = [x.name.lower() for x in lax.Precision]
        raise ValueError(f"precision: got {precision!r}, want None, a jax.lax.Precision or one of {wanted}") from error
