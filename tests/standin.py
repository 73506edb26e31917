"""What the tests of training share: small runs, and a model that compiles in no time."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from qdelta_jax.layers.linear import Linear
from qdelta_jax.layers.norms import RMSNorm
from qdelta_jax.layers.partitioning import partitioned
from qdelta_jax.models.config import ModelConfig
from qdelta_jax.training import DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from qdelta_jax.training.data import Batch
from qdelta_jax.training.metrics import read_metrics

ONE = MeshConfig(data=1, fsdp=1)


class StandIn(nnx.Module):
    """logits = norm(embedding) W: each token predicts the next from itself alone."""

    def __init__(self, vocab_size=257, width=16, *, rngs):
        table = partitioned(nnx.initializers.normal(0.1), ("vocab", "embed"))
        self.embedding = nnx.Param(table(rngs.params(), (vocab_size, width), jnp.float32))
        self.norm = RMSNorm(width, 1e-6, rngs=rngs)
        self.head = Linear(width, vocab_size, axes=("embed", "vocab"), use_bias=True, rngs=rngs)
        self.offset = nnx.Variable(jnp.zeros((), jnp.float32))

    def __call__(self, tokens, *, segment_ids=None):
        x = jnp.take(self.embedding.get_value(), tokens, axis=0)
        return self.head(self.norm(x)) + jnp.broadcast_to(
            self.offset.get_value(), (*tokens.shape, self.head.out_features)
        )


class Poisoned(StandIn):
    """NaN as soon as a row begins with token 0."""

    def __call__(self, tokens, *, segment_ids=None):
        bad = jnp.any(tokens[:, 0] == 0)
        return super().__call__(tokens) + jnp.where(bad, jnp.nan, 0.0) * jnp.ones(
            (*tokens.shape, self.head.out_features)
        )


def batch_of(rng, rows, length, vocab=250):
    """A random packed batch: two segments a row and some padding."""
    tokens, targets = rng.integers(1, vocab, (2, rows, length)).astype(np.int32)
    ends = rng.integers(length // 2, length + 1, rows)
    place, ends = np.arange(length), ends[:, None]
    segments = np.where(place < ends, 1 + (place > ends // 2), 0).astype(np.int32)
    return Batch(tokens, targets, segments)


def build(rngs):
    return StandIn(rngs=rngs)


def small(**fields):
    """A language model of a few thousand parameters."""
    base = {"vocab_size": 257, "width": 16, "layers": 2, "heads": 2, "key_dim": 8, "value_dim": 8}
    return ModelConfig(**{**base, "mlp_hidden": 16, "implementation": "scan", **fields})


def small_run(directory):
    """Ten steps on one device, from a text written there."""
    text = directory / "text.txt"
    text.write_text("the cat and the hat and the rat sat on the mat. " * 120)
    run = {"steps": 10, "log_every": 1, "evaluate_every": 5, "save_every": 4}
    return TrainConfig(
        model=small(layers=1),
        data=DataConfig(files=(str(text),), sequence_length=32, batch_size=4),
        optimizer=OptimizerConfig(warmup_steps=2, learning_rate=1e-2),
        mesh=ONE,
        run=RunConfig(directory=str(directory / "run"), progress=False, tensorboard=False, **run),
    )


def changed(config, part, **fields):
    """The config with some fields of one part replaced."""
    return replace(config, **{part: replace(getattr(config, part), **fields)})


def losses(config):
    """(step, loss) of every record of a run."""
    return [(r["step"], r["loss"]) for r in read_metrics(config.run.directory) if "loss" in r]
