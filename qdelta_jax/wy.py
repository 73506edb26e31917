"""The mathematics of one group of chunks: solve, states, output and the gradient. Symbols as in docs/derivation.md."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qdelta_jax import decay, products
from qdelta_jax.affine import affine_states
from qdelta_jax.plan import ChunkOptions, Plan
from qdelta_jax.plan import split as split_chunks
from qdelta_jax.rules import Coefficients
from qdelta_jax.triangular import unit_lower_inverse


class Boundary(NamedTuple):
    """Decay between tokens and the ends of their chunk, masked by segment: what math calls Gamma, tail, gamma."""

    gamma_in: Array  # [..., C, D]  exp(prefix): from the state before the chunk to token i
    tail: Array  # [..., C, D]  exp(suffix): from token i to the state after the chunk
    carry: Array  # [..., D, 1]  exp(total): from the state before to the state after


class Chunks(NamedTuple):
    """One group of chunks, [n, B, H, C, .]."""

    q: Array
    k: Array
    e: Array | None
    z: Array
    sums: decay.DecaySums
    factor: Array | None  # decay between two tokens [n, B, H, C, C], where there is one decay per head
    boundary: Boundary
    same: Array | None  # [n, B, 1, C, C] bool: both tokens in one segment


class Solved(NamedTuple):
    """What the solve of a group computes before the states are known.

    W is kept negated: products then only ever add, which a matrix library does in the same pass.
    """

    scores: Array  # P
    lower: Array | None  # L
    inverse: Array | None  # A
    u_free: Array  # A Z
    minus_w: Array | None  # -A (Gamma E)


def make_chunks(q: Array, made: Coefficients, reset: Array | None, plan: Plan) -> Chunks:
    split = partial(split_chunks, plan=plan)
    k, e, z, log_decay = made
    if log_decay is None:
        log_decay = jnp.zeros_like(k[..., :1])
    sums = decay.decay_sums(split(log_decay))
    gamma_in, tail = jnp.exp(sums.prefix), jnp.exp(sums.suffix)
    carry = jnp.swapaxes(jnp.exp(sums.total), -1, -2)
    same = None
    if reset is not None:
        run = jnp.cumsum(split(reset[:, :, None, None].astype(jnp.int32))[..., 0], axis=-1)  # [n, B, 1, C]
        last = run[..., -1:]
        gamma_in = jnp.where((run == 0)[..., None], gamma_in, 0)
        tail = jnp.where((run == last)[..., None], tail, 0)
        carry = jnp.where((last == 0)[..., None], carry, 0)
        same = run[..., :, None] == run[..., None, :]
    boundary = Boundary(gamma_in, tail, carry)
    factor = decay.decay_matrix(sums) if log_decay.shape[-1] == 1 else None
    return Chunks(split(q), split(k), None if e is None else split(e), split(z), sums, factor, boundary, same)


def _inside(pairs: Array, chunks: Chunks, diagonal: int) -> Array:
    """Keeps the pairs of one segment with j <= i (diagonal 0) or j < i (diagonal -1)."""
    pairs = jnp.where(decay.lower_mask(pairs.shape[-1], diagonal), pairs, 0)
    return pairs if chunks.same is None else jnp.where(chunks.same, pairs, 0)


def solve(chunks: Chunks, precision: Any) -> Solved:
    q, k, e = chunks.q, chunks.k, chunks.e

    def decayed(x: Array) -> Array:
        if chunks.factor is None:
            return decay.channel_scores(chunks.sums, x, k, precision)
        return chunks.factor * products.scores(x, k, precision)

    scores = _inside(decayed(q), chunks, 0)
    if e is None:
        return Solved(scores, None, None, chunks.z, None)
    lower = _inside(decayed(e), chunks, -1)
    inverse = unit_lower_inverse(lower)
    u_free = products.rows(inverse, chunks.z, precision)
    minus_w = products.rows(inverse, -chunks.boundary.gamma_in * e, precision)
    return Solved(scores, lower, inverse, u_free, minus_w)


def transition(chunks: Chunks, solved: Solved, precision: Any) -> Array:
    """M = Diag(gamma) - (tail k)^T W, or the diagonal alone where nothing is erased."""
    carry = chunks.boundary.carry
    if solved.minus_w is None:
        return carry
    identity = np.eye(chunks.k.shape[-1], dtype=bool)
    written = products.columns(chunks.boundary.tail * chunks.k, solved.minus_w, precision)
    return jnp.where(identity, written + carry, written)


def read_states(chunks: Chunks, states: Array, precision: Any) -> Array:
    """(Gamma q) S; one decay per head may wait until after the product, in the same pass as what follows."""
    gamma_in = chunks.boundary.gamma_in
    if chunks.factor is not None:
        return gamma_in * products.rows(chunks.q, states, precision)
    return products.rows(gamma_in * chunks.q, states, precision)


def corrected(solved: Solved, states: Array, precision: Any) -> Array:
    """U = A Z - W S."""
    if solved.minus_w is None:
        return solved.u_free
    return products.rows(solved.minus_w, states, precision) + solved.u_free


def group_backward(
    options: ChunkOptions,
    parallel: bool,
    chunks: Chunks,
    solved: Solved,
    states: Array,
    d_out: Array,
    d_end: Array,
) -> tuple[Array, Coefficients, Array]:
    """Gradients of q, of the coefficients (chunk layout) and of the state before the group."""
    precision = options.precision
    rows, columns, scores = (
        partial(f, precision=precision) for f in (products.rows, products.columns, products.scores)
    )
    q, k, e, sums = chunks.q, chunks.k, chunks.e, chunks.sums
    gamma_in, tail, carry = chunks.boundary
    u = corrected(solved, states, precision)
    d_out = options.scale * d_out
    tail_k = tail * k

    # Back through the states: dU = P^T dO + (tail k) dS',  dS = M^T dS' + (Gamma q)^T dO - W^T P^T dO.
    d_u = columns(solved.scores, d_out)
    added = columns(gamma_in * q, d_out)
    if solved.minus_w is not None:
        added = columns(solved.minus_w, d_u) + added
    moves = transition(chunks, solved, precision)
    d_after, d_start = affine_states(moves, added, d_end, parallel=parallel, precision=precision, transposed=True)
    d_u = rows(tail_k, d_after) + d_u

    # U = A R with R = Z - (Gamma E) S:  dR = dZ = A^T dU,  dL = -tril(dR U^T).
    d_z = d_u if solved.inverse is None else columns(solved.inverse, d_u)
    pairs = [(q, _inside(scores(d_out, u), chunks, 0))]

    # Reads of the state before the chunk, writes into the state after it.
    d_q = gamma_in * scores(d_out, states)
    d_k = tail * scores(u, d_after)
    d_prefix, d_suffix, d_e = q * d_q, k * d_k, None
    d_total = carry * jnp.sum(states * d_after, axis=-1, keepdims=True)
    if e is not None:
        d_e = -gamma_in * scores(d_z, states)
        d_prefix = d_prefix + e * d_e
        pairs.append((e, -_inside(scores(d_z, u), chunks, -1)))

    # Scores inside the chunk.
    if chunks.factor is not None:
        d_x, d_pair_k, d_log_decay = _scalar_pairs(chunks, chunks.factor, solved, pairs, precision)
        d_levels = tuple(jnp.zeros_like(a) for a in sums.levels)
        d_prefix, d_suffix = (jnp.sum(x, axis=-1, keepdims=True) for x in (d_prefix, d_suffix))
        d_total = jnp.sum(d_total, axis=-2, keepdims=True)
    else:
        d_x, d_pair_k, d_levels = decay.channel_scores_backward(sums, pairs, k, precision)
        d_log_decay = jnp.zeros_like(sums.prefix)
    d_e = None if d_e is None else d_e + d_x[1]
    d_sums = decay.DecaySums(d_levels, d_prefix, d_suffix, jnp.swapaxes(d_total, -1, -2))
    (through_sums,) = jax.linear_transpose(decay.decay_sums, sums.prefix)(d_sums)
    return d_q + d_x[0], Coefficients(d_k + d_pair_k, d_e, d_z, d_log_decay + through_sums), d_start


def _scalar_pairs(
    chunks: Chunks, factor: Array, solved: Solved, pairs: list[tuple[Array, Array]], precision: Any
) -> tuple[list[Array], Array, Array]:
    """Gradients of each x, of k and of log_decay from those of the scores, one decay per head."""
    weighted = [factor * d for _, d in pairs]
    d_x = [products.rows(w, chunks.k, precision) for w in weighted]
    d_k = products.columns(weighted[0], pairs[0][0], precision)
    between = solved.scores * pairs[0][1]
    if solved.lower is not None:
        d_k = products.columns(weighted[1], pairs[1][0], precision) + d_k
        between = between + solved.lower * pairs[1][1]
    return d_x, d_k, decay.crossing_sums(between, precision)
