"""The gated feed-forward layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from qdelta_jax.kept import activation
from qdelta_jax.layers.linear import Initializer, Linear

__all__ = ["SwiGLU"]


class SwiGLU(nnx.Module):
    """y = W_down (silu(W_gate x) * W_up x).

    Args:
        width: of x and y.
        hidden: between.
        kernel_init: of the three projections; LeCun normal by default.
        dtype: of the computation; None for the wider of the input's and the parameters'.
        param_dtype: of the parameters.
        rngs: the stream `params` is used.

    Source: arXiv 2002.05202.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        rngs: nnx.Rngs,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        options: dict[str, Any] = {
            "kernel_init": kernel_init,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.gate = Linear(width, hidden, axes=("embed", "mlp"), **options)
        self.up = Linear(width, hidden, axes=("embed", "mlp"), **options)
        self.down = Linear(hidden, width, axes=("mlp", "embed"), **options)

    def __call__(self, x: Float[Array, "*lead width"]) -> Float[Array, "*lead width"]:
        return self.down(activation(jax.nn.silu(self.gate(x)) * self.up(x)))
