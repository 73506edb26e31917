"""Two released layers: output, input and weight gradients, through a Mixer that reads their weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import LAYER, assert_close

from qdelta_jax.interop import gated_delta_net_from_qwen3_next, kda_from_kimi_linear

pytestmark = pytest.mark.core

READERS = {
    "qwen3_next_gated_delta_net": lambda weights, **options: gated_delta_net_from_qwen3_next(
        weights, heads=2, **options
    ),
    "kimi_linear_kda": kda_from_kimi_linear,
}


def load(name):
    with np.load(Path(__file__).parent / "data" / f"layer_{name}.npz") as file:
        data = dict(file)
    return data, {key.removeprefix("weight/"): x for key, x in data.items() if key.startswith("weight/")}


@pytest.mark.parametrize("name", READERS)
def test_output_and_gradients_are_the_released_layers(name):
    data, weights = load(name)

    @jax.jit
    def run(weights, x):
        def loss(weights, x):
            y = READERS[name](weights)(x)[0]
            return jnp.sum(y * data["cot_output"]), y

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    with jax.default_matmul_precision("highest"):
        (_, y), (d_weights, d_x) = run(weights, data["hidden_states"])
    assert_close(y, data["output"], LAYER, "output")
    assert_close(d_x, data["grad_hidden_states"], LAYER, "grad_hidden_states")
    assert_close(d_weights, {key: data[f"grad/{key}"] for key in weights}, LAYER, "grad")


def test_prefill_and_steps_are_the_released_layer():
    name = "qwen3_next_gated_delta_net"
    data, weights = load(name)
    mixer, x = READERS[name](weights, chunk_size=16), jnp.asarray(data["hidden_states"])
    with jax.default_matmul_precision("highest"):
        prefix, cache = mixer(x[:, :67], cache=mixer.init_cache(2))
        ys, step = [prefix], jax.jit(lambda x, cache: mixer(x, cache=cache))
        for t in range(67, 70):
            y, cache = step(x[:, t : t + 1], cache)
            ys.append(y)
    assert_close(jnp.concatenate(ys, 1), data["output"], LAYER)


@pytest.mark.parametrize("name", READERS)
def test_refuses_other_weights(name):
    _, weights = load(name)
    with pytest.raises(ValueError, match=r"missing: \['conv1d.weight'\]; unknown: \['rotary'\]"):
        READERS[name]({k: v for k, v in weights.items() if k != "conv1d.weight"} | {"rotary": np.ones(3)})


def test_refuses_a_head_count_that_does_not_fit():
    _, weights = load("qwen3_next_gated_delta_net")
    with pytest.raises(ValueError, match="heads: got 3, want a divisor of 4 value heads"):
        gated_delta_net_from_qwen3_next(weights, heads=3)
    _, weights = load("kimi_linear_kda")
    with pytest.raises(ValueError, match=r"parameter '.*': got shape"):
        kda_from_kimi_linear(weights | {"o_norm.weight": np.ones(8, np.float32)})
