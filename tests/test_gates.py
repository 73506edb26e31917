"""Gates as layers make them: shapes, formulas, initial values, extremes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerances import BF16, SAME, assert_close

import qdelta_jax as qd
from qdelta_jax import RULES, Decay, Gate
from qdelta_jax.layers.gates import GateProjection, Gates, HeadSizes, MambaDecay
from qdelta_jax.layers.linear import Linear

SIZES = HeadSizes(width=10, heads=2, value_heads=4, key_dim=3, value_dim=5)
SHAPES = {"head": (2, 6, 4), "key": (2, 6, 2, 3), "value": (2, 6, 4, 5)}


def inputs(scale=1.0):
    return scale * jax.random.normal(jax.random.key(1), (2, 6, 10))


@pytest.mark.parametrize("name", RULES)
def test_shapes_dtypes_and_ranges_of_every_rule(name):
    """float32 gates of half precision inputs, in (0, 1), or (0, 2) where doubled; log_decay < 0."""
    gates = Gates(
        RULES[name],
        SIZES,
        allow_negative_eigenvalues=True,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    made, scale = jax.jit(gates)(inputs(3.0).astype(jnp.bfloat16))
    assert set(made) == set(RULES[name].gates)
    for gate, x in made.items():
        entry = RULES[name].gates[gate]
        assert x.shape == SHAPES[entry.axis]
        assert x.dtype == jnp.float32
        low, high = (-math.inf, 0) if gate == "log_decay" else (0, 2 if entry.doubled else 1)
        assert low < float(jnp.min(x)) <= float(jnp.max(x)) < high
        if entry.doubled:
            assert float(jnp.max(x)) > 1
    assert (scale is not None) == (name == "mamba2")
    for path, x in nnx.to_flat_state(nnx.state(gates, nnx.Param)):
        own = path[-1] in ("A_log", "dt_bias")
        assert x.get_value().dtype == (jnp.float32 if own else jnp.bfloat16), path


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gates_of_heads_are_what_their_projections_make_alone(dtype):
    """One product makes them all: value, and gradients of x and of every parameter."""
    gates = Gates(RULES["q_delta"], SIZES, dtype=dtype, rngs=nnx.Rngs(0))
    weights = {name: jax.random.normal(jax.random.key(i), (2, 6, 4)) for i, name in enumerate(RULES["q_delta"].gates)}

    def alone(gates, x):
        return {name: projection(x)[0] for name, projection in gates.projections.items()}

    def gradients(made):
        f = lambda gates, x: sum(jnp.sum(weights[name] * gate) for name, gate in made(gates, x).items())  # noqa: E731
        of_gates, of_x = nnx.jit(nnx.grad(f, argnums=(0, 1)))(gates, x)
        return [*jax.tree.leaves(of_gates), of_x]

    x = inputs().astype(dtype)
    found, wanted = gates(x)[0], alone(gates, x)
    assert list(found) == list(wanted)
    jax.tree.map(lambda x, y: assert_close(x, y, SAME), found, wanted)
    for got, want in zip(gradients(lambda gates, x: gates(x)[0]), gradients(alone), strict=True):
        # Of x in 16 bits one sum is rounded, and not each of its terms.
        assert_close(got, want, BF16["gradient"] if got.dtype == jnp.bfloat16 else SAME)


@pytest.mark.parametrize("name", ["beta", "log_decay"])
def test_a_projection_of_another_precision_computes_alone(name):
    gates = Gates(RULES["q_delta"], SIZES, rngs=nnx.Rngs(0))
    gates.projections[name].projection = nnx.data(Linear(10, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(1)))
    for gate, found in gates(inputs())[0].items():
        assert_close(found, gates.projections[gate](inputs())[0], SAME)


def test_feedback_starts_at_sigmoid_of_its_bias():
    for doubled in (False, True):
        gate = RULES["q_delta"].gates["feedback"]
        made, _ = GateProjection(gate, SIZES, allow_negative_eigenvalues=doubled, rngs=nnx.Rngs(0))(
            jnp.zeros((2, 6, 10))
        )
        assert_close(made, np.full((2, 6, 4), (1 + doubled) / (1 + math.exp(0.9))), SAME)


def test_retnet_decay_is_its_constant():
    made, _ = Gates(RULES["retnet"], SIZES, rngs=nnx.Rngs(0))(inputs())
    assert_close(made["log_decay"][1, 2], np.log(1 - 2.0 ** (-5 - np.arange(4.0))), SAME)


def test_gla_decay_is_a_sixteenth_of_log_sigmoid():
    gates = Gates(RULES["gla"], SIZES, rngs=nnx.Rngs(0))
    projection = gates.projections["log_decay"].projection
    projection.up.bias.set_value(jnp.arange(6.0))
    made, _ = gates(inputs())
    want = np.log(1 / (1 + np.exp(-np.asarray(projection(inputs()), np.float64)))) / 16
    assert_close(made["log_decay"].reshape(2, 6, 6), want, SAME)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_mamba_decay_is_its_formula(bound):
    decay = MambaDecay(2, 3, lower_bound=bound, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 2, 3))
    got, step = decay(x)
    rate = np.exp(np.asarray(decay.A_log.get_value(), np.float64))[:, None]
    y = np.asarray(x, np.float64) + np.asarray(decay.dt_bias.get_value()).reshape(2, 3)
    assert_close(step, np.log1p(np.exp(y)), SAME)
    assert_close(got, -rate * np.log1p(np.exp(y)) if bound is None else bound / (1 + np.exp(-rate * y)), SAME)


def test_initial_rates_and_steps():
    """A in (0, 16], never so small that A_log is -inf; steps in [0.001, 0.1]; both ranges are filled."""
    decay = MambaDecay(4000, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    rate = np.exp(decay.A_log.get_value())
    step = np.log1p(np.exp(decay.dt_bias.get_value()))
    assert decay.A_log.get_value().dtype == decay.dt_bias.get_value().dtype == jnp.float32
    assert 1 <= rate.min() < 1.1 < 15.9 < rate.max() <= 16.0001
    assert 0.00099 < step.min() < 0.0011 < 0.09 < step.max() < 0.1001
    assert 0.008 < np.median(step) < 0.0125  # log-uniform: the geometric mean


@pytest.mark.parametrize("bound", [None, -5.0])
def test_extremes_are_finite_in_value_and_gradient(bound):
    decay = MambaDecay(2, 1, lower_bound=bound, rngs=nnx.Rngs(0))
    decay.A_log.set_value(jnp.asarray([20.0, -20.0]))
    x = jnp.asarray([-1e3, -30.0, 0.0, 30.0, 1e3])[:, None, None] * jnp.ones((1, 2, 1))
    made, _ = decay(x)
    assert bool(jnp.all(made <= 0))
    for mean in (jnp.mean, jnp.max):
        gradients = nnx.grad(lambda m, x, f=mean: f(m(x)[0]), argnums=(0, 1))(decay, x)
        assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradients))
    assert bool(jnp.all(jnp.isfinite(made)))
    assert bound is None or float(jnp.min(made)) >= bound


@pytest.mark.parametrize("name", ["q_delta2", "mamba2"])
def test_every_gate_parameter_has_a_finite_gradient_at_huge_activations(name):
    gates = Gates(RULES[name], SIZES, rngs=nnx.Rngs(0))

    def loss(gates, x):
        made, scale = gates(x)
        return sum(jnp.mean(g) for g in made.values()) + (0 if scale is None else jnp.mean(scale))

    d_gates, d_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(gates, inputs(1e3))
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves((d_gates, d_x)))


def test_refusals():
    with pytest.raises(ValueError, match="decay_lower_bound: rule 'delta_net' has no"):
        Gates(RULES["delta_net"], SIZES, decay_lower_bound=-5.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="decay_lower_bound: rule 'mamba2' has no"):
        Gates(RULES["mamba2"], SIZES, decay_lower_bound=-5.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"decay_lower_bound: got 5\.0, want a negative number"):
        MambaDecay(2, 1, lower_bound=5.0, rngs=nnx.Rngs(0))

    @qd.rule(log_decay=Gate("key", Decay("mamba", scales_value=True)))
    def odd(q, k, v, *, log_decay):
        return qd.Coefficients(k, None, v, log_decay)

    with pytest.raises(ValueError, match="rule 'odd': the step of gate 'log_decay' scales the value"):
        Gates(odd, SIZES, rngs=nnx.Rngs(0))
