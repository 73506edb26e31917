"""The models that experiments/mqar.py compares: blocks of the same weight, memories of the same size."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import qdelta_jax as qd
from experiments.training_models import TRANSFORMER, count_blocks, weigh
from qdelta_jax.layers.convolution import ShortConvolution
from qdelta_jax.layers.linear import Linear
from qdelta_jax.models import LanguageModel, ModelConfig, count_parameters

WINDOW = "+window"
"""Behind the name of a rule: a layer of it, then one of sliding-window attention."""

CONVOLVED = "transformer+conv"
"""The Transformer with short convolutions of queries, keys and values, which the layers of rules have."""

TAPS = 4
GAIN = 0.5
"""Of Xavier uniform projections. With larger ones what the first layer adds drowns the embeddings, which begin at
0.02, and the plain Transformer learns which values a row has, and no more."""


class Convolved(nnx.Module):
    """silu(conv(x W)): how the layers of rules make q, k and v."""

    def __init__(self, linear: Linear, channels: int, *, rngs: nnx.Rngs):
        self.linear, self.convolution = linear, ShortConvolution(channels, TAPS, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.convolution(self.linear(x))[0]


def build(model: str, config: ModelConfig, rngs: nnx.Rngs) -> LanguageModel:
    """The language model of that name, in the config that `make_config` made for it."""
    made = LanguageModel(config, rngs=rngs)
    if model == CONVOLVED:
        assert made.rest is not None
        for block in made.rest.blocks:
            for name in ("q", "k", "v"):
                channels = config.attention_heads * block.mixer.config.head_dim
                setattr(block.mixer, name, Convolved(getattr(block.mixer, name), channels, rngs=rngs))
    return made


def make_config(model: str, width: int, *, vocab: int, **computed: Any) -> ModelConfig:
    """Two layers of that width: blocks that weigh what q_delta's do, and memories as large as those of a rule.

    Heads are width / 2 wide, and 128 at most. A window is as many tokens as a rule's memory has numbers for. `computed`
    are fields of `ModelConfig` that say how it is computed.

    Raises:
        ValueError: an unknown model, or a width without whole heads.
    """
    heads = max(2, width // 128)
    if width < 1 or width % (2 * heads):
        raise ValueError(f"widths: got {width}, want a multiple of {2 * heads}: heads of an even number of channels")
    dim, hidden = width // heads, width // 4
    standard = ModelConfig(
        vocab_size=vocab,
        width=width,
        layers=2,
        # About twice the width, and an odd multiple of 8: `weigh` moves it in steps of 8.
        mlp_hidden=8 * (hidden + 1 - hidden % 2),
        # Longer than the model, so that both layers are its remainder: they compile and run faster than in a scan.
        pattern=("rule",) * 3,
        heads=heads,
        key_dim=dim,
        value_dim=dim,
        attention_heads=heads,
        conv_width=TAPS,
        init_gain=GAIN,
        tie_embeddings=True,
        **computed,
    )
    wanted = count_blocks(standard)
    if model in (TRANSFORMER, CONVOLVED):
        changes: dict[str, Any] = {"pattern": ("attention",) * 3}
        wanted -= 2 * 3 * TAPS * width if model == CONVOLVED else 0
    else:
        rule = model.removesuffix(WINDOW)
        if rule not in qd.RULES:
            known = [TRANSFORMER, CONVOLVED, *qd.RULES]
            raise ValueError(f"models: got {model!r}, want one of {known}, rules with {WINDOW!r} behind them, too")
        changes = {"rule": rule}
        if model.endswith(WINDOW):
            changes |= {"pattern": ("rule", "window", "rule"), "window": state_size(standard, 1) // (2 * width)}
    return weigh(replace(standard, **changes), wanted)


@cache
def weight(model: str, config: ModelConfig) -> tuple[int, int]:
    """Parameters of all and of the blocks alone."""
    made = nnx.eval_shape(lambda: build(model, config, nnx.Rngs(0)))
    return count_parameters(made), count_parameters(made, blocks_only=True)


@cache
def state_size(config: ModelConfig, length: int) -> int:
    """Numbers that a layer keeps of `length` tokens, on average over the layers: states, convolutions, keys, values."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, length)))
    return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)) // config.layers
