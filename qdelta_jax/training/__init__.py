"""Training: text in, a checkpointed language model out.

config -> data -> train_step (loss, gradient, AdamW) -> checkpoints and metrics; `loop.train` joins them.
"""

from qdelta_jax.training.checkpoint import Checkpoints, load_model
from qdelta_jax.training.config import (
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from qdelta_jax.training.loop import TrainResult, train
from qdelta_jax.training.vocabulary import ByteVocabulary, Vocabulary

__all__ = [
    "ByteVocabulary",
    "Checkpoints",
    "DataConfig",
    "MeshConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainConfig",
    "TrainResult",
    "Vocabulary",
    "load_model",
    "train",
]
