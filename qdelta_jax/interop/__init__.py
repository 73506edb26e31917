"""Reading the weights of other libraries."""

from qdelta_jax.interop.kimi_linear import kda_from_kimi_linear
from qdelta_jax.interop.qwen3_next import gated_delta_net_from_qwen3_next

__all__ = ["gated_delta_net_from_qwen3_next", "kda_from_kimi_linear"]
