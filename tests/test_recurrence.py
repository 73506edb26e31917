"""The definition itself: `step` and `scan` against the loop in NumPy, and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULE_NAMES, SMALL, make_inputs
from reference import loop
from tolerances import FLOAT64, relative_error

import qdelta_jax as qd
from qdelta_jax import Coefficients, recurrence


def test_one_step_by_hand(x64):
    """K = 2, V = 1, numbers that can be checked on paper: forget, read, write, read out."""
    state = jnp.array([[1.0], [2.0]])
    made = Coefficients(
        k=jnp.array([1.0, 0.0]),
        e=jnp.array([0.5, 0.0]),
        z=jnp.array([3.0]),
        log_decay=jnp.log(jnp.array([0.5, 0.25])),
    )
    out, after = recurrence.step(state, jnp.array([1.0, 4.0]), made, scale=2.0)
    # forget: [0.5, 0.5]; read: 0.25; write: 0.5 + (3 - 0.25) = 3.25; out: 2 * (3.25 + 4 * 0.5).
    np.testing.assert_allclose(after, [[3.25], [0.5]])
    np.testing.assert_allclose(out, [10.5])


def test_without_erase_and_decay(x64):
    made = Coefficients(k=jnp.array([1.0, 2.0]), e=None, z=jnp.array([3.0]), log_decay=None)
    out, after = recurrence.step(jnp.zeros((2, 1)), jnp.array([1.0, 1.0]), made, scale=1.0)
    np.testing.assert_allclose(after, [[3.0], [6.0]])
    np.testing.assert_allclose(out, [9.0])


@pytest.mark.parametrize("name", RULE_NAMES)
def test_steps_are_the_loop(name, x64):
    """Public `step`, token by token, from a given state and with grouped values."""
    inputs = make_inputs(name, SMALL._replace(length=6))
    out, want = loop(name, inputs, scale=0.7)
    run = jax.jit(lambda state, x: qd.step(state, *(x[n] for n in "qkv"), rule=name, gates=x["gates"], scale=0.7))
    state = jnp.asarray(inputs["initial_state"])
    tokens = {**{n: inputs[n] for n in "qkv"}, "gates": inputs["gates"]}
    for t in range(6):
        got, state = run(state, jax.tree.map(lambda x, t=t: jnp.asarray(x[:, t]), tokens))
        assert relative_error(got, out[:, t]) < FLOAT64
    assert relative_error(state, want) < FLOAT64


def test_scan_is_steps(x64):
    random = np.random.default_rng(0)
    array = lambda *s: jnp.asarray(random.normal(size=s))  # noqa: E731
    made = Coefficients(array(2, 5, 3, 4), array(2, 5, 3, 4), array(2, 5, 3, 6), -(array(2, 5, 3, 4) ** 2))
    q, start = array(2, 5, 3, 4), array(2, 3, 4, 6)
    out, last = recurrence.scan(start, q, made, 0.5)
    state = start
    for t in range(5):
        got, state = recurrence.step(state, q[:, t], jax.tree.map(lambda x, t=t: x[:, t], made), 0.5)
        assert relative_error(out[:, t], got) < FLOAT64
    assert relative_error(last, state) < FLOAT64


def test_scan_skips_and_clears(x64):
    """valid False: no output, the state stays, whatever the coefficients; reset True: the state is cleared first."""
    random = np.random.default_rng(1)
    array = lambda *s: jnp.asarray(random.normal(size=s))  # noqa: E731
    made = Coefficients(array(1, 4, 1, 3), array(1, 4, 1, 3), array(1, 4, 1, 2), None)
    q, start = array(1, 4, 1, 3), array(1, 1, 3, 2)
    valid, reset = jnp.array([[True, False, True, True]]), jnp.array([[False, False, True, False]])
    out, last = recurrence.scan(start, q, made, 1.0, valid, reset)
    token = lambda t: (q[:, t], jax.tree.map(lambda x: x[:, t], made), 1.0)  # noqa: E731
    first, _ = recurrence.step(start, *token(0))
    third, state = recurrence.step(jnp.zeros_like(start), *token(2))
    fourth, state = recurrence.step(state, *token(3))
    want = jnp.stack([first, jnp.zeros_like(first), third, fourth], axis=1)
    assert relative_error(out, want) < FLOAT64
    assert relative_error(last, state) < FLOAT64
    _, kept = recurrence.scan(start, q, made, 1.0, jnp.zeros((1, 4), bool))
    np.testing.assert_array_equal(kept, start)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_decode_keeps_a_float32_state(dtype):
    inputs = make_inputs("q_delta2", SMALL._replace(length=1))
    cast = lambda x: jnp.asarray(x[:, 0], dtype)  # noqa: E731
    state = jnp.asarray(inputs["initial_state"], jnp.float32)
    gates = {n: cast(x) for n, x in inputs["gates"].items()}
    out, after = qd.step(state, *(cast(inputs[n]) for n in "qkv"), rule="q_delta2", gates=gates)
    assert (out.dtype, after.dtype) == (dtype, jnp.float32)
    assert relative_error(after, loop("q_delta2", inputs)[1]) < 1e-2
