"""The norms: their formulas, float32 inside, finite gradients at zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerances import SAME, assert_close

from qdelta_jax import l2_normalize
from qdelta_jax.layers.norms import GatedRMSNorm, RMSNorm


def test_rms_norm_is_its_formula():
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    norm = RMSNorm(8, 1e-3, rngs=nnx.Rngs(0))
    norm.scale.set_value(jnp.arange(8.0))
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * np.arange(8.0)
    assert_close(norm(jnp.asarray(x)), want, SAME)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm_multiplies_the_normed_by_the_gate(activation):
    x, gate = np.random.default_rng(1).normal(size=(2, 2, 3, 8)).astype(np.float32)
    norm = GatedRMSNorm(8, 1e-6, activation=activation, rngs=nnx.Rngs(0))
    act = 1 / (1 + np.exp(-gate.astype(np.float64)))
    act = act * gate if activation == "silu" else act
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * act
    assert_close(norm(jnp.asarray(x), jnp.asarray(gate)), want, SAME)


def test_computed_in_float32_whatever_the_input():
    """A bfloat16 sum of squares of 4096 equal numbers stops growing at 256 of them."""
    x = jnp.full((1, 4096), 3, jnp.bfloat16)
    y = RMSNorm(4096, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)(x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, np.ones((1, 4096)), SAME)
    y = RMSNorm(4096, rngs=nnx.Rngs(0), dtype=jnp.float32)(x)
    assert y.dtype == jnp.float32


def test_gradients_at_zero_are_finite():
    zero = jnp.zeros((1, 8))
    norm = GatedRMSNorm(8, rngs=nnx.Rngs(0))
    for function in (l2_normalize, lambda x: norm(x, x + 1), RMSNorm(8, rngs=nnx.Rngs(0))):
        gradient = jax.grad(lambda x, f=function: jnp.sum(f(x)))(zero)
        assert bool(jnp.all(jnp.isfinite(gradient)))
        assert float(jnp.max(jnp.abs(gradient))) > 0


def test_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match=r"activation: got 'gelu', want one of \['sigmoid', 'silu'\]"):
        GatedRMSNorm(8, activation="gelu", rngs=nnx.Rngs(0))
