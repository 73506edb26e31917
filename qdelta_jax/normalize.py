"""L2 normalisation with a finite gradient everywhere."""

import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax.checks import compute_dtype
from qdelta_jax.kept import activation

__all__ = ["l2_normalize"]


def l2_normalize(x: Array, eps: float = 1e-6) -> Array:
    """x * rsqrt(sum(x^2) + eps) over the last axis, computed in float32 or better, in x's dtype.

    The gradient at x = 0 is finite: a zeroed (padded) key stays harmless.

    >>> l2_normalize(jnp.array([3.0, 4.0])).round(3).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    wide = x.astype(compute_dtype(x.dtype))
    inverse = activation(lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps))
    return activation((wide * inverse).astype(x.dtype))
