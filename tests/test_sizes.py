"""Named sizes against the parameter counts that their papers give; nothing is allocated."""

import jax
import pytest
from flax import nnx

from qdelta_jax.models import SIZES, LanguageModel, ModelConfig, count_parameters, named

BLOCKS = {
    "tiny": 331_912,
    "q_delta_340m": 314_480_124,
    "q_delta_1.3b": 1_256_532_732,
    "gated_delta_net2_340m": 312_757_032,
    "gated_delta_net2_1.3b": 1_302_638_112,
    "gated_delta_net2_1.3b_hybrid": 1_300_314_384,
}


@pytest.mark.parametrize("name", SIZES)
def test_count(name):
    """Of the blocks, and of the whole: embedding, output layer (unless tied) and the final norm are added."""
    config = named(name)
    assert count_parameters(config, blocks_only=True) == BLOCKS[name]
    tables = 1 if config.tie_embeddings else 2
    assert count_parameters(config) == BLOCKS[name] + tables * config.vocab_size * config.width + config.width


def test_q_delta_by_hand():
    """6 heads of 128 and 256, full output gate, three gates per head, convolutions of 4 taps."""
    width, keys, values = 1024, 6 * 128, 6 * 256
    mixer = width * (2 * keys + 2 * values) + values * width + 3 * width * 6 + 4 * (2 * keys + values) + 2 * 6 + 256
    assert BLOCKS["q_delta_340m"] == 21 * (mixer + 3 * width * 2816 + 2 * width)


def test_small_families_weigh_the_same():
    ratio = BLOCKS["gated_delta_net2_340m"] / BLOCKS["q_delta_340m"]
    assert abs(ratio - 1) < 0.02
    assert named("gated_delta_net2_340m").width == 1024


def test_hybrid_alternates():
    config = named("gated_delta_net2_1.3b_hybrid")
    assert (config.cells, config.remainder, config.window) == (9, (), 2048)
    assert config.mixer("window").window == 2048


def test_count_of_a_model_is_that_of_its_config():
    config = named("tiny", layers=3, pattern=("rule", "window"), width=16, mlp_hidden=16)
    assert config.remainder == ("rule",)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    assert count_parameters(model) == count_parameters(config)
    assert count_parameters(model) == sum(x.size for x in jax.tree.leaves(nnx.state(model)))


def test_named_refuses():
    assert isinstance(named("tiny", layers=4), ModelConfig)
    with pytest.raises(ValueError, match="name: got 'huge'"):
        named("huge")
    with pytest.raises(ValueError, match=r"unknown fields \['depth'\]"):
        named("tiny", depth=4)
