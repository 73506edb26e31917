"""The chunked WY solver: C tokens at once, with a hand-written gradient that goes through the rule's own gates.

Per chunk, with the decay factors of decay.py (docs/derivation.md derives it):

    L_ij = sum_d e_id k_jd exp(G_id - G_jd)  (j < i)        A = (I + L)^-1
    P_ij = sum_d q_id k_jd exp(G_id - G_jd)  (j <= i)
    U = A (Z - (Gamma E) S)                                 W = A (Gamma E)
    O = scale ((Gamma q) S + P U)                           S' = gamma S + (tail k)^T U

The sequence is cut into groups of chunks. Within a group everything but the states is computed for all chunks at
once; groups follow one another in a `lax.scan`, so that memory does not grow with more than the inputs, the outputs
and one state per chunk.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from qdelta_jax import decay
from qdelta_jax.affine import affine_states
from qdelta_jax.checks import compute_dtype
from qdelta_jax.rules import Coefficients, Rule
from qdelta_jax.triangular import unit_lower_inverse


@dataclass(frozen=True)
class ChunkOptions:
    """What is fixed at compile time."""

    scale: float
    chunk_size: int = 64
    precision: Any = None
    residuals: str = "recompute"
    group_tokens: int | None = None
    parallel_states: bool | None = None


def coefficients(
    rule: Rule, q: Array, k: Array, v: Array, gates: dict[str, Array], valid: Array | None
) -> tuple[Array, Coefficients]:
    """q and the rule's k, e, z, log_decay, [B, T, HV, ...] in float32 (float64), padding made harmless.

    Padding is replaced before the rule and masked after it, so that nothing in it, NaN included, gets into a value
    or a gradient.
    """
    dtype, heads = compute_dtype(q.dtype), v.shape[2]
    gates = {
        name: x[..., None] if x.ndim == 3 else x for name, x in gates.items()
    }  # per head [B,T,H] -> [B,T,H,1]

    def prepare(x: Array) -> Array:
        x = x if valid is None else jnp.where(valid[:, :, None, None], x, 0)
        x = x.astype(dtype)
        return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)

    q, k, v, gates = jax.tree.map(prepare, (q, k, v, gates))
    made = rule(q, k, v, **gates)
    _check_coefficients(rule, made, k, v)
    if valid is not None:
        made = jax.tree.map(lambda x: jnp.where(valid[:, :, None, None], x, 0), made)
    return q, made


def _check_coefficients(rule: Rule, made: Coefficients, k: Array, v: Array) -> None:
    if not isinstance(made, Coefficients):
        raise ValueError(f"rule {rule.name!r}: the function returned {type(made).__name__}, want Coefficients")
    head = (*k.shape[:-1], 1)
    wanted = {"k": [k.shape], "e": [k.shape], "z": [v.shape], "log_decay": [head, k.shape]}
    for name, x in made._asdict().items():
        if x is None and name in ("e", "log_decay"):
            continue
        if getattr(x, "shape", None) not in wanted[name] or x.dtype != k.dtype:
            raise ValueError(
                f"rule {rule.name!r}: {name} has shape {getattr(x, 'shape', None)} and dtype "
                f"{getattr(x, 'dtype', None)}, want {' or '.join(map(str, wanted[name]))} and {k.dtype}"
            )


class Boundary(NamedTuple):
    """Decay between tokens and the ends of their chunk, masked by segment: what math calls Gamma, tail, gamma."""

    gamma_in: Array  # [..., C, D]  exp(prefix): from the state before the chunk to token i
    tail: Array  # [..., C, D]  exp(suffix): from token i to the state after the chunk
    carry: Array  # [..., D, 1]  exp(total): from the state before to the state after


class Chunks(NamedTuple):
    """One group of chunks, [B, H, n, C, .]."""

    q: Array
    k: Array
    e: Array | None
    z: Array
    sums: decay.DecaySums
    boundary: Boundary
    same: Array | None  # [B, 1, n, C, C] bool: both tokens in one segment


class Solved(NamedTuple):
    """What the solve of a group computes before the states are known."""

    scores: Array  # P
    lower: Array | None  # L
    inverse: Array | None  # A
    u_free: Array  # A Z
    w: Array | None  # A (Gamma E)


def _make_chunks(q: Array, made: Coefficients, reset: Array | None, size: int) -> Chunks:
    def split(x: Array) -> Array:  # [B, n*C, H, D] -> [B, H, n, C, D]
        x = x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:])
        return x.transpose(0, 3, 1, 2, 4)

    k, e, z, log_decay = made
    if log_decay is None:
        log_decay = jnp.zeros((*k.shape[:-1], 1), k.dtype)
    sums = decay.decay_sums(split(log_decay))
    gamma_in, tail = jnp.exp(sums.prefix), jnp.exp(sums.suffix)
    carry = jnp.swapaxes(jnp.exp(sums.total), -1, -2)
    same = None
    if reset is not None:
        run = jnp.cumsum(split(reset[:, :, None, None].astype(jnp.int32))[..., 0], axis=-1)  # [B, 1, n, C]
        last = run[..., -1:]
        gamma_in = jnp.where((run == 0)[..., None], gamma_in, 0)
        tail = jnp.where((run == last)[..., None], tail, 0)
        carry = jnp.where((last == 0)[..., None], carry, 0)
        same = run[..., :, None] == run[..., None, :]
    erase = None if e is None else split(e)
    return Chunks(split(q), split(k), erase, split(z), sums, Boundary(gamma_in, tail, carry), same)


def _scores(x: Array, chunks: Chunks, factor: Array | None, precision: Any) -> Array:
    """Decayed products of x with the keys, strictly below the diagonal and inside segments."""
    if factor is not None:
        scores = factor * _mm("...id,...jd->...ij", x, chunks.k, precision)
    else:
        scores = decay.channel_scores(chunks.sums, x, chunks.k, precision)
    size = scores.shape[-1]
    inside = jnp.tril(jnp.ones((size, size), bool), -1)
    inside = inside if chunks.same is None else inside & chunks.same
    return jnp.where(inside, scores, 0)


def _mm(spec: str, a: Array, b: Array, precision: Any) -> Array:
    return jnp.einsum(spec, a, b, precision=precision)


def _decay_factor(chunks: Chunks) -> Array | None:
    return decay.decay_matrix(chunks.sums) if chunks.sums.prefix.shape[-1] == 1 else None


def _diagonal(x: Array) -> Array:
    return x[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)


def _solve(chunks: Chunks, precision: Any) -> Solved:
    factor = _decay_factor(chunks)
    own = jnp.sum(chunks.q * chunks.k, axis=-1)
    scores = _scores(chunks.q, chunks, factor, precision) + _diagonal(own)
    if chunks.e is None:
        return Solved(scores, None, None, chunks.z, None)
    lower = _scores(chunks.e, chunks, factor, precision)
    inverse = unit_lower_inverse(lower)
    u_free = _mm("...ij,...jv->...iv", inverse, chunks.z, precision)
    w = _mm("...ij,...jd->...id", inverse, chunks.boundary.gamma_in * chunks.e, precision)
    return Solved(scores, lower, inverse, u_free, w)


def _states(
    chunks: Chunks, solved: Solved, start: Array, parallel: bool, precision: Any
) -> tuple[Array, Array]:
    """State before each chunk of the group [B, H, n, K, V], and the one after the last."""
    tail_k = chunks.boundary.tail * chunks.k
    added = _mm("...cd,...cv->...dv", tail_k, solved.u_free, precision)
    return affine_states(
        chunks.boundary.carry, tail_k, solved.w, added, start, parallel=parallel, precision=precision
    )


def _corrected(solved: Solved, states: Array, precision: Any) -> Array:
    """U = A Z - W S."""
    if solved.w is None:
        return solved.u_free
    return solved.u_free - _mm("...cd,...dv->...cv", solved.w, states, precision)


def _read_out(
    options: ChunkOptions, chunks: Chunks, scores: Array, u: Array, states: Array
) -> Array:
    inter = _mm("...cd,...dv->...cv", chunks.boundary.gamma_in * chunks.q, states, options.precision)
    return options.scale * (inter + _mm("...ij,...jv->...iv", scores, u, options.precision))


def _merge(x: Array) -> Array:
    """[B, H, n, C, D] -> [B, n*C, H, D]"""
    x = x.transpose(0, 2, 3, 1, 4)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _group_backward(
    options: ChunkOptions,
    parallel: bool,
    chunks: Chunks,
    solved: Solved,
    states: Array,
    d_out: Array,
    d_end: Array,
) -> tuple[Array, Coefficients, Array]:
    """Gradients of q, of the coefficients (chunk layout) and of the state before the group."""
    precision, scale = options.precision, options.scale
    q, k, e, z, sums, (gamma_in, tail, carry), _ = chunks
    mm = partial(_mm, precision=precision)
    u = _corrected(solved, states, precision)
    d_out = scale * d_out
    read_q, tail_k = gamma_in * q, tail * k

    # Back through the states: dU = P^T dO + (tail k) dS',  dS = gamma dS' + (Gamma q)^T dO - W^T dU.
    d_u_local = mm("...ij,...iv->...jv", solved.scores, d_out)
    added = mm("...cd,...cv->...dv", read_q, d_out)
    if solved.w is not None:
        added = added - mm("...cd,...cv->...dv", solved.w, d_u_local)
    d_after, d_start = affine_states(
        carry, solved.w, tail_k, added, d_end, reverse=True, parallel=parallel, precision=precision
    )
    d_u = d_u_local + mm("...cd,...dv->...cv", tail_k, d_after)

    # R = Z - (Gamma E) S, U = A R:  dR = A^T dU,  dL = -tril(dR U^T).
    d_z = d_u if solved.inverse is None else mm("...ij,...iv->...jv", solved.inverse, d_u)
    d_p = mm("...iv,...jv->...ij", d_out, u)
    d_own = jnp.diagonal(d_p, axis1=-2, axis2=-1)[..., None]
    d_scores = _strictly_inside(d_p, chunks)
    d_lower = None if e is None else -_strictly_inside(mm("...iv,...jv->...ij", d_z, u), chunks)

    # Reads of the state before the chunk, writes into the state after it.
    d_read_q = gamma_in * mm("...cv,...dv->...cd", d_out, states)
    d_tail_k = tail * mm("...cv,...dv->...cd", u, d_after)
    d_prefix = q * d_read_q
    d_q, d_k, d_e = d_read_q + d_own * k, d_tail_k + d_own * q, None
    if e is not None:
        d_read_e = -gamma_in * mm("...cv,...dv->...cd", d_z, states)
        d_prefix = d_prefix + e * d_read_e
        d_e = d_read_e
    d_suffix = k * d_tail_k
    d_total = carry * jnp.sum(states * d_after, axis=-1, keepdims=True)

    # Scores inside the chunk.
    pairs = [(q, d_scores)] if e is None else [(q, d_scores), (e, d_lower)]
    if sums.prefix.shape[-1] == 1:
        factor = decay.decay_matrix(sums)
        d_x = [mm("...ij,...jd->...id", factor * d, k) for _, d in pairs]
        d_k = d_k + sum(mm("...ij,...id->...jd", factor * d, x) for x, d in pairs)
        weighted = solved.scores * d_scores
        if e is not None:
            weighted = weighted + solved.lower * d_lower
        d_log_decay = decay.crossing_sums(weighted)
        d_levels = tuple(jnp.zeros_like(a) for a in sums.levels)
        d_prefix, d_suffix = (jnp.sum(x, axis=-1, keepdims=True) for x in (d_prefix, d_suffix))
        d_total = jnp.sum(d_total, axis=-2, keepdims=True)
    else:
        d_x, d_log_decay = [], jnp.zeros_like(sums.prefix)
        d_levels = tuple(jnp.zeros_like(a) for a in sums.levels)
        for x, d in pairs:
            part_x, part_k, part_levels = decay.channel_scores_backward(sums, x, k, d, precision)
            d_x.append(part_x)
            d_k = d_k + part_k
            d_levels = tuple(a + b for a, b in zip(d_levels, part_levels, strict=True))
    d_q = d_q + d_x[0]
    if e is not None:
        d_e = d_e + d_x[1]
    d_sums = decay.DecaySums(d_levels, d_prefix, d_suffix, jnp.swapaxes(d_total, -1, -2))
    (through_sums,) = jax.linear_transpose(decay.decay_sums, sums.prefix)(d_sums)
    return d_q, Coefficients(d_k, d_e, d_z, d_log_decay + through_sums), d_start


def _strictly_inside(x: Array, chunks: Chunks) -> Array:
    size = x.shape[-1]
    inside = jnp.tril(jnp.ones((size, size), bool), -1)
    return jnp.where(inside if chunks.same is None else inside & chunks.same, x, 0)


class Plan(NamedTuple):
    """How a sequence is cut: groups of `chunks` chunks of `size` tokens; parallel: states by a tree."""

    groups: int
    chunks: int
    size: int
    parallel: bool


CPU_GROUP = 2048
OTHER_GROUP = 2**19
"""Token-heads of a group: as many as fit the caches of a CPU, or as fill an accelerator."""


def plan(options: ChunkOptions, batch: int, length: int, heads: int) -> Plan:
    """Cuts a sequence; on a CPU into small groups with states one after the other, else into few large ones."""
    on_cpu = jax.default_backend() == "cpu"
    size = 1 << (min(options.chunk_size, length) - 1).bit_length()
    total = -(-length // size)
    budget = options.group_tokens or (CPU_GROUP if on_cpu else OTHER_GROUP)
    groups = -(-total // max(1, budget // (batch * heads * size)))
    parallel = not on_cpu if options.parallel_states is None else options.parallel_states
    return Plan(groups, -(-total // groups), size, parallel)


def _grouped(plan: Plan, x: Any) -> Any:
    """[B, T, ...] -> [groups, B, tokens of a group, ...], zeros (False) behind the end."""
    tokens = plan.chunks * plan.size

    def cut(x: Array) -> Array:
        behind = plan.groups * tokens - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, behind), *[(0, 0)] * (x.ndim - 2))) if behind else x
        return jnp.moveaxis(x.reshape(x.shape[0], plan.groups, tokens, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, x)


def _ungrouped(x: Any, length: int) -> Any:
    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, x)


def _setup(options: ChunkOptions, v: Array, valid: Array | None) -> tuple[Plan, Array | None]:
    batch, length, heads, _ = v.shape
    cut = plan(options, batch, length, heads)
    if valid is None and cut.groups * cut.chunks * cut.size != length:
        valid = jnp.ones((batch, length), bool)
    return cut, valid


def _forward(
    rule: Rule,
    options: ChunkOptions,
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    state: Array,
    valid: Array | None,
    reset: Array | None,
) -> tuple[tuple[Array, Array], tuple[Array, Solved | None]]:
    """((out, final state), (states between chunks, what "keep" keeps))."""
    cut, valid = _setup(options, v, valid)

    def body(start: Array, item: tuple) -> tuple[Array, tuple]:
        q_g, k_g, v_g, gates_g, valid_g, reset_g = item
        chunks = _make_chunks(*coefficients(rule, q_g, k_g, v_g, gates_g, valid_g), reset_g, cut.size)
        solved = _solve(chunks, options.precision)
        states, end = _states(chunks, solved, start, cut.parallel, options.precision)
        u = _corrected(solved, states, options.precision)
        out = _read_out(options, chunks, solved.scores, u, states)
        return end, (_merge(out).astype(q.dtype), states, solved if options.residuals == "keep" else None)

    end, (out, states, kept) = lax.scan(body, state, _grouped(cut, (q, k, v, gates, valid, reset)))
    out = _ungrouped(out, q.shape[1])
    if valid is not None:
        out = jnp.where(valid[:, :, None, None], out, 0)
    return (out, end), (states, kept)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked(
    rule: Rule,
    options: ChunkOptions,
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    state: Array,
    valid: Array | None,
    reset: Array | None,
) -> tuple[Array, Array]:
    """The recurrence over [B, T, H, .] inputs, chunk by chunk; arguments as checked by `delta_rule`.

    Returns:
        out [B, T, HV, V] in q's dtype and the final state [B, HV, K, V].
    """
    return _forward(rule, options, q, k, v, gates, state, valid, reset)[0]


def _chunked_forward(
    rule: Rule, options: ChunkOptions, q: Array, k: Array, v: Array, gates: dict, state: Array, *masks: Any
) -> tuple[tuple[Array, Array], tuple]:
    result, (states, kept) = _forward(rule, options, q, k, v, gates, state, *masks)
    states = checkpoint_name(states, "delta_rule_states")
    kept = checkpoint_name(kept, "delta_rule_kept")
    return result, (q, k, v, gates, *masks, states, kept)


def _chunked_backward(rule: Rule, options: ChunkOptions, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, gates, valid, reset, states, kept = saved
    d_out, d_end = cotangents
    cut, valid = _setup(options, v, valid)
    if valid is not None:
        d_out = jnp.where(valid[:, :, None, None], d_out, 0)

    def body(d_end: Array, item: tuple) -> tuple[Array, tuple]:
        (q_g, k_g, v_g, gates_g, valid_g, reset_g, d_out_g), states_g, kept_g = item
        (q_c, made), pull_back = jax.vjp(
            lambda *args: coefficients(rule, *args, valid_g), q_g, k_g, v_g, gates_g
        )
        chunks = _make_chunks(q_c, made, reset_g, cut.size)
        solved = _solve(chunks, options.precision) if kept_g is None else kept_g
        d_out_g = d_out_g.astype(chunks.q.dtype)
        d_out_g = d_out_g.reshape(d_out_g.shape[0], cut.chunks, cut.size, *d_out_g.shape[2:])
        d_q, d_made, d_start = _group_backward(
            options, cut.parallel, chunks, solved, states_g, d_out_g.transpose(0, 3, 1, 2, 4), d_end
        )
        d_made = d_made._replace(log_decay=None if made.log_decay is None else d_made.log_decay)
        return d_start, pull_back(jax.tree.map(_merge, (d_q, d_made)))

    items = (_grouped(cut, (q, k, v, gates, valid, reset, d_out)), states, kept)
    d_start, grads = lax.scan(body, d_end, items, reverse=True)
    return *_ungrouped(grads, q.shape[1]), d_start, None, None


chunked.defvjp(_chunked_forward, _chunked_backward)
