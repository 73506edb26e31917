"""Rotary position embedding."""

import jax.numpy as jnp
from jax import Array

from qdelta_jax.layers.linear import widened

__all__ = ["rope"]


def rope(x: Array, positions: Array, theta: float = 10000.0) -> Array:
    """(a, b) -> (a cos(p w_i) - b sin(p w_i), b cos(p w_i) + a sin(p w_i)),  w_i = theta^(-2i/D).

    The pair i is (x[i], x[i + D/2]). Angles and products are float32 or better; the result has x's dtype.

    Args:
        x: [B, T, H, D], D even.
        positions: [B, T] int, p above.
        theta: the base of the frequencies.
    Raises:
        ValueError: D is odd.

    Scores of rotated queries and keys depend on the difference of their positions alone:

    >>> q, k = jnp.ones((1, 1, 1, 4)), jnp.arange(4.0).reshape(1, 1, 1, 4)
    >>> at = lambda x, p: rope(x, jnp.full((1, 1), p))
    >>> bool(jnp.allclose((at(q, 7) * at(k, 5)).sum(), (at(q, 2) * k).sum(), atol=1e-5))
    True

    Source: arXiv 2104.09864.
    """
    dim = x.shape[-1]
    if dim % 2:
        raise ValueError(f"x: got a head of {dim} channels, want an even number (they turn in pairs)")
    wide = widened(x)
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=wide.dtype) / dim)
    angle = positions.astype(wide.dtype)[:, :, None, None] * frequency.reshape(1, 1, 1, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
