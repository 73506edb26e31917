"""The GPU kernels (`pallas_kernels`) as an implementation of `delta_rule`.

forward     the kernels; when differentiated they also save what `residuals` says
gradient    the kernels; where they cannot, `chunked_backward` from the state before each chunk and the inputs
vmap        the mapped axis becomes a part of the batch
refused     by name: second derivatives and forward mode
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

import pallas_kernels
from pallas_kernels.mesh import without_axes
from pallas_kernels.refusals import no_derivative, reverse_mode_only
from qdelta_jax.chunked import chunked_backward
from qdelta_jax.coefficients import coefficients
from qdelta_jax.plan import ChunkOptions, grouped_states, make_plan
from qdelta_jax.rules import Rule

__all__ = ["KernelOptions", "interpreted", "kernel_options", "kernel_settings", "mosaic", "mosaic_plain", "unsupported"]

CHUNK = 64
"""Tokens of a chunk: the kernels know no other size."""

REFUSED = (
    "second derivatives and forward-mode derivatives do not go through implementation='mosaic', which has gradients "
    "(reverse mode, once, without validate=True) only: use implementation='xla', or 'scan' for forward mode"
)


@dataclass(frozen=True)
class KernelOptions:
    """What is fixed at compile time, besides the rule. overrides: of what `pallas_kernels.forward` chooses. gradients:
    "xla" or "kernels"; "xla" where the kernels cannot."""

    chunks: ChunkOptions
    accurate: bool
    interpret: Any = None
    gradients: str = "kernels"
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)


_settings: ContextVar[Mapping[str, Any] | None] = ContextVar("mosaic_settings", default=None)


@contextmanager
def kernel_settings(*, interpret: Any = None, gradients: str = "kernels", **overrides: Any) -> Iterator[None]:
    """For tests: how the kernels of the calls inside run.

    interpret: a `plgpu.InterpretGPUParams`, to run them on a CPU, slowly; with few cores its threads wait for each
    other for ever (docs/kernels.md, Testing). gradients, overrides: as in `KernelOptions`.
    """
    token = _settings.set({"interpret": interpret, "gradients": gradients, "overrides": overrides})
    try:
        yield
    finally:
        _settings.reset(token)


def interpreted() -> Any:
    """How the kernels of calls here are interpreted; None on a GPU."""
    return (_settings.get() or {}).get("interpret")


def kernel_options(options: ChunkOptions, dtype: Any) -> KernelOptions:
    accurate = bool(_accurate(options.precision, dtype))
    return KernelOptions(replace(options, chunk_size=CHUNK), accurate, **(_settings.get() or {}))


def _accurate(precision: Any, dtype: Any) -> bool | None:
    """Products in float32 accuracy, or of 16-bit operands; None for a precision that the kernels do not have."""
    if precision not in (None, *lax.Precision):
        return None
    if jnp.dtype(dtype) == jnp.float32:
        return precision in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    return precision == lax.Precision.HIGHEST


def unsupported(
    rule: Rule, q: Any, k: Any, v: Any, gates: Mapping[str, Any], *, precision: Any, segmented: bool
) -> str | None:
    """Why the kernels cannot run this call here, None if they can; `precision` as `checks.check_precision` returns it.

    Raises:
        ValueError: the rule's function returns something else than its coefficients.
    """
    interpret = interpreted()
    reason = pallas_kernels.machine(q) if interpret is None else None
    if reason is not None:
        return reason
    accurate = _accurate(precision, q.dtype)
    if accurate is None:
        return f"precision is {precision!r}; the kernels take None and jax.lax.Precision"
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    given = {name: jax.ShapeDtypeStruct(x.shape, _gate_dtype(x)) for name, x in gates.items()}
    _check_coefficients(rule, q, k, v, tuple(given.items()))
    return pallas_kernels.supports(
        rule.function,
        _axes(rule, gates),
        q,
        k,
        v,
        given,
        accurate=accurate,
        masked=segmented,
        segmented=segmented,
        interpret=interpret,
    )


@lru_cache(maxsize=1024)
def _check_coefficients(rule: Rule, q: Any, k: Any, v: Any, gates: tuple[tuple[str, Any], ...]) -> None:
    """The complaints of the other implementations about a rule's function."""
    jax.eval_shape(lambda *x: coefficients(rule, x[0], x[1], x[2], x[3], None), q, k, v, dict(gates))


def _axes(rule: Rule, gates: Mapping[str, Any]) -> dict[str, str]:
    """What the last axis of each gate is; a log_decay per key channel may be given per head."""
    return {name: "head" if gates[name].ndim == 3 else gate.axis for name, gate in rule.gates.items()}


def _gate_dtype(gate: Any) -> Any:
    return gate.dtype if gate.dtype in pallas_kernels.DTYPES else jnp.dtype(jnp.float32)


def _call(kernels: Callable[..., Any], rule: Rule, options: KernelOptions, *arguments: Any, **more: Any) -> Any:
    """`pallas_kernels.forward` or `backward` of (q, k, v, gates, state, ..)."""
    q, k, v, gates, *others = arguments
    # The kernels count in 32 bits, whatever jax_enable_x64 says outside.
    with jax.enable_x64(False):
        return kernels(
            rule.function,
            _axes(rule, gates),
            q,
            k,
            v,
            {name: x.astype(_gate_dtype(x)) for name, x in gates.items()},
            *others,
            scale=options.chunks.scale,
            accurate=options.accurate,
            interpret=options.interpret,
            **more,
            **options.overrides,
        )


def _batched(function: Callable[..., Any], unfold: Callable[[int, Any], Any]) -> Callable[..., Any]:
    """The function under `vmap`, with a mapped axis as a part of the batch. unfold: (its size, results) -> results with
    that axis first."""
    run = custom_vmap(lambda *arguments: without_axes(function, *arguments))

    @run.def_vmap
    def fold(size, mapped, *arguments):
        def into_batch(path: Any, x: Array, is_mapped: bool) -> Array:
            axis = _batch_axis(path)
            x = jnp.moveaxis(x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)), 0, axis)
            return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

        made = unfold(size, run(*jax.tree_util.tree_map_with_path(into_batch, arguments, tuple(mapped))))
        return made, jax.tree.map(lambda _: True, made)

    return run


def _batch_axis(path: Any) -> int:
    name = getattr(path[-1], "key", None)
    return pallas_kernels.batch_axis(name) if isinstance(name, str) and name.startswith("saved ") else 0


def _split_batch(size: int, made: Any) -> Any:
    def split(path: Any, x: Array) -> Array:
        axis = _batch_axis(path)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :]), axis, 0)

    return jax.tree_util.tree_map_with_path(split, made)


def _kernels(rule: Rule, options: KernelOptions, save: str | None = None) -> Callable[..., tuple[Any, ...]]:
    """(q, k, v, gates, state, valid, reset) -> out, the final state, the states before each chunk of 64 tokens or None,
    and what the gradient kernels take."""

    def forward(*arguments: Any) -> tuple[Any, ...]:
        sequences = arguments[0].shape[0]
        if sequences > pallas_kernels.GRID:
            raise NotImplementedError(
                f"vmap of implementation='mosaic' makes a batch of {sequences} sequences, and a grid takes "
                f"{pallas_kernels.GRID}: map over fewer at a time (jax.lax.map with batch_size)"
            )
        return tuple(_call(pallas_kernels.forward, rule, options, *arguments, save=save))

    def unfold(size: int, made: Any) -> Any:
        out, end, states, saved = made
        if states is not None:
            states = jnp.moveaxis(states.reshape(states.shape[0], size, -1, *states.shape[2:]), 1, 0)
        return *_split_batch(size, (out, end)), states, _split_batch(size, saved)

    run = _batched(forward, unfold)

    def refusing(*arguments: Any) -> tuple[Any, ...]:
        *tensors, valid, reset = arguments
        return run(*no_derivative(tensors, REFUSED), valid, reset)

    return refusing


def mosaic_plain(rule: Rule, options: KernelOptions, *arguments: Any) -> tuple[Array, Array]:
    """`mosaic` without a gradient: checkify cannot go through a custom_vjp under jit."""
    return _kernels(rule, options)(*arguments)[:2]


def mosaic(
    rule: Rule,
    options: KernelOptions,
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    state: Array,
    valid: Array | None,
    reset: Array | None,
) -> tuple[Array, Array]:
    """The recurrence over [B, T, H, .] inputs by the kernels; arguments as checked by `delta_rule`.

    Returns:
        out [B, T, HV, V] in q's dtype and the final state [B, HV, K, V].
    Raises:
        NotImplementedError: it is differentiated twice, or in forward mode.
    """
    q, k, v, gates, state = reverse_mode_only((q, k, v, gates, state), REFUSED)
    return _differentiable(rule, options, q, k, v, gates, state, valid, reset)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(rule: Rule, options: KernelOptions, *arguments: Any) -> tuple[Array, Array]:
    return mosaic_plain(rule, options, *arguments)


def _gradient_kernels(rule: Rule, options: KernelOptions) -> Callable[..., pallas_kernels.Backward]:
    """(q, k, v, gates, state, valid, reset, saved, d_out, d_end) -> the gradients of the first five."""

    def backward(*arguments: Any) -> pallas_kernels.Backward:
        *inputs, saved, d_out, d_end = arguments
        made = _call(pallas_kernels.backward, rule, options, *inputs, d_out, d_end, saved=saved)
        return made._replace(gates={name: x.astype(arguments[3][name].dtype) for name, x in made.gates.items()})

    run = _batched(backward, _split_batch)

    def refusing(*arguments: Any) -> pallas_kernels.Backward:
        *tensors, valid, reset, saved, d_out, d_end = arguments
        *tensors, saved, d_out, d_end = no_derivative((*tensors, saved, d_out, d_end), REFUSED)
        return run(*tensors, valid, reset, saved, d_out, d_end)

    return refusing


def _by_kernels(rule: Rule, options: KernelOptions, *arguments: Any) -> bool:
    """Whether the gradient runs through the kernels."""
    q, _, v, gates, _, valid, reset = arguments
    if options.gradients != "kernels":
        return False
    reason = pallas_kernels.backward_unsupported(
        rule.function,
        _axes(rule, gates),
        q,
        v,
        {name: jax.ShapeDtypeStruct(x.shape, _gate_dtype(x)) for name, x in gates.items()},
        accurate=options.accurate,
        masked=valid is not None,
        segmented=reset is not None,
    )
    return reason is None


def _forward(rule: Rule, options: KernelOptions, *arguments: Any) -> tuple[tuple[Array, Array], tuple]:
    by_kernels = _by_kernels(rule, options, *arguments)
    run = _kernels(rule, options, options.chunks.residuals if by_kernels else "states")
    out, end, states, saved = run(*arguments)
    out = checkpoint_name(out, "delta_rule_out")
    states = jax.tree.map(lambda x: checkpoint_name(x, "delta_rule_states"), states)
    saved = jax.tree.map(lambda x: checkpoint_name(x, "delta_rule_saved"), saved)
    return (out, end), (*arguments, states, saved)


def _backward(rule: Rule, options: KernelOptions, saved: tuple, cotangents: tuple) -> tuple:
    *inputs, states, kept = saved
    if states is None:
        made = _gradient_kernels(rule, options)(*inputs, kept, *cotangents)
        return *made, None, None
    q, k, v, gates, _, valid, reset = inputs
    batch, length, heads, _ = v.shape
    states = grouped_states(make_plan(options.chunks, batch, length, heads), states)
    return chunked_backward(rule, options.chunks, (q, k, v, gates, valid, reset, states, None), cotangents)


_differentiable.defvjp(_forward, _backward)
