"""Decay factors inside a chunk, and the decayed scores L and P with their gradients.

Every exponent is a sum of log-decays between two tokens, built by additions of non-positive numbers alone: nothing
is subtracted (so no digits are lost and -inf is exact), and nothing positive is ever exponentiated. This works by
levels: level s cuts the chunk into blocks of 2s tokens; a pair (i, j) with i in the second half and j in the first
half of one block has the exponent a[i] + a[j], where a[i] sums the log-decays after the block's middle up to i, and
a[j] those after j up to the middle. Each pair j < i belongs to exactly one level.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 16
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


def level_mask(size: int, half: int) -> Array:
    """[size, size] bool: the pairs (row, column) of level `half`."""
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    return (row // (2 * half) == column // (2 * half)) & (row % (2 * half) >= half) & (column % (2 * half) < half)


def _lower(size: int, diagonal: int) -> Array:
    return jnp.tril(jnp.ones((size, size), bool), diagonal)


# One decay per head: the decay is a factor of the score.


def decay_matrix(sums: DecaySums) -> Array:
    """exp of the log-decay between tokens j and i, [..., C, C]; 0 above the diagonal."""
    size = sums.prefix.shape[-2]
    exponent = jnp.where(jnp.eye(size, dtype=bool), 0.0, -jnp.inf).astype(sums.prefix.dtype)
    for level, a in enumerate(sums.levels):
        pairs = a + jnp.swapaxes(a, -1, -2)
        exponent = jnp.where(level_mask(size, 2**level), pairs, exponent)
    return jnp.exp(exponent)


def crossing_sums(pairs: Array) -> Array:
    """For each token t the sum of pairs[i, j] over i >= t > j, [..., C, C] -> [..., C, 1].

    The transpose of "log_decay at t counts for every pair that it lies between".
    """
    size = pairs.shape[-1]
    before = _lower(size, -1).T.astype(pairs.dtype)  # [j, t]: j < t
    left = jnp.einsum("...ij,jt->...it", pairs, before, precision=lax.Precision.HIGHEST)
    return jnp.sum(jnp.where(_lower(size, 0), left, 0), axis=-2)[..., None]


# One decay per key channel: the decay is inside the sum over channels, level by level.


def _halves(x: Array, half: int) -> tuple[Array, Array]:
    x = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * half), 2, half, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _blocks(x: Array, block: int) -> Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] // block, block, x.shape[-1])


def _unblock(x: Array) -> Array:
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _outer(x: Array, y: Array, precision: lax.PrecisionLike) -> Array:
    return jnp.einsum("...id,...jd->...ij", x, y, precision=precision)


def channel_scores(sums: DecaySums, x: Array, k: Array, precision: lax.PrecisionLike) -> Array:
    """sum_d x_id k_jd exp(G_id - G_jd) for j < i, 0 elsewhere: [..., C, K] twice -> [..., C, C]."""
    size = x.shape[-2]
    block = min(BLOCK, size)
    x_b, k_b = _blocks(x, block), _blocks(k, block)
    scores = jnp.zeros((*x_b.shape[:-1], block), x.dtype)
    half, levels = 1, iter(sums.levels)
    while half < block:
        factor = _blocks(jnp.exp(next(levels)), block)
        product = _outer(x_b * factor, k_b * factor, precision)
        scores = jnp.where(level_mask(block, half), product, scores)
        half *= 2
    while half < size:
        first, second = _halves(jnp.exp(next(levels)), half)
        cross = _outer(_halves(x, half)[1] * second, _halves(k, half)[0] * first, precision)
        top, bottom = scores[..., 0::2, :, :], scores[..., 1::2, :, :]
        zero = jnp.zeros_like(cross)
        scores = _join(jnp.concatenate([top, zero], -1), jnp.concatenate([cross, bottom], -1))
        half *= 2
    return scores.reshape(*x.shape[:-1], size)


def channel_scores_backward(
    sums: DecaySums, x: Array, k: Array, d_scores: Array, precision: lax.PrecisionLike
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Gradients of x, k and each level of sums, from the gradient of `channel_scores`."""
    size = x.shape[-2]
    block = min(BLOCK, size)
    d_x, d_k, d_levels = jnp.zeros_like(x), jnp.zeros_like(k), []
    diagonal = _diagonal_blocks(d_scores, block)
    x_b, k_b = _blocks(x, block), _blocks(k, block)
    half, levels = 1, iter(sums.levels)
    while half < block:
        factor = _blocks(jnp.exp(next(levels)), block)
        masked = jnp.where(level_mask(block, half), diagonal, 0)
        from_k = factor * jnp.einsum("...ij,...jd->...id", masked, k_b * factor, precision=precision)
        from_x = factor * jnp.einsum("...ij,...id->...jd", masked, x_b * factor, precision=precision)
        d_x, d_k = d_x + _unblock(from_k), d_k + _unblock(from_x)
        d_levels.append(_unblock(x_b * from_k + k_b * from_x))
        half *= 2
    while half < size:
        first, second = _halves(jnp.exp(next(levels)), half)
        cross = _diagonal_blocks(d_scores, 2 * half)[..., half:, :half]
        x_2, k_1 = _halves(x, half)[1], _halves(k, half)[0]
        from_k = second * jnp.einsum("...ij,...jd->...id", cross, k_1 * first, precision=precision)
        from_x = first * jnp.einsum("...ij,...id->...jd", cross, x_2 * second, precision=precision)
        zero = jnp.zeros_like(from_k)
        d_x += _unblock(_join(zero, from_k))
        d_k += _unblock(_join(from_x, zero))
        d_levels.append(_unblock(_join(k_1 * from_x, x_2 * from_k)))
        half *= 2
    return d_x, d_k, tuple(d_levels)


def _diagonal_blocks(matrix: Array, block: int) -> Array:
    """[..., C, C] -> [..., C/block, block, block], the blocks on the diagonal."""
    count = matrix.shape[-1] // block
    rows = [matrix[..., i * block : (i + 1) * block, i * block : (i + 1) * block] for i in range(count)]
    return jnp.stack(rows, axis=-3)
