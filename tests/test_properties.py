"""Random shapes, segments and gates: the chunked form is the scan, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import STRUCTURES, Shape, make_cotangents, make_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import forward, gradients
from tolerances import FLOAT64, assert_close

DECAYS = (0.0, -1e-9, -0.05, -1.0, -7.0, -300.0, -np.inf)

few = settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def shapes(draw):
    heads, repeat = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes = [draw(st.integers(1, 5)) for _ in range(2)]
    return Shape(draw(st.integers(1, 2)), draw(st.integers(1, 21)), heads, heads * repeat, *sizes)


@st.composite
def calls(draw):
    shape = draw(shapes())
    name = draw(st.sampled_from(STRUCTURES))
    seed = draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    inputs = make_inputs(name, shape, seed)
    if "log_decay" in inputs["gates"]:
        some = draw(st.lists(st.sampled_from(DECAYS), min_size=1, max_size=4))
        inputs["gates"]["log_decay"] = random.choice(some, size=inputs["gates"]["log_decay"].shape)
    ids = draw(st.none() | st.just(random.choice([0, 0, 1, 1, 1, 2, 7], size=shape[:2]).astype(np.int32)))
    return name, shape, inputs, ids, draw(st.sampled_from([1, 2, 4, 5, 8, 16, 64]))


@given(calls())
@few
def test_chunks_are_the_scan(call):
    name, shape, inputs, ids, chunk_size = call
    with jax.enable_x64(True):
        cotangents = make_cotangents(shape)
        want = gradients(name, inputs, cotangents, ids, implementation="scan")
        got = gradients(name, inputs, cotangents, ids, implementation="xla", chunk_size=chunk_size)
        assert_close(got, want, FLOAT64)


@given(
    st.lists(st.integers(0, 3), min_size=24, max_size=24),
    st.lists(st.sampled_from(DECAYS), min_size=24, max_size=24),
    st.sampled_from(STRUCTURES),
)
@few
def test_any_segments_and_decays_in_one_shape(ids, decays, name):
    """Many patterns through few compilations; what is not finite would show."""
    shape = Shape(1, 24, 1, 1, 4, 3)
    inputs = make_inputs(name, shape)
    if "log_decay" in inputs["gates"]:
        decay = np.asarray(decays).reshape(1, 24, 1)
        wide = inputs["gates"]["log_decay"].ndim == 4
        inputs["gates"]["log_decay"] = (
            np.stack([decay, 0.1 * decay, decay, 0 * np.sign(inputs["q"][..., 0])], -1) if wide else decay
        )
    ids = np.asarray([ids], np.int32)
    with jax.enable_x64(True):
        want = gradients(name, inputs, make_cotangents(shape), ids, implementation="scan")
        got = gradients(name, inputs, make_cotangents(shape), ids, implementation="xla", chunk_size=8)
        assert all(np.all(np.isfinite(x)) for x in got.values())
        assert_close(got, want, FLOAT64)


@given(st.integers(0, 999))
@few
def test_the_state_of_a_delta_rule_stays_bounded(seed):
    """Unit keys and beta in [0, 2]: every factor of the transition is a contraction, whatever the values."""
    shape = Shape(1, 40, 1, 2, 8, 6)
    inputs = make_inputs("gated_delta_net", shape, seed)
    inputs["gates"]["beta"] = 2 * inputs["gates"]["beta"]
    inputs["v"] = np.zeros_like(inputs["v"])
    got = forward("gated_delta_net", inputs, implementation="xla", chunk_size=16, dtype=jnp.float32)
    before = np.linalg.norm(inputs["initial_state"], ord=2, axis=(-2, -1))
    after = np.linalg.norm(got["final_state"], ord=2, axis=(-2, -1))
    assert np.all(after <= before * (1 + 1e-5))
