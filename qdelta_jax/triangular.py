"""The inverse of I + L for strictly lower triangular L, as the chunked solver needs it."""

import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax.decay import diagonal_blocks, level_mask, lower_pairs

BLOCK = 16


def unit_lower_inverse(lower: Array) -> Array:
    """A = (I + L)^-1 for L [..., C, C], strictly lower triangular, C a power of two.

    By doubling: with the inverses X_1, X_2 of two neighbouring diagonal blocks, the inverse of the pair is
    [[X_1, 0], [-X_2 L_21 X_1, X_2]]. As stable as forward substitution (a Neumann series is not: its powers of L
    grow without bound for correlated keys).
    """
    size = lower.shape[-1]
    block = min(BLOCK, size)
    diagonal = diagonal_blocks(lower, block)
    inverse = jnp.broadcast_to(jnp.eye(block, dtype=lower.dtype), diagonal.shape)
    half = 1
    while half < block:
        below = jnp.where(level_mask(block, half), diagonal, 0)
        inverse = inverse - _triple(inverse, below, inverse) if half > 1 else inverse - below
        half *= 2
    while half < size:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = diagonal_blocks(lower, 2 * half)[..., half:, :half]
        inverse = lower_pairs(first, -_triple(second, below, first), second)
        half *= 2
    return inverse.reshape(lower.shape)


def _triple(a: Array, b: Array, c: Array) -> Array:
    product = jnp.matmul(b, c, precision=lax.Precision.HIGHEST)
    return jnp.matmul(a, product, precision=lax.Precision.HIGHEST)
