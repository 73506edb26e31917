"""The inverse of I + L on hard cases: correlated keys, beta and erase up to 2, keys without unit norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, make_cotangents, make_inputs, round_to
from reference import gradients, solve
from tolerances import FLOAT32, FLOAT64, TRIANGULAR, relative_error

from qdelta_jax.triangular import unit_lower_inverse


def correlated(size: int, spread: float, seed: int = 0) -> np.ndarray:
    """Keys of unit norm around one direction, [size, 32]."""
    random = np.random.default_rng(seed)
    keys = random.normal(size=32) + spread * random.normal(size=(size, 32))
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


def lower(size: int, beta: float, spread: float) -> np.ndarray:
    keys = correlated(size, spread)
    return np.tril(beta * keys @ keys.T, -1)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 2.0])
@pytest.mark.parametrize("size", [1, 2, 16, 64, 128])
def test_inverse_of_correlated_keys(size, beta, spread):
    matrix = lower(size, beta, spread)
    want = np.linalg.solve(np.eye(size) + matrix, np.eye(size))
    got = np.asarray(inverse(jnp.asarray(np.stack([matrix, -0.5 * matrix]), jnp.float32)), np.float64)
    assert np.abs(got[0] - want).max() < TRIANGULAR * np.abs(want).max()
    assert np.all(np.triu(got, 1) == 0)
    np.testing.assert_array_equal(np.diagonal(got, axis1=1, axis2=2), np.ones((2, size)))


inverse = jax.jit(unit_lower_inverse)


def test_inverse_in_float64(x64):
    matrix = lower(64, 1.0, 0.1)
    got = inverse(jnp.asarray(matrix[None, None]))[0, 0]
    assert relative_error(got, np.linalg.inv(np.eye(64) + matrix)) < 1e-12


@pytest.mark.parametrize("beta", [1.0, 1.9, 2.0])
@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net2", "q_delta"])
@pytest.mark.parametrize("implementation", ["scan", "xla"])
def test_negative_eigenvalues_and_correlated_keys(name, implementation, beta, x64):
    """The whole call in float32 with nearly equal keys and an erase of up to 2, against the float64 scan."""
    inputs, cotangents = make_inputs(name), make_cotangents()
    keys = inputs["k"][:, :1] + 0.05 * inputs["k"]
    inputs["k"] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    for gate in ("beta", "erase"):
        if gate in inputs["gates"]:
            inputs["gates"][gate] = np.full_like(inputs["gates"][gate], beta)
    if "feedback" in inputs["gates"]:
        inputs["gates"]["feedback"] *= 0.1
    inputs = round_to(inputs, np.float32)
    want = solve(name, "scan", inputs, cotangents)
    got = solve(name, implementation, inputs, cotangents, dtype=jnp.float32)
    for n, x in got.items():
        assert relative_error(x, want[n]) < 2 * FLOAT32, n


@pytest.mark.parametrize("name", ["delta_net", "q_delta2"])
def test_long_chunks_of_correlated_keys(name, x64):
    """128 tokens in one chunk of 128."""
    shape = SMALL._replace(batch=1, length=128)
    inputs, cotangents = make_inputs(name, shape), make_cotangents(shape)
    inputs["k"] = inputs["k"][:, :1] + 0.05 * inputs["k"]
    inputs["k"] = inputs["k"] / np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    inputs = round_to(inputs, np.float32)
    want = gradients(name, inputs, cotangents, implementation="scan")
    got = gradients(name, inputs, cotangents, implementation="xla", chunk_size=128, dtype=jnp.float32)
    for n, x in got.items():
        assert relative_error(x, want[n]) < FLOAT32, n


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net2", "q_delta"])
def test_keys_without_unit_norm(name, x64):
    """|k| = 3 with beta = 0.2, and keys that are zero: nothing is normalised, nothing breaks."""
    inputs, cotangents = make_inputs(name), make_cotangents()
    inputs["k"] = 3 * inputs["k"]
    inputs["k"][:, 7::9] = 0
    inputs["q"][:, 3::9] = 0
    for gate in ("beta", "erase"):
        if gate in inputs["gates"]:
            inputs["gates"][gate] = np.full_like(inputs["gates"][gate], 0.2)
    inputs = round_to(inputs, np.float32)
    want = solve(name, "scan", inputs, cotangents)
    for dtype, tolerance in ((jnp.float64, FLOAT64), (jnp.float32, 2 * FLOAT32)):
        got = solve(name, "xla", inputs, cotangents, dtype=dtype)
        for n, x in got.items():
            assert relative_error(x, want[n]) < tolerance, (n, dtype)
