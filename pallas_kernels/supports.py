"""Can the kernels run here, with these arrays and this rule? A reason, or None."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.inputs import DTYPES, check_arrays, unsupported
from pallas_kernels.rule import apart, gates_apart

CAPABILITY = "9.0"
"""Compute capability of Hopper, whose matrix instructions and copy engine the kernels use."""

GRID = 65_535
"""Most sequences and most heads: blocks along two axes of a grid."""


def supports(
    function: Callable[..., Any],
    axes: Mapping[str, str],
    q: Any,
    k: Any,
    v: Any,
    gates: Mapping[str, Any],
    *,
    accurate: bool | None = None,
    masked: bool = False,
    segmented: bool = False,
    interpret: Any = None,
) -> str | None:
    """Why `forward` cannot run with these arguments here; None if it can.

    Args:
        function, axes, accurate, interpret: as in `forward`; with `interpret` any machine will do.
        q, k, v, gates: as in `forward`; shapes and dtypes count, so `jax.ShapeDtypeStruct` will do.
        masked, segmented: whether `forward` gets `valid` and `reset`.
    Raises:
        ValueError: an array would not fit on any machine; the message names it.

    >>> q = jax.ShapeDtypeStruct((1, 100, 2, 512), jnp.bfloat16)
    >>> supports(lambda q, k, v: (k, None, v, None), {}, q, q, q, {}, interpret=True)
    'K = 512 and V = 512; the kernels go up to 256'
    """
    check_arrays(axes, q, k, v, gates)
    accurate = q.dtype == jnp.float32 if accurate is None else accurate
    reason = machine(q) if interpret is None else None
    if reason is not None:
        return reason
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    given = tuple((name, jax.ShapeDtypeStruct(x.shape, x.dtype)) for name, x in gates.items())
    return _fits(function, tuple(axes.items()), *shapes, given, bool(accurate), masked, segmented)


def machine(q: Any) -> str | None:
    """Why the kernels cannot run where q is, or where JAX computes by default; None if they can."""
    devices = list(q.devices()) if isinstance(q, jax.Array) and not isinstance(q, jax.core.Tracer) else [_default()]
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    spread = max(len(devices), prod(size for name, size in mesh.shape.items() if name not in manual))
    if spread > 1:
        return f"the call is spread over {spread} devices, and kernels cannot be: make it inside jax.shard_map"
    device = devices[0]
    if device.platform != "gpu":
        return f"the kernels are for Hopper GPUs, and the device is a {device.platform} ({device.device_kind})"
    if str(device.compute_capability) != CAPABILITY:
        return (
            f"the kernels are for Hopper GPUs (compute capability {CAPABILITY}), and the device is a "
            f"{device.device_kind} ({device.compute_capability})"
        )
    return None


def _default() -> Any:
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return jax.devices(default)[0]
    return default


@lru_cache(maxsize=1024)
def _fits(
    function: Callable[..., Any],
    axes: tuple[tuple[str, str], ...],
    q: Any,
    k: Any,
    v: Any,
    gates: tuple[tuple[str, Any], ...],
    accurate: bool,
    masked: bool,
    segmented: bool,
) -> str | None:
    """Tracing a rule takes milliseconds: once for each kind of call."""
    named = dict(axes)
    for name, x in {"q": q, "k": k, "v": v, **{n: x for n, x in gates if named[n] != "head"}}.items():
        if jnp.dtype(x.dtype) not in DTYPES:
            return f"{name} has dtype {x.dtype}; the kernels take bfloat16, float16 and float32"
    batch, value_heads = q.shape[0], v.shape[2]
    if max(batch, value_heads) > GRID:
        return f"B = {batch} and HV = {value_heads}; a grid takes {GRID} sequences and heads"
    function, given = apart(function, tuple(named)), gates_apart(dict(gates))
    options = {"accurate": accurate, "masked": masked, "segmented": segmented}
    return unsupported(function, gates_apart(named), q, v, given, **options)
