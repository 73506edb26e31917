"""Root-mean-square norms, computed in float32 (float64 for float64 inputs)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from qdelta_jax.kept import activation
from qdelta_jax.layers.inputs import check_dtypes, check_number
from qdelta_jax.layers.linear import wider
from qdelta_jax.layers.partitioning import partitioned

__all__ = ["GatedRMSNorm", "RMSNorm"]

ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class RMSNorm(nnx.Module):
    """y = scale * x rsqrt(mean(x^2) + eps) over the last axis.

    Args:
        features: size of the last axis; `scale` [features] starts at one.
        eps: added to the mean square; keeps the gradient at zero finite.
        dtype: of the result; None for the input's.
        param_dtype: of `scale`.
        rngs: the stream `params` is used.

    Source: arXiv 1910.07467.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        *,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        check_dtypes(dtype, param_dtype)
        self.eps, self.dtype = check_number("eps", eps, positive=True), dtype
        ones = partitioned(nnx.initializers.ones, (None,))
        self.scale = nnx.Param(ones(rngs.params(), (features,), param_dtype))

    def __call__(self, x: Float[Array, "*lead features"]) -> Float[Array, "*lead features"]:
        return activation(_normalize(x, self.scale.get_value(), self.eps).astype(self.dtype or x.dtype))


class GatedRMSNorm(nnx.Module):
    """y = scale * x rsqrt(mean(x^2) + eps) * activation(gate).

    Args:
        features, eps, rngs, dtype, param_dtype: as in `RMSNorm`.
        activation: "silu" or "sigmoid", of the gate.

    Source: arXiv 2307.08621 (SiLU), arXiv 2510.26692 (sigmoid).
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        *,
        activation: str = "silu",
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}, want one of {sorted(ACTIVATIONS)}")
        check_dtypes(dtype, param_dtype)
        self.eps, self.dtype, self.activation = check_number("eps", eps, positive=True), dtype, activation
        ones = partitioned(nnx.initializers.ones, (None,))
        self.scale = nnx.Param(ones(rngs.params(), (features,), param_dtype))

    def __call__(
        self, x: Float[Array, "*lead features"], gate: Float[Array, "*lead features"]
    ) -> Float[Array, "*lead features"]:
        y = _normalize(x, self.scale.get_value(), self.eps)
        y = y * ACTIVATIONS[self.activation](gate.astype(y.dtype))
        return activation(y.astype(self.dtype or x.dtype))


def _normalize(x: Array, scale: Array, eps: float) -> Array:
    wide = x.astype(wider(x.dtype, scale.dtype, jnp.float32))
    inverse = activation(lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps))
    return wide * inverse * jnp.broadcast_to(scale.astype(wide.dtype), wide.shape)
