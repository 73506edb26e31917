"""Named model sizes, and what a model weighs."""

from dataclasses import replace
from math import prod
from typing import Any

import jax
from flax import nnx

from qdelta_jax.models.config import ModelConfig
from qdelta_jax.models.language_model import LanguageModel

__all__ = ["SIZES", "count_parameters", "named"]

_Q_DELTA_340M = ModelConfig(
    vocab_size=32000,
    width=1024,
    layers=21,
    mlp_hidden=2816,
    rule="q_delta",
    heads=6,
    key_dim=128,
    value_dim=256,
    dtype="bfloat16",
)
# Both gates and the decay see 16 heads of 128: 262,144 floats of state a layer.
_GATED_DELTA_NET2 = ModelConfig(
    vocab_size=32000,
    width=2304,
    layers=18,
    mlp_hidden=6208,
    rule="gated_delta_net2",
    heads=16,
    key_dim=128,
    value_dim=128,
    gate_low_rank=True,
    gate_bias=True,
    attention_heads=18,
    window=2048,
    init_gain=2**-2.5,
    dtype="bfloat16",
)

SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=256,
        width=128,
        layers=2,
        mlp_hidden=256,
        heads=2,
        key_dim=32,
        value_dim=64,
        attention_heads=4,
        window=128,
        tie_embeddings=True,
    ),
    "q_delta_340m": _Q_DELTA_340M,
    "q_delta_1.3b": replace(_Q_DELTA_340M, width=2048, mlp_hidden=5632, key_dim=256, value_dim=512),
    "gated_delta_net2_340m": replace(
        _GATED_DELTA_NET2, width=1024, layers=21, mlp_hidden=2624, heads=8, attention_heads=8
    ),
    "gated_delta_net2_1.3b": _GATED_DELTA_NET2,
    "gated_delta_net2_1.3b_hybrid": replace(_GATED_DELTA_NET2, pattern=("rule", "window"), mlp_hidden=6784),
}
"""tiny: a byte model for tests and laptops. q_delta: arXiv 2606.08804. gated_delta_net2: arXiv 2605.22791;
its 340m is ours, scaled down to the weight of q_delta_340m."""


def named(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of that name, with some fields replaced.

    >>> named("q_delta_1.3b", vocab_size=256).width
    2048

    Raises:
        ValueError: no size has that name; a field that does not exist; a bad value.
    """
    if name not in SIZES:
        raise ValueError(f"name: got {name!r}, want one of {sorted(SIZES)}")
    return ModelConfig.from_dict({**SIZES[name].to_dict(), **overrides})


def count_parameters(model: LanguageModel | ModelConfig, *, blocks_only: bool = False) -> int:
    """How many numbers the parameters of a model hold; nothing is allocated for a configuration.

    Args:
        model: a model or its configuration.
        blocks_only: leave out embedding, final norm and output layer, as papers count them.
    """
    built = model if isinstance(model, LanguageModel) else _abstract(model)
    parts = [built.cells, built.rest] if blocks_only else [built]
    leaves = jax.tree.leaves([nnx.state(part, nnx.Param) for part in parts if part is not None])
    return sum(prod(leaf.shape) for leaf in leaves)


def _abstract(config: ModelConfig) -> LanguageModel:
    return nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
