"""Language models: their configuration, named sizes, and generation."""

from qdelta_jax.models.config import ModelConfig
from qdelta_jax.models.generation import Generated, generate
from qdelta_jax.models.language_model import LanguageModel, ModelCache
from qdelta_jax.models.sizes import SIZES, count_parameters, named

__all__ = [
    "SIZES",
    "Generated",
    "LanguageModel",
    "ModelCache",
    "ModelConfig",
    "count_parameters",
    "generate",
    "named",
]
