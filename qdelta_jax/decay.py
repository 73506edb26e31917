"""Decay factors inside a chunk, and the decayed scores L and P with their gradients.

Every exponent is a sum of log-decays between two tokens, built by additions of non-positive numbers alone: nothing
is subtracted (so no digits are lost and -inf is exact), and nothing positive is ever exponentiated. This works by
levels: level s cuts the chunk into blocks of 2s tokens; a pair (i, j) with i in the second half and j in the first
half of one block has the exponent a[i] + a[j], where a[i] sums the log-decays after the block's middle up to i, and
a[j] those after j up to the middle. Each pair j < i belongs to exactly one level.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from qdelta_jax import products

BLOCK = 8
"""Channel decay: levels inside blocks of this many tokens are masked products of the whole block."""


class DecaySums(NamedTuple):
    """Sums of log_decay [..., C, D] (D = 1 or K) inside a chunk of C tokens.

    levels: for s = 1, 2, 4 .. C/2, the a of the module's text, [..., C, D].
    prefix: over tokens up to and including i.   suffix: over the tokens after i.   total: over all, [..., 1, D].
    """

    levels: tuple[Array, ...]
    prefix: Array
    suffix: Array
    total: Array


def decay_sums(log_decay: Array) -> DecaySums:
    """All sums of a chunk by doubling; linear in log_decay."""
    *lead, size, dim = log_decay.shape
    prefix, suffix, levels = log_decay, jnp.zeros_like(log_decay), []
    half = 1
    while half < size:
        shape = (*lead, size // (2 * half), 2, half, dim)
        first, second = (x[..., 0, :, :] for x in (suffix.reshape(shape), prefix.reshape(shape)))
        prefix_2, suffix_2 = prefix.reshape(shape)[..., 1, :, :], suffix.reshape(shape)[..., 1, :, :]
        prefix_1 = second
        total_1, total_2 = prefix_1[..., -1:, :], prefix_2[..., -1:, :]
        levels.append(_join(first, prefix_2).reshape(log_decay.shape))
        prefix = _join(prefix_1, prefix_2 + total_1).reshape(log_decay.shape)
        suffix = _join(first + total_2, suffix_2).reshape(log_decay.shape)
        half *= 2
    return DecaySums(tuple(levels), prefix, suffix, prefix[..., -1:, :])


def _join(first: Array, second: Array) -> Array:
    return jnp.concatenate([first, second], axis=-2)


def level_mask(size: int, half: int) -> np.ndarray:
    """[size, size] bool: the pairs (row, column) of level `half`. A constant, so that no kernel computes it."""
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    same = row // (2 * half) == column // (2 * half)
    return same & (row % (2 * half) >= half) & (column % (2 * half) < half)


def lower_mask(size: int, diagonal: int) -> np.ndarray:
    """[size, size] bool: the pairs row >= column - diagonal."""
    return np.tril(np.ones((size, size), bool), diagonal)


# One decay per head: the decay is a factor of the score.


def decay_matrix(sums: DecaySums) -> Array:
    """exp of the log-decay between tokens j and i, [..., C, C]; 0 above the diagonal."""
    size = sums.prefix.shape[-2]
    shape = (*sums.prefix.shape[:-1], size)
    factor = jnp.broadcast_to(jnp.eye(size, dtype=sums.prefix.dtype), shape)
    for level, a in enumerate(sums.levels):
        x = lax.optimization_barrier(jnp.exp(a))  # else XLA takes the exponential of every pair anew
        factor = jnp.where(level_mask(size, 2**level), x * jnp.swapaxes(x, -1, -2), factor)
    return factor


def crossing_sums(pairs: Array, precision: lax.PrecisionLike) -> Array:
    """For each token t the sum of pairs[i, j] over i >= t > j, [..., C, C] -> [..., C, 1].

    The transpose of "log_decay at t counts for every pair that it lies between". Nothing cancels here that does not
    cancel in the gradient itself, so the precision of all other products is enough.
    """
    size = pairs.shape[-1]
    before = jnp.asarray(lower_mask(size, -1).T, pairs.dtype)  # [j, t]: j < t
    left = products.rows(pairs, before, precision)
    return jnp.sum(jnp.where(lower_mask(size, 0), left, 0), axis=-2)[..., None]


# One decay per key channel: the decay is inside the sum over channels, level by level.


def _halves(x: Array, half: int) -> tuple[Array, Array]:
    x = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * half), 2, half, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _blocks(x: Array, block: int) -> Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] // block, block, x.shape[-1])


def _unblock(x: Array) -> Array:
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def channel_scores(sums: DecaySums, x: Array, k: Array, precision: lax.PrecisionLike) -> Array:
    """sum_d x_id k_jd exp(G_id - G_jd) for j <= i, 0 elsewhere: [..., C, K] twice -> [..., C, C]."""
    size = x.shape[-2]
    block = min(BLOCK, size)
    x_b, k_b = _blocks(x, block), _blocks(k, block)
    own = jnp.sum(x_b * k_b, axis=-1, keepdims=True)
    scores = jnp.where(np.eye(block, dtype=bool), own, 0)
    half, levels = 1, iter(sums.levels)
    while half < block:
        factor = _blocks(jnp.exp(next(levels)), block)
        product = products.scores(x_b * factor, k_b * factor, precision)
        scores = jnp.where(level_mask(block, half), product, scores)
        half *= 2
    while half < size:
        first, second = _halves(jnp.exp(next(levels)), half)
        cross = products.scores(_halves(x, half)[1] * second, _halves(k, half)[0] * first, precision)
        scores = lower_pairs(scores[..., 0::2, :, :], cross, scores[..., 1::2, :, :])
        half *= 2
    return scores.reshape(*x.shape[:-1], size)


def channel_scores_backward(
    sums: DecaySums, pairs: list[tuple[Array, Array]], k: Array, precision: lax.PrecisionLike
) -> tuple[list[Array], Array, tuple[Array, ...]]:
    """Gradients through `channel_scores` of several x with one k.

    Args:
        pairs: each x [..., C, K] with the gradient of its scores [..., C, C], masked.
    Returns:
        Gradients of each x, of k and of each level of sums.
    """
    size = k.shape[-2]
    block = min(BLOCK, size)
    own = [jnp.diagonal(d, axis1=-2, axis2=-1)[..., None] for _, d in pairs]
    d_x, d_levels = [d * k for d in own], []
    d_k = sum(d * x for d, (x, _) in zip(own, pairs, strict=True))
    for level, a in enumerate(sums.levels):
        half = 2**level
        width = max(block, 2 * half)
        factor = jnp.exp(_blocks(a, width))
        k_w = _blocks(k, width)
        inside = half < block
        part_k, d_a = jnp.zeros_like(k_w), jnp.zeros_like(k_w)
        for i, (x, d) in enumerate(pairs):
            x_w, d = _blocks(x, width), diagonal_blocks(d, width)
            if inside:
                d = jnp.where(level_mask(block, half), d, 0)
                part = factor * products.rows(d, factor * k_w, precision)
                part_k += factor * products.columns(d, factor * x_w, precision)
            else:
                d, upper, lower = d[..., half:, :half], slice(0, half), slice(half, None)
                zero = jnp.zeros_like(k_w[..., upper, :])
                seen = products.rows(d, (factor * k_w)[..., upper, :], precision)
                part = _join(zero, factor[..., lower, :] * seen)
                seen = products.columns(d, (factor * x_w)[..., lower, :], precision)
                part_k += _join(factor[..., upper, :] * seen, zero)
            d_x[i] += _unblock(part)
            d_a += x_w * part
        d_k += _unblock(part_k)
        d_levels.append(_unblock(d_a + k_w * part_k))
    return d_x, d_k, tuple(d_levels)


def lower_pairs(top: Array, cross: Array, bottom: Array) -> Array:
    """[[top, 0], [cross, bottom]] of square blocks."""
    return _join(jnp.concatenate([top, jnp.zeros_like(cross)], -1), jnp.concatenate([cross, bottom], -1))


def diagonal_blocks(matrix: Array, block: int) -> Array:
    """[..., C, C] -> [..., C/block, block, block], the blocks on the diagonal."""
    count = matrix.shape[-1] // block
    rows = [matrix[..., i * block : (i + 1) * block, i * block : (i + 1) * block] for i in range(count)]
    return jnp.stack(rows, axis=-3)
