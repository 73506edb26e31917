"""Gradients: against finite differences, from a loss on the final state alone, twice, and in forward mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CHUNK,
    IMPLEMENTATIONS,
    conformance,
    every_rule,
    make_cotangents,
    make_inputs,
)
from reference import call, cast_inputs, solve
from tolerances import FLOAT32, FLOAT64, assert_close, relative_error

from qdelta_jax import delta_rule


def shifted(inputs: dict, direction: dict, amount: float) -> dict:
    return jax.tree.map(lambda x, d: x + amount * d, inputs, direction)


@every_rule
def test_finite_differences(name, x64):
    """The derivative of <output, d_out> + <state, d_state> along one random direction in all arguments at once."""
    inputs, (d_out, d_state) = make_inputs(name), make_cotangents()
    random = np.random.default_rng(5)
    direction = jax.tree.map(lambda x: random.normal(size=x.shape), inputs)
    direction["gates"] = jax.tree.map(lambda x: 0.1 * x, direction["gates"])
    run = partial(solve, name, "xla", cotangents=(d_out, d_state))

    def value(amount: float) -> float:
        got = run(shifted(inputs, direction, amount))
        return float(np.sum(got["output"] * d_out) + np.sum(got["final_state"] * d_state))

    h = 1e-3
    near, far = ((value(s * h) - value(-s * h)) / (2 * s * h) for s in (1, 2))
    want = (4 * near - far) / 3
    grads = run(inputs)
    flat = {**{n: x for n, x in direction.items() if n != "gates"}, **direction["gates"]}
    got = sum(float(np.sum(grads[f"grad_{n}"] * x)) for n, x in flat.items())
    assert abs(got - want) < 1e-6 * max(abs(want), 1.0)


@conformance
def test_a_loss_on_the_final_state_alone(name, implementation, x64):
    """Every input but q gets its gradient (q as well, where the rule reads with it)."""
    inputs, (d_out, d_state) = make_inputs(name), make_cotangents()
    cotangents = np.zeros_like(d_out), d_state
    got = solve(name, implementation, inputs, cotangents)
    assert_close(got, solve(name, "scan", inputs, cotangents), FLOAT64)
    for n, x in got.items():
        reads_q = name in ("q_delta", "q_delta2")
        assert np.any(x != 0) == (n != "grad_q" or reads_q), n


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_loss_that_ignores_one_result(implementation):
    """As users write it: grad of a function that drops the output, or the state."""
    inputs = cast_inputs(make_inputs("q_delta2"), jnp.float32)
    run = partial(call, "q_delta2", implementation=implementation, chunk_size=CHUNK)
    by_state = jax.jit(jax.grad(lambda x: jnp.sum(run(x)[1] ** 2)))(inputs)
    by_output = jax.jit(jax.grad(lambda x: jnp.sum(run(x)[0] ** 2)))(inputs)
    for grads in (by_state, by_output):
        for path, x in jax.tree.leaves_with_path(grads):
            assert bool(jnp.all(jnp.isfinite(x))), path
            assert bool(jnp.any(x != 0)), path


@conformance
def test_the_gradient_of_the_initial_state(name, implementation, x64):
    """It is linear: the state that a unit of it leaves behind."""
    inputs, cotangents = make_inputs(name), make_cotangents()
    got = solve(name, implementation, inputs, cotangents)
    zero = {**inputs, "initial_state": np.zeros_like(inputs["initial_state"])}
    without = solve(name, implementation, zero, cotangents)
    change = np.sum((got["output"] - without["output"]) * cotangents[0])
    change += np.sum((got["final_state"] - without["final_state"]) * cotangents[1])
    assert abs(change - np.sum(got["grad_initial_state"] * inputs["initial_state"])) < 1e-9
    assert relative_error(got["grad_initial_state"], without["grad_initial_state"]) < FLOAT64


def tiny(name: str) -> dict:
    inputs = make_inputs(name)
    cut = lambda x: jnp.asarray(x[:1, :7])  # noqa: E731
    return {
        **{x: cut(inputs[x]) for x in "qkv"},
        "gates": {n: cut(x) for n, x in inputs["gates"].items()},
        "initial_state": jnp.asarray(inputs["initial_state"][:1]),
    }


def loss(name, implementation, x, **options):
    out, state = call(name, x, implementation=implementation, chunk_size=4, **options)
    return jnp.sum(jnp.sin(out)) + jnp.sum(state**2)


@pytest.mark.parametrize("name", ["linear_attention", "q_delta2"])
def test_gradient_of_a_gradient(name, x64):
    """Reverse over reverse, as a gradient penalty takes it, against the scan."""

    def penalty(implementation, x):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(partial(loss, name, implementation))(x)))

    got, want = (jax.jit(jax.grad(partial(penalty, x)))(tiny(name)) for x in ("xla", "scan"))
    assert_close(got, want, FLOAT64)


@pytest.mark.parametrize("residuals", ["recompute", "keep"])
def test_hessian(residuals, x64):
    """Forward over reverse: the derivatives of the gradient in beta."""
    inputs = tiny("q_delta")

    def of_beta(implementation, beta, **options):
        return loss("q_delta", implementation, {**inputs, "gates": {**inputs["gates"], "beta": beta}}, **options)

    got = jax.jit(jax.hessian(partial(of_beta, "xla", residuals=residuals)))(inputs["gates"]["beta"])
    want = jax.jit(jax.hessian(partial(of_beta, "scan")))(inputs["gates"]["beta"])
    assert relative_error(got, want) < FLOAT64


def test_forward_mode_needs_the_scan(x64):
    inputs = tiny("gated_delta_net")
    direction = jax.tree.map(jnp.ones_like, inputs)
    f = partial(loss, "gated_delta_net")
    _, forward = jax.jit(lambda x, d: jax.jvp(partial(f, "scan"), (x,), (d,)))(inputs, direction)
    grads = jax.jit(jax.grad(partial(f, "xla")))(inputs)
    assert relative_error(forward, sum(jnp.sum(x) for x in jax.tree.leaves(grads))) < FLOAT64
    with pytest.raises((TypeError, NotImplementedError), match="forward-mode"):
        jax.jvp(partial(f, "xla"), (inputs,), (direction,))


@pytest.mark.parametrize("name", ["linear_attention", "kda"])
def test_float32_gradients_are_those_of_float32_inputs(name):
    """Without x64, as users run it: eager grad, argument by argument."""
    inputs = cast_inputs(make_inputs(name), jnp.float32)
    gates = inputs["gates"]

    def f(q, k, v, gates, implementation):
        return jnp.sum(delta_rule(q, k, v, name, gates, implementation=implementation, chunk_size=CHUNK)[0] ** 2)

    args = (*(inputs[x] for x in "qkv"), gates)
    got, want = (jax.grad(f, (0, 1, 2, 3))(*args, x) for x in ("xla", "scan"))
    assert_close(got, want, FLOAT32)
