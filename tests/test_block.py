"""SwiGLU and the pre-norm block around each kind of mixer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerances import SAME, assert_close

from qdelta_jax.layers.attention import Attention, AttentionConfig
from qdelta_jax.layers.block import Block
from qdelta_jax.layers.mixer import Mixer, MixerConfig
from qdelta_jax.layers.mlp import SwiGLU

CONFIGS = {
    Mixer: MixerConfig(width=16, rule="gated_delta_net", heads=2, key_dim=8, value_dim=8),
    Attention: AttentionConfig(16, heads=2, head_dim=8),
}
X = jax.random.normal(jax.random.key(0), (2, 6, 16))


def test_swiglu():
    mlp = SwiGLU(16, 24, rngs=nnx.Rngs(0))
    gate, up, down = (np.asarray(layer.kernel[...], np.float64) for layer in (mlp.gate, mlp.up, mlp.down))
    x = np.asarray(X, np.float64)
    want = ((x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down
    assert_close(mlp(X), want, SAME)


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_block_is_its_equation(kind):
    block = Block(CONFIGS[kind], 24, rngs=nnx.Rngs(0))
    assert type(block.mixer) is kind
    y, cache = block(X)
    assert cache is None
    x = X + block.mixer(block.mixer_norm(X))[0]
    assert_close(y, x + block.mlp(block.mlp_norm(x)), 0.0)


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_block_continues_its_cache_and_leaves_padding_alone(kind):
    block = Block(CONFIGS[kind], 24, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda block, x, segment_ids, cache: block(x, segment_ids=segment_ids, cache=cache))
    whole, _ = run(block, X, None, None)
    first, cache = run(block, X[:, :4], None, block.init_cache(2, 6))
    ids = jnp.array([[1, 1, 0]] * 2)
    second, _ = run(block, jnp.concatenate([X[:, 4:], jnp.zeros((2, 1, 16))], axis=1), ids, cache)
    assert_close(jnp.concatenate([first, second[:, :2]], axis=1), whole, SAME)
    assert np.all(np.asarray(second[:, 2]) == 0)


def test_residual_stream_keeps_its_dtype():
    """A wider stream is not rounded to the dtype that the products are computed in."""
    block = Block(CONFIGS[Attention], 24, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    assert block(X)[0].dtype == jnp.float32
    assert block(X.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16
