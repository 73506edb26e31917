"""`delta_rule` and `step`: the two calls everything else is built on."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import checkify

from pallas_kernels.mesh import vary, varying
from qdelta_jax import mosaic, recurrence
from qdelta_jax.checks import (
    check_count,
    check_inputs,
    check_log_decay,
    check_mask,
    check_precision,
    check_scale,
    check_segment_ids,
    check_state,
    compute_dtype,
)
from qdelta_jax.chunked import ChunkOptions, chunked, chunked_plain, coefficients
from qdelta_jax.implementations import IMPLEMENTATIONS, Implementation, resolve_implementation
from qdelta_jax.rules import Rule, get_rule
from qdelta_jax.segments import segment_masks, segment_runs

__all__ = ["IMPLEMENTATIONS", "delta_rule", "resolve_implementation", "segment_final_states", "step"]


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
    implementation: Implementation = None,
    precision: lax.PrecisionLike = None,
    residuals: Literal["recompute", "keep"] = "recompute",
    validate: bool = False,
) -> tuple[Array, Array]:
    """S_t = (I - k_t e_t^T) Diag(exp(log_decay_t)) S_{t-1} + k_t z_t^T;  o_t = scale * S_t^T q_t.

    The rule makes e_t, z_t and log_decay_t of q_t, k_t, v_t and the gates (`qdelta_jax.RULES`).

    Args:
        q: [B, T, H, K] queries, float32, bfloat16, float16 or float64. T >= 1, any K.
        k: [B, T, H, K] keys, of q's dtype. Delta rules want unit norm (`l2_normalize`); nothing is normalised here.
        v: [B, T, HV, V] values, of q's dtype. HV is a multiple of H: q and k repeat for grouped values.
        rule: a name in `RULES`, or a `Rule`.
        gates: dict of the rule's gates: [B, T, HV] per head, [B, T, HV, K] per key channel or [B, T, HV, V] per
            value channel, or the same with H heads, which repeat. `log_decay` <= 0; 0 keeps everything, -inf
            forgets everything.
        scale: of the output only, a Python number; K^-0.5 by default.
        initial_state: [B, HV, K, V], float32 (float64 for float64 inputs); zeros by default.
        segment_ids: [B, T] int. 0 is padding (output 0, state untouched, whatever is there, NaN included); a new
            non-zero id clears the state; the first one continues `initial_state`; the same id after padding continues.
        chunk_size: tokens solved at once; rounded up to a power of two. Changes rounding only. "mosaic" always takes
            64.
        implementation: "scan" (one token at a time), "xla" (chunked), "mosaic" (kernels for a Hopper GPU; their
            gradient goes through "xla" where the kernels for it do not fit) or None: the fastest that can run
            (`resolve_implementation` tells). A name that cannot run is an error, never another implementation.
        precision: of matrix products; None means HIGHEST for float32 and float64 inputs and the platform's
            default for half precision inputs, whose products accumulate in float32 in any case. "mosaic" multiplies
            in float32 accuracy where this says HIGHEST (or HIGH, for float32 inputs), else 16-bit numbers.
        residuals: "recompute" saves the inputs and the states between chunks for the gradient, "keep" also what
            the chunks computed on the way: faster, more memory. Of "mosaic": the inputs, the states between parts of a
            long sequence, scores and inverses (less than the states between chunks), and with "keep" these states, too.
        validate: add `checkify` checks (positive log_decay, NaN, keys that should have unit norm); the caller
            then wraps the function in `checkify.checkify`, inside the gradient if there is one. A tool for
            looking for faults: the gradient takes more memory, and there is none with "mosaic".
    Returns:
        out [B, T, HV, V] in q's dtype, and the final state [B, HV, K, V].
    Raises:
        ValueError: an argument does not fit; the message names it.
        NotImplementedError: implementation="mosaic" cannot run here, or is differentiated twice or in forward mode;
            the message says why.

    Everything is differentiable; twice in reverse mode with "xla" and "scan"; forward mode needs "scan".

    >>> import jax, jax.numpy as jnp, qdelta_jax as qd
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 16))
    >>> gates = {"beta": jnp.full((2, 100, 4), 0.5), "log_decay": jnp.full((2, 100, 4), -0.1)}
    >>> out, state = qd.delta_rule(q, qd.l2_normalize(k), v, "gated_delta_net", gates)
    >>> out.shape, state.shape
    ((2, 100, 4, 16), (2, 4, 16, 16))

    Source: chunked WY form, arXiv 2406.06484 and 2412.06464; docs/derivation.md.
    """
    which, gates = get_rule(rule), {} if gates is None else gates
    check_inputs(q, k, v, which, gates, ("B", "T"))
    batch, length, _, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    dtype = compute_dtype(q.dtype)
    state_shape = (batch, value_heads, key_dim, value_dim)
    if initial_state is None:
        initial_state = jnp.zeros(state_shape, dtype)
    check_state("initial_state", initial_state, state_shape, dtype)
    if segment_ids is not None:
        check_segment_ids(segment_ids, (batch, length))
    check_log_decay(gates, None if segment_ids is None else segment_ids != 0)
    if residuals not in ("recompute", "keep"):
        raise ValueError(f"residuals: got {residuals!r}, want 'recompute' or 'keep'")
    options = ChunkOptions(
        scale=check_scale(scale, key_dim),
        chunk_size=check_count("chunk_size", chunk_size),
        precision=check_precision(precision, q.dtype),
        residuals=residuals,
    )
    if validate:
        _checkify(q, k, v, which, gates, segment_ids)
        checkify.check(~jnp.any(jnp.isnan(initial_state)), "initial_state: NaN")
    chosen = resolve_implementation(
        implementation,
        length,
        rule=which,
        q=q,
        k=k,
        v=v,
        gates=gates,
        segment_ids=segment_ids,
        precision=precision,
        validate=validate,
    )
    kernels = mosaic.kernel_options(options, q.dtype) if chosen == "mosaic" else None
    return _run(q, k, v, dict(gates), initial_state, segment_ids, which, chosen, kernels or options, validate)


@partial(jax.jit, static_argnames=("rule", "implementation", "options", "plain"))
def _run(
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    state: Array,
    segment_ids: Array | None,
    rule: Rule,
    implementation: str,
    options: ChunkOptions | mosaic.KernelOptions,
    plain: bool,
) -> tuple[Array, Array]:
    q, k, v, gates, state, segment_ids = _vary_together((q, k, v, gates, state, segment_ids))
    valid, reset = (None, None) if segment_ids is None else segment_masks(segment_ids)
    # checkify cannot be differentiated through a custom_vjp under jit: validated calls leave the gradient to JAX.
    if isinstance(options, mosaic.KernelOptions):
        kernels = mosaic.mosaic_plain if plain else mosaic.mosaic
        out, state = kernels(rule, options, q, k, v, gates, state, valid, reset)
    elif implementation == "xla":
        solve = chunked_plain if plain else chunked
        out, state = solve(rule, options, q, k, v, gates, state, valid, reset)
    else:
        q_c, made = coefficients(rule, q, k, v, gates, valid)
        out, state = recurrence.scan(state, q_c, made, options.scale, valid, reset, options.precision)
    return out.astype(q.dtype), state


def _vary_together(arguments: Any) -> Any:
    """Inside `jax.shard_map`: every argument varies over the mesh axes that any of them varies over.

    A scan wants its state (zeros by default) typed like what is added to it, and a gradient is then summed over the
    devices that share an argument.
    """
    axes = varying(arguments)
    return jax.tree.map(partial(vary, axes=axes), arguments) if axes else arguments


def step(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    scale: float | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array]:
    """One token: S_t = (I - k e^T) Diag(exp(log_decay)) S_{t-1} + k z^T;  o_t = scale * S_t^T q_t.

    Args:
        state: [B, HV, K, V], float32 (float64 for float64 inputs).
        q: [B, H, K]; k: [B, H, K]; v: [B, HV, V]; gates: as in `delta_rule`, without the T axis.
        rule: a name in `RULES`, or a `Rule`.
        scale: of the output; K^-0.5 by default.
        mask: [B] bool; where False the output is 0 and the state stays (a finished or padded sequence).
    Returns:
        o_t [B, HV, V] in q's dtype, and the new state.
    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    which, gates = get_rule(rule), {} if gates is None else gates
    check_inputs(q, k, v, which, gates, ("B",))
    batch, _, key_dim = q.shape
    check_state("state", state, (batch, v.shape[1], key_dim, v.shape[2]), compute_dtype(q.dtype))
    if mask is not None:
        check_mask(mask, batch)
    check_log_decay(gates, mask)
    scale = check_scale(scale, key_dim)
    state, q, k, v, gates, mask = _vary_together((state, q, k, v, dict(gates), mask))
    q, k, v, gates = jax.tree.map(lambda x: x[:, None], (q, k, v, gates))
    valid = None if mask is None else mask[:, None]
    q_c, made = coefficients(which, q, k, v, gates, valid)
    precision = check_precision(None, q.dtype)
    out, state = recurrence.scan(state, q_c, made, scale, valid, None, precision)
    return out[:, 0].astype(q.dtype), state


def segment_final_states(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    segment_ids: Array,
    num_segments: int,
    max_length: int | None = None,
    initial_state: Array | None = None,
    **options: Any,
) -> Array:
    """The state after the last token of each packed segment, [B, num_segments, HV, K, V].

    Segments count in order of appearance; a row with fewer of them has zeros behind its last one. The first
    continues `initial_state`. Each segment runs as its own row, so one call costs B * num_segments * max_length
    tokens.

    Args:
        q, k, v, rule, gates, options: as in `delta_rule`.
        segment_ids: [B, T] int, 0 for padding.
        num_segments: how many to return (a compile-time constant).
        max_length: tokens in the longest segment, padding inside it included; T by default. A longer segment is
            cut there.
    Raises:
        ValueError: as `delta_rule`; num_segments or max_length is no integer of at least 1.
    """
    check_inputs(q, k, v, get_rule(rule), gates or {}, ("B", "T"))
    batch, length, _, key_dim = q.shape
    num_segments = check_count("num_segments", num_segments)
    max_length = length if max_length is None else check_count("max_length", max_length)
    check_segment_ids(segment_ids, (batch, length))
    if initial_state is not None:
        check_state("initial_state", initial_state, (batch, v.shape[2], key_dim, v.shape[3]), compute_dtype(q.dtype))
    # Padding before the first segment belongs to none: it must not use up max_length.
    runs = jnp.where(lax.cummax((segment_ids != 0).astype(jnp.int32), axis=1) > 0, segment_runs(segment_ids), -1)
    number = jnp.arange(num_segments, dtype=runs.dtype)
    start = jax.vmap(lambda row: jnp.searchsorted(row, number, side="left"))(runs)
    index = start[:, :, None] + jnp.arange(max_length, dtype=start.dtype)[None, None]
    inside = index < length
    index = jnp.minimum(index, length - 1)
    rows = jnp.arange(batch)[:, None, None]
    inside &= (runs[rows, index] == number[None, :, None]) & (segment_ids[rows, index] != 0)

    def unpack(x: Array) -> Array:
        return x[rows, index].reshape(batch * num_segments, max_length, *x.shape[2:])

    state = None
    if initial_state is not None:
        rest = jnp.zeros((batch, num_segments - 1, *initial_state.shape[1:]), initial_state.dtype)
        state = jnp.concatenate([initial_state[:, None], rest], axis=1).reshape(-1, *initial_state.shape[1:])
    ids = inside.astype(jnp.int32).reshape(batch * num_segments, max_length)
    q, k, v, gates = jax.tree.map(unpack, (q, k, v, dict(gates or {})))
    _, final = delta_rule(
        q,
        k,
        v,
        rule,
        gates,
        initial_state=state,
        segment_ids=ids,
        **options,
    )
    return final.reshape(batch, num_segments, *final.shape[1:])


def _checkify(q: Array, k: Array, v: Array, rule: Rule, gates: Mapping[str, Array], segment_ids: Array | None) -> None:
    """The checks of `validate=True`, on tokens that are not padding."""
    valid = jnp.ones(q.shape[:2], bool) if segment_ids is None else segment_ids != 0

    def real(x: Array) -> Array:
        return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)

    for name, x in {"q": q, "k": k, "v": v, **{f"gates[{n!r}]": x for n, x in gates.items()}}.items():
        checkify.check(~jnp.any(jnp.isnan(real(x))), f"{name}: NaN in a token that is not padding")
    if "log_decay" in gates:
        checkify.check(jnp.all(real(gates["log_decay"]) <= 0), "gates['log_decay']: want log_decay <= 0")
    if rule.normalize:
        norm = jnp.linalg.norm(real(k).astype(compute_dtype(k.dtype)), axis=-1)
        fits = jnp.all((jnp.abs(norm - 1) < 2e-2) | (norm < 1e-3))
        checkify.check(fits, f"k: rule {rule.name!r} wants keys of unit norm (qdelta_jax.l2_normalize)")
