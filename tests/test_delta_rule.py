"""`delta_rule` and `step` as one contract: definition, causality, splitting, prefill and decode, dtypes, shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CHUNK,
    IMPLEMENTATIONS,
    SHAPES,
    SMALL,
    STRUCTURES,
    conformance,
    every_core_rule,
    every_implementation,
    every_rule,
    make_cotangents,
    make_inputs,
    round_to,
)
from reference import cast_inputs, forward, gradients, loop, solve
from tolerances import BF16, FLOAT32, FLOAT64, assert_close, relative_error

import qdelta_jax as qd
from qdelta_jax import RULES, delta_rule, resolve_implementation, step


def time_slice(inputs: dict, where: slice) -> dict:
    return {
        **{x: inputs[x][:, where] for x in "qkv"},
        "gates": {n: x[:, where] for n, x in inputs["gates"].items()},
        "initial_state": inputs["initial_state"],
    }


@conformance
def test_values_of_the_definition(name, implementation, x64):
    inputs = make_inputs(name)
    got = solve(name, implementation, inputs, make_cotangents())
    out, state = loop(name, inputs)
    assert relative_error(got["output"], out) < FLOAT64
    assert relative_error(got["final_state"], state) < FLOAT64


@every_rule
def test_gradients_of_the_definition(name, x64):
    inputs, cotangents = make_inputs(name), make_cotangents()
    want = solve(name, "scan", inputs, cotangents)
    assert_close(solve(name, "xla", inputs, cotangents), want, FLOAT64)


@every_core_rule
def test_kept_residuals_change_nothing(name, x64):
    inputs, cotangents = make_inputs(name), make_cotangents()
    want = solve(name, "xla", inputs, cotangents)
    assert_close(solve(name, "xla", inputs, cotangents, residuals="keep"), want, 1e-13)


@conformance
def test_the_past_knows_nothing_of_the_future(name, implementation, x64):
    """Tokens from 21 on (inside a chunk) change: nothing before them does, by a bit; nor has the past a gradient."""
    inputs, (d_out, d_state) = make_inputs(name), make_cotangents()
    other, at = make_inputs(name, seed=7), 21
    change = lambda x, y: np.concatenate([x[:, :at], y[:, at:]], axis=1)  # noqa: E731
    changed = {
        **{x: change(inputs[x], other[x]) for x in "qkv"},
        "gates": {n: change(x, other["gates"][n]) for n, x in inputs["gates"].items()},
        "initial_state": inputs["initial_state"],
    }
    d_out = np.where((np.arange(d_out.shape[1]) < at)[None, :, None, None], d_out, 0)
    cotangents = d_out, np.zeros_like(d_state)
    before, after = (solve(name, implementation, x, cotangents) for x in (inputs, changed))
    np.testing.assert_array_equal(after["output"][:, :at], before["output"][:, :at])
    assert not np.allclose(after["output"][:, at:], before["output"][:, at:])
    for n in ("grad_q", "grad_k", "grad_v", *(f"grad_{x}" for x in inputs["gates"])):
        np.testing.assert_array_equal(after[n][:, :at], before[n][:, :at], err_msg=n)
        assert np.all(after[n][:, at:] == 0), n


@pytest.mark.parametrize("at", [1, 16, 23, 39])
@conformance
def test_split_with_carried_state_is_the_whole(name, implementation, at, x64):
    """Also the gradient that flows back through the carried state. The parts are padded, so that nothing recompiles."""
    inputs, (d_out, d_state) = make_inputs(name), make_cotangents()
    before = np.broadcast_to(np.arange(SMALL.length) < at, d_out.shape[:2])
    run = partial(solve, name, implementation)
    whole = run(inputs, (d_out, d_state), np.ones_like(before, np.int32))
    middle = run(inputs, (d_out, d_state), before.astype(np.int32))["final_state"]
    back = run({**inputs, "initial_state": middle}, (d_out, d_state), (~before).astype(np.int32))
    front = run(inputs, (d_out, back["grad_initial_state"]), before.astype(np.int32))
    assert relative_error(back["final_state"], whole["final_state"]) < FLOAT64
    assert relative_error(front["grad_initial_state"], whole["grad_initial_state"]) < FLOAT64
    for n in ("output", "grad_q", "grad_k", "grad_v", *(f"grad_{x}" for x in inputs["gates"])):
        assert relative_error(front[n] + back[n], whole[n]) < FLOAT64, n


@pytest.mark.parametrize("name", ["q_delta2"])
def test_split_without_padding(name, x64):
    inputs, at = make_inputs(name), 23
    whole = forward(name, inputs, implementation="xla", chunk_size=CHUNK)
    first = forward(name, time_slice(inputs, slice(0, at)), implementation="xla", chunk_size=CHUNK)
    second = {**time_slice(inputs, slice(at, None)), "initial_state": first["final_state"]}
    second = forward(name, second, implementation="xla", chunk_size=CHUNK)
    assert relative_error(second["final_state"], whole["final_state"]) < FLOAT64
    joined = np.concatenate([first["output"], second["output"]], axis=1)
    assert relative_error(joined, whole["output"]) < FLOAT64


LENGTHS = (1, 2, 3, 63, 64, 65)


@every_rule
def test_prefill_then_step_is_forward(name, x64):
    """A prefill of T - 1 tokens, padded to 64, then one step."""
    inputs = make_inputs(name, PREFILL)
    out, _ = loop(name, inputs)
    bucket = time_slice(inputs, slice(0, 64))
    for length in LENGTHS:
        ids = (np.arange(64) < length - 1).astype(np.int32)[None]
        got = forward(name, bucket, ids, implementation="xla", chunk_size=CHUNK)
        assert relative_error(got["output"][:, : length - 1], out[:, : length - 1]) < FLOAT64
        check_step(name, inputs, got["final_state"], length, out)


@every_core_rule
def test_prefill_of_just_so_many_tokens_then_step_is_forward(name, x64):
    inputs = make_inputs(name, PREFILL)
    out, _ = loop(name, inputs)
    for length in (2, 3, 65):
        got = forward(name, time_slice(inputs, slice(0, length - 1)), implementation="xla")
        assert relative_error(got["output"], out[:, : length - 1]) < FLOAT64
        check_step(name, inputs, got["final_state"], length, out)


PREFILL = SMALL._replace(batch=1, length=65)


def check_step(name, inputs, state, length, want_out):
    token = jax.tree.map(lambda x: jnp.asarray(x[:, 0]), time_slice(inputs, slice(length - 1, length)))
    got_out, got_state = jitted_step(name, jnp.asarray(state), token)
    want_state = loop(name, time_slice(inputs, slice(0, length)))[1]
    assert relative_error(got_out, want_out[:, length - 1]) < FLOAT64, length
    assert relative_error(got_state, want_state) < FLOAT64, length


@partial(jax.jit, static_argnums=0)
def jitted_step(name, state, token):
    return step(state, *(token[x] for x in "qkv"), rule=name, gates=token["gates"])


@pytest.mark.parametrize(
    ("name", "implementation"), [*((n, "xla") for n in STRUCTURES), ("linear_attention", "scan"), ("q_delta2", "scan")]
)
def test_bfloat16_against_float64_on_the_same_rounded_inputs(name, implementation, x64):
    rounded, cotangents = round_to([make_inputs(name), list(make_cotangents())], jnp.bfloat16)
    state = make_inputs(name)["initial_state"]
    rounded["initial_state"] = state
    want = solve(name, "scan", rounded, cotangents)
    got = solve(name, implementation, rounded, cotangents, dtype=jnp.bfloat16)
    for n, x in got.items():
        kind = {"output": "output", "final_state": "state", "grad_log_decay": "decay"}.get(n, "gradient")
        assert relative_error(x, want[n]) < BF16[kind], n


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@every_implementation
def test_dtypes_of_results(implementation, dtype):
    """out in q's dtype, the state in float32, each gradient in its argument's dtype; float32 gates are welcome."""
    inputs = cast_inputs(make_inputs("q_delta2"), dtype)
    inputs["gates"] = cast_inputs(make_inputs("q_delta2"), jnp.float32)["gates"]

    def f(x):
        return delta_rule(
            *(x[n] for n in "qkv"),
            "q_delta2",
            x["gates"],
            initial_state=x["initial_state"],
            implementation=implementation,
            chunk_size=CHUNK,
        )

    (out, state), pull_back = jax.eval_shape(f, inputs), lambda x: jax.vjp(f, x)[1](f(x))[0]
    assert (out.dtype, state.dtype) == (dtype, jnp.float32)
    grads = jax.eval_shape(pull_back, inputs)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(lambda x: (x.shape, x.dtype), inputs)


@pytest.mark.parametrize("name", ["q_delta", "q_delta2"])
def test_grouped_values_are_repeated_keys(name, x64):
    """HV = 3 H with gates of H heads is the same as q, k and the gates repeated by hand; gradients sum over copies."""
    shape = SMALL._replace(heads=2, value_heads=6)
    inputs, cotangents = make_inputs(name, shape), make_cotangents(shape)
    inputs["gates"] = {n: x[:, :, :2] for n, x in inputs["gates"].items()}
    repeated = {
        **inputs,
        **{x: np.repeat(inputs[x], 3, axis=2) for x in "qk"},
        "gates": {n: np.repeat(x, 3, axis=2) for n, x in inputs["gates"].items()},
    }
    want = solve(name, "scan", repeated, cotangents)
    for n in ("grad_q", "grad_k", *(f"grad_{x}" for x in inputs["gates"])):
        want[n] = want[n].reshape(*want[n].shape[:2], 2, 3, *want[n].shape[3:]).sum(3)
    for implementation in IMPLEMENTATIONS:
        assert_close(solve(name, implementation, inputs, cotangents), want, FLOAT64, implementation)


@every_core_rule
def test_an_odd_shape(name, x64):
    inputs, cotangents = make_inputs(name, SHAPES["odd"]), make_cotangents(SHAPES["odd"])
    want = gradients(name, inputs, cotangents, implementation="scan")
    assert_close(gradients(name, inputs, cotangents, implementation="xla"), want, FLOAT64)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(96, 7), (1, 1)])
def test_any_head_size(key_dim, value_dim, x64):
    shape = SMALL._replace(batch=1, heads=1, value_heads=1, key_dim=key_dim, value_dim=value_dim)
    inputs, cotangents = make_inputs("q_delta2", shape), make_cotangents(shape)
    want = solve("q_delta2", "scan", inputs, cotangents)
    assert_close(solve("q_delta2", "xla", inputs, cotangents), want, FLOAT64)


@every_implementation
def test_defaults(implementation):
    """scale = K^-0.5, a zero state, no gates for a rule without."""
    inputs = cast_inputs(make_inputs("linear_attention"), jnp.float32)
    q, k, v = (inputs[x] for x in "qkv")
    options = {"implementation": implementation, "chunk_size": CHUNK}
    out, state = delta_rule(q, k, v, "linear_attention", **options)
    zeros = jnp.zeros_like(inputs["initial_state"])
    want = delta_rule(q, k, v, RULES["linear_attention"], {}, scale=8**-0.5, initial_state=zeros, **options)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(state, want[1])
    double, same = delta_rule(q, k, v, "linear_attention", scale=2 * 8**-0.5, **options)
    assert relative_error(double, 2 * np.asarray(out)) < FLOAT32
    np.testing.assert_array_equal(same, state)


@every_implementation
def test_scale_touches_the_output_only(implementation, x64):
    """The q inside q_delta's erase vector is not scaled."""
    inputs = make_inputs("q_delta")
    options = {"implementation": implementation, "chunk_size": CHUNK}
    one, three = (forward("q_delta", inputs, scale=s, **options) for s in (1.0, 3.0))
    assert relative_error(three["final_state"], one["final_state"]) < 1e-14
    assert relative_error(three["output"], 3 * one["output"]) < 1e-14


def test_implementation_is_resolved_by_name():
    assert resolve_implementation(None, 1) == "scan"
    assert resolve_implementation(None, 2) == "xla"
    for name in IMPLEMENTATIONS:
        assert resolve_implementation(name, 100) == name
    with pytest.raises(ValueError, match="implementation: got 'cuda'"):
        resolve_implementation("cuda", 100)


@qd.rule(beta=qd.per_head(), sharpness=qd.per_value_channel(), log_decay=qd.per_key_channel())
def sharpened(q, k, v, *, beta, sharpness, log_decay):
    """A rule of this file: erases half along q, writes a nonlinear function of v."""
    return qd.Coefficients(k, e=beta * (k - 0.5 * q), z=jnp.tanh(sharpness * v), log_decay=log_decay)


def test_a_rule_of_ones_own(x64):
    """A user's rule works everywhere with no change to the library; its gradient comes through its own function."""
    RULE = sharpened
    random = np.random.default_rng(0)
    inputs = make_inputs("kda")
    inputs["gates"]["sharpness"] = random.uniform(size=inputs["v"].shape)
    results = [solve(RULE, x, inputs, make_cotangents()) for x in IMPLEMENTATIONS]
    assert_close(results[1], results[0], FLOAT64)
    q, k = (np.repeat(inputs[x], 2, axis=2) for x in "qk")
    state = inputs["initial_state"]
    for t in range(q.shape[1]):
        beta, decay = inputs["gates"]["beta"][:, t, :, None], np.exp(inputs["gates"]["log_decay"][:, t])
        z = np.tanh(inputs["gates"]["sharpness"][:, t] * inputs["v"][:, t])
        state = decay[..., None] * state
        read = np.einsum("bhkv,bhk->bhv", state, beta * (k[:, t] - 0.5 * q[:, t]))
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], z - read)
    assert relative_error(results[0]["final_state"], state) < FLOAT64
