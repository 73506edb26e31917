"""The GPU kernels against the definition in float64: every rule's values and gradients, and the hard cases."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Shape, every_rule, every_structure, make_cotangents, make_inputs
from kernels import (
    HEADS,
    INTERPRET,
    LENGTH,
    ON_GPU,
    QUICK,
    SEGMENTED,
    SMALL,
    all_heads,
    check_gradients,
    check_values,
    one_head,
    poisoned,
    rounded,
    run_kernels,
    run_stand_in,
    segments,
)
from reference import call, cast, cast_inputs, loop
from tolerances import FLOAT32_DECAY, KERNEL, KERNEL_CORRELATED, relative_error

import pallas_kernels
import qdelta_jax as qd
from qdelta_jax import RULES

BIG = Shape(2, 1000, 4, 8, 128, 128)
"""What fills several blocks of a GPU."""

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@every_rule
def test_values_and_gradients_of_every_rule(name):
    """A gradient depends on the kernels by the states they save: on a CPU, where they take seconds, those of a few
    rules do, and the other rules' values come below."""
    how = run_kernels if name in ("mamba2", "gla", "q_delta2") or ON_GPU else run_stand_in
    check_gradients(name, make_inputs(name, SMALL), make_cotangents(SMALL), how=how)


@pytest.mark.parametrize(("name", "dtype"), [("gla", BF16), ("q_delta", F16)])
def test_segments_and_poisoned_padding(name, dtype):
    ids = segments(SEGMENTED)
    check_values(name, poisoned(make_inputs(name, SEGMENTED), ids), dtype, ids)


def test_gradients_through_segments_and_poisoned_padding():
    """Through XLA, from the kernels' states, whose values with segments are tested above: on a CPU without kernels."""
    ids, how = segments(SEGMENTED), run_kernels if ON_GPU else run_stand_in
    inputs = poisoned(make_inputs("q_delta2", SEGMENTED), ids)
    check_gradients("q_delta2", inputs, make_cotangents(SEGMENTED), ids, how=how)


@pytest.mark.parametrize(
    ("name", "length", "dtype"), [("q_delta", 1, BF16), ("q_delta2", 63, F16), ("delta_net", 64, BF16)]
)
def test_lengths(name, length, dtype):
    check_values(name, make_inputs(name, SMALL._replace(length=length)), dtype)


THREE = SMALL._replace(length=130)
"""Three chunks."""

GROUPED = THREE._replace(value_heads=2)
WIDE = THREE._replace(key_dim=70, value_dim=72)
"""Two tiles of 64 channels for keys and for values."""


@pytest.mark.parametrize(
    ("name", "shape", "how"),
    [
        ("gated_delta_net2", WIDE, {"workers": 2, "layout": (2, 2)}),
        ("gla", GROUPED, {"count": 2}),
        ("retnet", WIDE, {"count": 2, "layout": (2, 1)}),
    ],
    ids=["two warpgroups", "two stretches", "both"],
)
def test_layouts(name, shape, how):
    """What `pallas_kernels.forward` chooses for other sizes; layout: warpgroups, chunks in flight."""
    check_values(name, make_inputs(name, shape), BF16, **how)


def test_saved_states_of_stretches():
    """The state before each chunk of 64 tokens, however the sequence is cut."""
    inputs = make_inputs("q_delta", THREE)
    rule, x = RULES["q_delta"], cast_inputs(inputs, F32)
    axes = {n: gate.axis for n, gate in rule.gates.items()}
    run = partial(pallas_kernels.forward, rule.function, axes, scale=0.25, save="states", interpret=INTERPRET, count=2)
    made = jax.jit(partial(run, **QUICK))(*(x[n] for n in "qkv"), x["gates"], x["initial_state"])
    for chunk, state in enumerate(made.states):
        before = {**inputs, **{n: inputs[n][:, : 64 * chunk] for n in "qkv"}}
        assert relative_error(state, loop("q_delta", before)[1]) <= KERNEL["float32"]


@pytest.mark.parametrize(("name", "dtype"), [("q_delta", BF16), ("q_delta2", BF16)])
def test_extreme_decays(name, dtype):
    """No decay at all, and full resets: every token's log_decay is one of 0, -1e4 and -inf."""
    inputs = make_inputs(name, SMALL)
    decay = inputs["gates"]["log_decay"]
    inputs["gates"]["log_decay"] = np.random.default_rng(0).choice([0.0, 0.0, 0.0, -1e4, -np.inf], size=decay.shape)
    check_values(name, inputs, dtype)


def test_gradients_of_extreme_decays():
    """Through XLA, as above."""
    inputs = make_inputs("q_delta2", SMALL)
    decay = inputs["gates"]["log_decay"]
    decay[:, 20:23] = -np.inf
    decay[:, 40:50, :, :5] = -1e4
    decay[:, 50:] = 0
    how = run_kernels if ON_GPU else run_stand_in
    check_gradients("q_delta2", inputs, make_cotangents(SMALL), tolerance=FLOAT32_DECAY, how=how)


@pytest.mark.parametrize(("name", "dtype"), [("delta_net", F32), ("gated_delta_net2", BF16)])
def test_correlated_keys(name, dtype):
    """Nearly equal keys, erased almost twice over."""
    inputs = make_inputs(name, SMALL)
    keys = inputs["k"][:, :1] + 0.05 * inputs["k"]
    inputs["k"] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    gate = "beta" if name == "delta_net" else "erase"
    inputs["gates"][gate] = np.full_like(inputs["gates"][gate], 1.9)
    check_values(name, inputs, dtype, tolerance=KERNEL_CORRELATED[jnp.dtype(dtype).name])


def test_a_decay_of_channels_given_per_head():
    inputs = make_inputs("kda", SMALL)
    inputs["gates"]["log_decay"] = inputs["gates"]["log_decay"][..., 0]
    check_values("kda", inputs, BF16)


@qd.rule(beta=qd.per_head(), sharpness=qd.per_value_channel(), log_decay=qd.per_key_channel())
def sharpened(q, k, v, *, beta, sharpness, log_decay):
    """A rule of this file: erases half along q, writes a nonlinear function of v."""
    return qd.Coefficients(k, e=beta * (k - 0.5 * q), z=jnp.tanh(sharpness * v), log_decay=log_decay)


def test_a_rule_of_ones_own():
    """With gates in float32, which is more than the inputs have, as layers make them."""
    inputs = make_inputs("kda", SMALL)
    inputs["gates"]["sharpness"] = np.random.default_rng(0).uniform(size=inputs["v"].shape)
    inputs = {**cast_inputs(rounded(inputs, BF16), BF16), "gates": cast(inputs["gates"], F32)}
    with run_kernels():
        got = call(sharpened, inputs, implementation="mosaic")
    want = call(sharpened, inputs, implementation="xla")
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) <= KERNEL["bfloat16"]


@qd.rule(beta=qd.per_head())
def awkward(q, k, v, *, beta):
    """Keys that are not 0 where k is, a number made of a shape, a decay per channel that no gate makes."""
    key = 0.3 * jnp.exp(k)
    return qd.Coefficients(key, e=beta * key * k.shape[-1] ** -0.5, z=jnp.log1p(v), log_decay=jnp.full_like(k, -0.1))


@pytest.mark.parametrize("size", [1e-6] + [1.0] * ON_GPU)
def test_padded_channels_shapes_constants_and_small_values(size):
    inputs = make_inputs("delta_net", SMALL)
    inputs = {**inputs, **{n: size * abs(inputs[n]) for n in ("v", "initial_state")}}
    inputs = cast_inputs(inputs, F32)
    with run_kernels():
        got = call(awkward, inputs, implementation="mosaic")
    want = call(awkward, inputs, implementation="xla")
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) <= KERNEL["float32"]


@pytest.mark.gpu
@every_rule
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_many_blocks(name, dtype):
    """Against the chunked form in float32 products: the definition in float64 would take minutes."""
    inputs = rounded(make_inputs(name, BIG), dtype)
    given = cast_inputs(inputs, dtype)
    with run_kernels():
        got = call(name, given, implementation="mosaic")
    want = call(name, cast_inputs(inputs, F32), implementation="xla")
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) <= KERNEL[np.dtype(dtype).name]


@pytest.mark.gpu
@every_structure
def test_repeated_runs_are_equal(name):
    """Bit for bit, on a problem that keeps every multiprocessor busy for many chunks: a race would show here."""
    inputs = cast_inputs(rounded(make_inputs(name, Shape(2, 4096, 16, 16, 128, 128)), BF16), BF16)
    with run_kernels():
        run = jax.jit(partial(call, name, implementation="mosaic"))
        first, *rest = (run(inputs) for _ in range(10))
    for other in rest:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gated_delta_net", "gla"])
def test_more_than_2_31_elements(name):
    """More tokens, too, than 65,535 chunks. A head alone is small enough for offsets of 32 bits."""
    assert LENGTH * HEADS * 128 > 1 << 31
    with run_kernels():
        run = jax.jit(partial(call, name, implementation="mosaic"))
        out, state = run(all_heads(name))
        for index in (0, HEADS - 1):
            want, end = run(one_head(name, index))
            error = jnp.linalg.norm((out[:, :, index] - want[:, :, 0]).astype(F32)) / jnp.linalg.norm(want.astype(F32))
            assert float(error) <= KERNEL["bfloat16"]
            assert relative_error(state[:, index], end[:, 0]) <= KERNEL["bfloat16"]
