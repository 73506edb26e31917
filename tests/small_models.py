"""Small language models that several tests build."""

from functools import cache

import jax
import pytest
from flax import nnx

from qdelta_jax.models import LanguageModel, ModelConfig

PATTERNS = [("attention",), ("rule", "window")]
every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
VOCAB = 80


def config(pattern=("rule",), **changes):
    base = {
        "vocab_size": VOCAB,
        "width": 16,
        "layers": len(pattern),
        "heads": 2,
        "key_dim": 8,
        "value_dim": 8,
    }
    more = {"mlp_hidden": 24, "attention_heads": 2, "window": 5, "chunk_size": 4}
    return ModelConfig(**{**base, **more, "pattern": pattern, **changes})


@cache
def build(pattern=("rule",), **changes):
    model = LanguageModel(config(pattern, **changes), rngs=nnx.Rngs(0))
    # Larger than at initialisation, so that tokens matter.
    model.embedding.set_value(model.embedding.get_value() * 50)
    return model


@nnx.jit
def run(model, tokens, segment_ids=None, cache=None):
    return model(tokens, segment_ids=segment_ids, cache=cache)


def draw(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, VOCAB)
