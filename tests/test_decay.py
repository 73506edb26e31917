"""Extreme decays: any log_decay <= 0 is finite in value and gradient, and right against a float64 scan."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULE_NAMES, SMALL, gate_shape, make_cotangents, make_inputs, round_to
from reference import solve
from tolerances import FLOAT32, FLOAT32_DECAY, FLOAT64, assert_close, relative_error

from qdelta_jax import RULES, Decay

DECAYING = tuple(name for name in RULE_NAMES if "log_decay" in RULES[name].gates)
LIKE_NO_DECAY = {
    "mamba2": "linear_attention",
    "gla": "linear_attention",
    "gated_delta_net": "delta_net",
    "kda": "delta_net",
}


def token_index(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[1]).reshape(1, -1, *[1] * (len(shape) - 2)), shape)


def alternate(shape: tuple[int, ...], *values: float) -> np.ndarray:
    """Different from token to token, and from channel to channel where there are any."""
    channel = np.broadcast_to(np.arange(shape[-1]), shape) if len(shape) == 4 else 0
    return np.asarray(values)[(token_index(shape) + channel) % len(values)]


def mixed(shape: tuple[int, ...]) -> np.ndarray:
    values = [0.0, -1e-12, -1e-3, -0.1, -1.0, -5.0, -30.0, -88.0, -104.0, -1e4, -1e30, -np.inf]
    return np.random.default_rng(3).choice(values, size=shape)


PATTERNS = {
    "none": lambda shape: np.zeros(shape),
    "tiny": lambda shape: np.full(shape, -1e-12),
    "five a token": lambda shape: np.full(shape, -5.0),
    "ninety a token": lambda shape: np.full(shape, -90.0),
    "ten thousand": lambda shape: np.full(shape, -1e4),
    "full reset": lambda shape: np.full(shape, -np.inf),
    "largest": lambda shape: np.full(shape, -3.4e38),
    "a thousand beside none": lambda shape: alternate(shape, -1000.0, 0.0),
    "some resets": lambda shape: alternate(shape, -0.2, -0.01, -np.inf, 0.0, -0.3, -0.05, 0.0),
    "strong beside weak": lambda shape: alternate(shape, -20.0, -1e-4, -1e-4, -1e-4),
    "one reset in a chunk": lambda shape: np.where(token_index(shape) == 21, -np.inf, -0.01),
    "mixed": mixed,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("implementation", ["scan", "xla"])
@pytest.mark.parametrize("name", DECAYING)
def test_extreme_decays(name, implementation, pattern, x64):
    """float32 against the float64 scan; the gradient of each kind of decay by its own size, not the largest one's."""
    inputs, cotangents = make_inputs(name), make_cotangents()
    decay = round_to(PATTERNS[pattern](gate_shape(name, "log_decay", SMALL)), np.float32)
    inputs["gates"]["log_decay"] = decay
    want = solve(name, "scan", inputs, cotangents)
    got = solve(name, implementation, inputs, cotangents, dtype=jnp.float32)
    for n, x in got.items():
        assert np.all(np.isfinite(x)), n
        tolerance = FLOAT32_DECAY if n == "grad_log_decay" else FLOAT32
        # e^-90 of something is below what float32 holds with all its digits, and may be flushed to 0.
        assert relative_error(x, want[n]) < tolerance or max(np.abs(x).max(), np.abs(want[n]).max()) < 1e-30, n
    for value in np.unique(decay):
        there = decay == value
        if np.linalg.norm(want["grad_log_decay"][there]) > 1e-30:
            error = relative_error(got["grad_log_decay"][there], want["grad_log_decay"][there])
            assert error < FLOAT32_DECAY, f"log_decay = {value}: {error:.1e}"


@pytest.mark.parametrize("pattern", ["five a token", "largest", "some resets", "mixed"])
@pytest.mark.parametrize("name", DECAYING)
def test_extreme_decays_in_float64(name, pattern, x64):
    """The two forms do not drift apart: nothing is clamped."""
    inputs, cotangents = make_inputs(name), make_cotangents()
    inputs["gates"]["log_decay"] = PATTERNS[pattern](gate_shape(name, "log_decay", SMALL))
    want = solve(name, "scan", inputs, cotangents)
    assert_close(solve(name, "xla", inputs, cotangents), want, FLOAT64)


@pytest.mark.parametrize("name", LIKE_NO_DECAY)
def test_no_decay_is_the_rule_without_one(name, x64):
    inputs, cotangents = make_inputs(name), make_cotangents()
    inputs["gates"]["log_decay"] = np.zeros_like(inputs["gates"]["log_decay"])
    without = {**inputs, "gates": {n: x for n, x in inputs["gates"].items() if n != "log_decay"}}
    got = solve(name, "xla", inputs, cotangents)
    want = solve(LIKE_NO_DECAY[name], "xla", without, cotangents)
    del got["grad_log_decay"]
    assert_close(got, want, FLOAT64)


@pytest.mark.parametrize("name", ["mamba2", "gated_delta_net", "q_delta2"])
def test_after_a_full_reset_the_past_is_gone(name, x64):
    """log_decay = -inf at one token is what a new segment is, to the last bit of what it can matter."""
    inputs, cotangents = make_inputs(name), make_cotangents()
    at = 21
    inputs["gates"]["log_decay"][:, at] = -np.inf
    ids = np.where(np.arange(SMALL.length) < at, 1, 2).astype(np.int32)
    ids = np.broadcast_to(ids, (SMALL.batch, SMALL.length))
    got = solve(name, "xla", inputs, cotangents)
    plain = {**inputs, "gates": {**inputs["gates"], "log_decay": inputs["gates"]["log_decay"].copy()}}
    plain["gates"]["log_decay"][:, at] = -1.0
    want = solve(name, "xla", plain, cotangents, ids)
    assert np.all(got["grad_log_decay"][:, at] == 0)
    assert_close(got, want, FLOAT64)


def test_kinds_of_decay():
    assert {type(RULES[name].gates["log_decay"].activation) for name in DECAYING} == {Decay}
