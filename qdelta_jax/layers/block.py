"""One residual block: a token mixer and a feed-forward layer, each behind a norm."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from qdelta_jax.kept import activation
from qdelta_jax.layers.attention import Attention, AttentionConfig
from qdelta_jax.layers.linear import Initializer
from qdelta_jax.layers.mixer import Mixer, MixerConfig
from qdelta_jax.layers.mlp import SwiGLU
from qdelta_jax.layers.norms import RMSNorm

__all__ = ["Block"]


class Block(nnx.Module):
    """x <- x + mixer(norm(x));  x <- x + mlp(norm(x)).

    Args:
        config: of the mixer: a `MixerConfig` makes a `Mixer`, an `AttentionConfig` an `Attention`.
        mlp_hidden: of the SwiGLU.
        kernel_init: of all projections; LeCun normal by default.
        dtype: of products and results; None for the wider of the input's and the parameters'.
        param_dtype: of the parameters.
        rngs: the stream `params` is used.
    """

    def __init__(
        self,
        config: MixerConfig | AttentionConfig,
        mlp_hidden: int,
        *,
        rngs: nnx.Rngs,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        make: Any = Attention if isinstance(config, AttentionConfig) else Mixer
        self.mixer_norm = RMSNorm(config.width, config.norm_eps, **types)
        self.mixer = make(config, kernel_init=kernel_init, **types)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, **types)
        self.mlp = SwiGLU(config.width, mlp_hidden, kernel_init=kernel_init, **types)

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = None) -> Any:
        """The mixer's cache."""
        return self.mixer.init_cache(batch_size, max_length, dtype)

    def __call__(
        self,
        x: Float[Array, "b t width"],
        *,
        segment_ids: Int[Array, "b t"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        cache: Any = None,
        zeros_last: bool = False,
    ) -> tuple[Float[Array, "b t width"], Any]:
        """x after the block, in x's dtype, and the mixer's new cache (None without one). Arguments as in `Mixer`."""
        options: dict[str, Any] = {"segment_ids": segment_ids, "positions": positions, "zeros_last": zeros_last}
        y, cache = self.mixer(self.mixer_norm(x), cache=cache, **options)
        x = activation(x + y.astype(x.dtype))
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype), cache
