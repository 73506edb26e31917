"""Diagnostics of a memory: cases with known answers, a loop in NumPy, and what must not change them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Shape, make_inputs
from flax import nnx
from reference import cast_inputs
from tolerances import FLOAT32, assert_close

import qdelta_jax as qd
from qdelta_jax import Gate, dynamics
from qdelta_jax.models import LanguageModel, ModelConfig

SHAPE = Shape(2, 13, 1, 2, 5, 4)
IDS = np.array([[0, 4, 4, 4, 0, 4, 2, 2, 2, 2, 9, 9, 0], [1] * 13], np.int32)
"""Padding in front, inside and behind, three segments; and a row without."""


def arguments(name, dtype=jnp.float64, shape=SHAPE):
    x = cast_inputs(make_inputs(name, shape), dtype)
    return (x["q"], x["k"], x["v"], name, x["gates"]), {"initial_state": x["initial_state"]}


def see(measure, *call, **options):
    """measure(...) of NumPy arrays, in NumPy arrays."""
    move = partial(jax.tree.map, lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x)
    return jax.tree.map(np.asarray, measure(*move(call), **move(options)))


def unit(rows):
    rows = np.asarray(rows, np.float64)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True))[None, :, None]


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.usefixtures("x64")
class TestKnownAnswers:
    @pytest.mark.parametrize("name", ["delta_net", "gated_delta_net2"])
    def test_orthogonal_keys_lose_nothing(self, name):
        k, v = np.linalg.qr(random(8, 8))[0][None, :, None], random(1, 8, 1, 3)
        ones = {"beta": np.ones((1, 8, 1)), "erase": np.ones((1, 8, 1, 8)), "write": np.ones((1, 8, 1, 3))}
        gates = {g: ones.get(g, np.zeros((1, 8, 1))) for g in qd.RULES[name].gates}
        seen = see(dynamics.retrieval_by_age, k, k, v, name, gates, max_age=9, chunk_size=1)
        assert np.max(seen.error) < 1e-14
        np.testing.assert_allclose(seen.cosine[0, 0, :8], 1, rtol=1e-14)
        np.testing.assert_array_equal(seen.pairs[0], [8, 7, 6, 5, 4, 3, 2, 1, 0])

    def test_decay_loses_what_is_old(self):
        """Orthogonal keys forgotten by exp(-1/2) a token: an error of 1 - exp(-age / 2), in the right direction."""
        k, v = np.eye(6)[None, :, None], random(1, 6, 1, 3)
        gates = {"beta": np.ones((1, 6, 1)), "log_decay": np.full((1, 6, 1), -0.5)}
        seen = see(dynamics.retrieval_by_age, k, k, v, "gated_delta_net", gates, max_age=6, chunk_size=4)
        np.testing.assert_allclose(seen.error[0, 0], 1 - np.exp(-np.arange(6) / 2), atol=1e-14)
        np.testing.assert_allclose(seen.cosine[0, 0], 1, rtol=1e-14)

    def test_one_key_rewritten(self):
        """Every write replaces the last: the last value is read, and the drift is the step between two values."""
        k, v = np.broadcast_to(unit([[3.0, 4.0]]), (1, 5, 1, 2)), random(1, 5, 1, 3)
        beta = {"beta": np.ones((1, 5, 1))}
        ((end, state),) = see(lambda *call: list(dynamics.chunk_states(*call)), k, k, v, "delta_net", beta)
        assert end == 5
        np.testing.assert_allclose(np.einsum("bhkv,bhk->bhv", state, k[:, -1]), v[:, -1], atol=1e-14)
        seen = see(dynamics.track, k, k, v, "delta_net", beta)
        steps = np.linalg.norm(np.diff(v[0, :, 0], axis=0), axis=-1)
        for got in (seen.drift, seen.target, seen.before):
            np.testing.assert_allclose(got[0, 1:, 0], steps, rtol=1e-13)
        for got in (seen.prediction, seen.forgetting, seen.after):
            np.testing.assert_allclose(got, 0, atol=1e-14)
        assert seen.drift[0, 0, 0] == 0
        old = see(dynamics.retrieval_by_age, k, k, v, "delta_net", beta, max_age=2, chunk_size=5)
        want = np.linalg.norm(v[0, 4, 0] - v[0, 3, 0]) / np.linalg.norm(v[0, 3, 0])
        np.testing.assert_allclose(old.error[0, 0], [0, want], atol=1e-14)

    def test_a_moving_key_drifts_by_what_the_state_reads_there(self):
        """By hand: S = beta k1 v1^T, halved: r = v2 - v1 - (k1.k2 - 1) beta v1 - (1/2 - 1) beta (k1.k2) v1."""
        k, v, beta = unit([[1.0, 0.0], [3.0, 4.0]]), random(1, 2, 1, 3), 0.75
        gates = {"beta": np.full((1, 2, 1), beta), "log_decay": np.full((1, 2, 1), np.log(0.5))}
        seen = see(dynamics.track, k, k, v, "gated_delta_net", gates)
        first, second = np.asarray(v[0, :, 0])
        parts = second - first, (0.6 - 1) * beta * first, -0.5 * 0.6 * beta * first
        got = seen.target, seen.prediction, seen.forgetting, seen.drift
        for x, want in zip(got, (*parts, parts[0] - parts[1] - parts[2]), strict=True):
            np.testing.assert_allclose(x[0, 1, 0], np.linalg.norm(want), rtol=1e-13)

    @pytest.mark.parametrize("wanted", [0.01, 1.0, 1.99, "any"])
    def test_writes_contract_inside(self, wanted):
        """No decay, beta a in (0, 2): the residual shrinks by |1 - beta a| and the bound holds."""
        q, k, v = (random(2, 30, 2, 6, seed=s) for s in range(3))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        full = partial(np.full, (2, 30, 2))
        if wanted == "any":
            wanted = np.random.default_rng(4).uniform(0, 2, (2, 30, 2))
        # a = 1 + feedback q.k is in (0, 2) for a feedback below 1.
        beta = full(wanted) / (1 + 0.4 * np.sum(q * k, -1))
        gates = {"beta": beta, "feedback": full(0.4), "log_decay": full(0.0)}
        state = random(2, 2, 6, 6, seed=3)
        gain = see(dynamics.erase_gain, q, k, v, "q_delta", gates)
        np.testing.assert_allclose(gain, full(wanted), rtol=1e-12)
        np.testing.assert_array_equal(see(dynamics.contracting_share, gain), [1, 1])
        seen = see(dynamics.track, q, k, v, "q_delta", gates, initial_state=state)
        np.testing.assert_allclose(seen.after, abs(1 - wanted) * seen.before, atol=1e-12)
        assert np.all(seen.after < seen.before)
        assert np.all(seen.after <= seen.bound * (1 + 1e-12) + 1e-12)
        assert not np.any(seen.forgetting)

    @pytest.mark.parametrize("beta", [-0.2, 2.1])
    def test_writes_expand_outside(self, beta):
        k, v = unit(random(20, 6)), random(1, 20, 1, 4, seed=1)
        gates = {"beta": np.full((1, 20, 1), beta)}
        seen = see(dynamics.track, k, k, v, "delta_net", gates)
        assert np.all(seen.after > seen.before)
        assert np.all(seen.after <= seen.bound * (1 + 1e-12))
        assert see(dynamics.contracting_share, seen.gain)[0] == 0

    @pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 1.9, 2.5, 7.0])
    def test_spectral_radius_of_one_write(self, beta):
        k = random(1, 3, 1, 4)
        got = see(dynamics.spectral_radius, k, k, k, "delta_net", {"beta": np.full((1, 3, 1), beta)})
        want = np.maximum(1, np.abs(1 - beta * np.sum(k**2, -1)))
        np.testing.assert_allclose(got, want, rtol=1e-13)

    @pytest.mark.parametrize("rank", [1, 2, 5])
    def test_effective_rank_of_equal_singular_values(self, rank):
        left, right = (np.linalg.qr(random(2, 7, rank, seed=s))[0] for s in (0, 1))
        state = 3.0 * (left @ np.swapaxes(right, -1, -2))
        for measure in (dynamics.effective_rank, dynamics.stable_rank):
            np.testing.assert_allclose(see(measure, state), rank, rtol=1e-12)
            np.testing.assert_array_equal(see(measure, 0 * state), 0)
        np.testing.assert_allclose(see(dynamics.singular_values, state)[:, :rank], 3, rtol=1e-12)

    def test_effective_rank_stays_below_the_rank(self):
        state = np.einsum("kr,rv->kv", random(7, 3), random(3, 6, seed=1))
        assert 1 < see(dynamics.stable_rank, state) < 3
        assert 1 < see(dynamics.effective_rank, state) < 3 + 1e-9

    def test_readings_along_and_across(self):
        k, v = np.eye(2)[None, :, None], np.asarray([[1.0, 0.0], [0.0, 1.0]])[None, :, None]
        q = np.asarray([[1.0, 0.0], [1.0, 0.0]])[None, :, None]
        cosine = partial(see, dynamics.readout_cosine, q, k, v, "linear_attention")
        np.testing.assert_array_equal(cosine().ravel(), [0, 0])
        np.testing.assert_allclose(cosine(after_write=True).ravel(), [1, 0], atol=1e-15)

    def test_activity_of_one_token(self):
        """S = k2 [0, 5]^T, halved; the key k1 + k2 erases half of what it reads there and writes half of v."""
        state = np.zeros((1, 1, 2, 2))
        state[0, 0, 1, 1] = 5.0
        k, v = np.ones((1, 1, 1, 2)), np.asarray([3.0, 4.0]).reshape(1, 1, 1, 2)
        gates = {"beta": np.full((1, 1, 1), 0.5), "log_decay": np.full((1, 1, 1), np.log(0.5))}
        seen = see(dynamics.channel_activity, k, k, v, "gated_delta_net", gates, initial_state=state)
        want = [0, 2.5], [1.25, 1.25], [2.5, 2.5], [0, 2.5], [0, 1.25 * 2**0.5], [1.5 * 2**0.5, 2 * 2**0.5]
        for name, x, y in zip(seen._fields, seen, want, strict=True):
            np.testing.assert_allclose(x.ravel(), y, rtol=1e-13, err_msg=name)

    def test_gate_statistics(self):
        gates = {"beta": np.asarray([0.0, 1.0, 9.0]).reshape(1, 3, 1), "log_decay": np.full((1, 3, 1, 2), -np.inf)}
        seen = see(dynamics.gate_statistics, gates, segment_ids=np.asarray([[1, 1, 0]]))
        assert seen["beta"].mean.tolist() == seen["beta"].std.tolist() == [0.5]
        np.testing.assert_array_equal(seen["log_decay"].mean, [[0, 0]])


def test_memory_is_bounded():
    """Temporary memory grows by far less than the states of a sequence twice as long."""

    def temporary(length):
        (q, k, v, name, gates), _ = arguments("delta_net", jnp.float32, Shape(1, length, 1, 1, 16, 16))
        run = jax.jit(lambda *x: dynamics.map_states(dynamics.effective_rank, *x[:3], name, x[3], chunk_size=16))
        return run.lower(q, k, v, gates).compile().memory_analysis().temp_size_in_bytes

    states = 4 * 16 * 16 * (2048 - 1024) // 16
    assert temporary(2048) - temporary(1024) < states / 8


def test_jit_and_vmap():
    """Under a transformation, and for a stack of gates, the same numbers."""
    (q, k, v, name, gates), _ = arguments("delta_net", jnp.float32)

    def measure(gates):
        made = (q, k, v, name, gates)
        return (
            dynamics.track(*made).bound,
            dynamics.retrieval_by_age(*made, max_age=3, chunk_size=4).error,
        )

    stack = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), gates)
    want = [measure(gates), measure(jax.tree.map(lambda x: 0.5 * x, gates))]
    got = jax.jit(jax.vmap(measure))(stack)
    assert_close(got, jax.tree.map(lambda *x: np.stack(x), *want), FLOAT32)


def test_half_precision_is_measured_in_float32():
    (q, k, v, name, gates), options = arguments("q_delta", jnp.bfloat16)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v, gates))
    seen = dynamics.track(q, k, v, name, gates, **options)
    assert seen.gain.dtype == jnp.float32
    assert_close(seen, dynamics.track(*exact[:3], name, exact[3], **options), FLOAT32)


@qd.rule(amount=Gate("value"), log_decay=Gate("head"))
def leaky(q, k, v, *, amount, log_decay):
    return qd.Coefficients(k, e=0.1 * (k - q), z=amount * v, log_decay=log_decay)


@qd.rule()
def squares(q, k, v):
    return qd.Coefficients(k, e=k, z=v * v, log_decay=None)


def test_a_rule_of_the_user():
    (q, k, v, _, _), options = arguments("delta_net", jnp.float32)
    gates = {"amount": jnp.full((2, 13, 2, 4), 0.5), "log_decay": jnp.full((2, 13, 2), -0.1)}
    seen = dynamics.track(q, k, v, leaky, gates, **options)
    assert_close(seen.after, jnp.abs(1 - seen.gain) * seen.before, FLOAT32)
    assert bool(jnp.all(seen.after <= 1.0001 * seen.bound))
    with pytest.raises(ValueError, match="rule: got 'squares', whose z is no multiple of v"):
        dynamics.track(q, k, v, squares)


def test_tokens_that_write_nothing_are_passed_over():
    (q, k, v, name, gates), _ = arguments("delta_net", jnp.float32)
    silent = gates["beta"].at[:, 4].set(0.0)
    kept = np.array([t for t in range(13) if t != 4])
    seen = dynamics.track(q, k, v, name, {"beta": silent})
    assert not np.asarray(seen.counted[:, 4]).any()
    cut = dynamics.track(q[:, kept], k[:, kept], v[:, kept], name, {"beta": silent[:, kept]})
    assert_close(jax.tree.map(lambda x: x[:, kept], seen), cut, FLOAT32)


@pytest.mark.parametrize(("first", "rate", "steps"), [(0.0, 3.0, 1e4), (1.0, 0.0, 0.0), (2.0, 1.0, 7.0)])
def test_bounds_at_the_edges(first, rate, steps):
    got = float(dynamics.tracking_bound(*(jnp.float32(x) for x in (first, rate, 0.0, steps))))
    assert got == first
    assert float(dynamics.tracking_bound(*(jnp.float32(x) for x in (1.0, 3.0, 1.0, 1e4)))) == np.inf


def test_captured_inputs_leave_the_state_that_the_model_keeps():
    """In the second of the stacked cells, and in the layers behind them; the rule is one that scales its values."""
    config = ModelConfig(
        **{"vocab_size": 17, "width": 8, "layers": 5, "mlp_hidden": 4, "pattern": ("rule", "rule")},
        **{"rule": "mamba2", "heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 3},
        **{"conv_width": 2, "implementation": "scan"},
    )
    model, ids = nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))(), jnp.asarray(IDS)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, 17)
    _, cache = nnx.jit(lambda m: m(tokens, segment_ids=ids, cache=m.init_cache(2, 13)))(model)
    for layer, want in ((3, cache.cells[1].state[1]), (-1, cache.rest[0].state)):
        q, k, v, gates = dynamics.capture(model, tokens, layer, segment_ids=ids)
        assert (q.shape, v.shape) == ((2, 13, 2, 4), (2, 13, 4, 3))
        _, state = qd.delta_rule(q, k, v, "mamba2", gates, segment_ids=ids, implementation="scan")
        assert_close(state, want, FLOAT32)


def test_refusals():
    (q, k, v, _, gates), _ = arguments("delta_net", jnp.float32)
    for measure in (dynamics.track, dynamics.erase_gain):
        with pytest.raises(ValueError, match="rule: got 'linear_attention', which erases nothing, want"):
            measure(q, k, v, "linear_attention")
    state = jnp.zeros((2, 2, 5, 4))
    every = (
        dynamics.track,
        dynamics.readout_cosine,
        dynamics.channel_activity,
        dynamics.retrieval_by_age,
        dynamics.chunk_states,
        partial(dynamics.map_states, dynamics.effective_rank),
    )
    for measure in every:
        with pytest.raises(ValueError, match=r"k: got shape \(2, 13, 1, 4\), want q's shape"):
            measure(q, k[..., :4], v, "delta_net", gates)
        with pytest.raises(ValueError, match="gates: rule 'delta_net' takes"):
            measure(q, k, v, "delta_net")
        with pytest.raises(ValueError, match=r"initial_state: got shape \(2, 2, 5, 3\), want"):
            measure(q, k, v, "delta_net", gates, initial_state=state[..., :3])
        with pytest.raises(ValueError, match=r"segment_ids: got shape \(2, 12\), want"):
            measure(q, k, v, "delta_net", gates, segment_ids=jnp.ones((2, 12), jnp.int32))
        with pytest.raises(ValueError, match="rule: got 'gdn', want a Rule or one of"):
            measure(q, k, v, "gdn", gates)
    with pytest.raises(ValueError, match=r"gates\['log_decay'\]: got a value of 1"):
        dynamics.spectral_radius(q, k, v, "retnet", {"log_decay": jnp.ones((2, 13, 2))})
    with pytest.raises(ValueError, match="chunk_size: got 0, want an integer of at least 1"):
        dynamics.chunk_states(q, k, v, "delta_net", gates, chunk_size=0)
    with pytest.raises(ValueError, match="max_age: got 0"):
        dynamics.retrieval_by_age(q, k, v, "delta_net", gates, max_age=0)
    with pytest.raises(ValueError, match=r"state: got shape \(3,\), want an array \[..., K, V\]"):
        dynamics.effective_rank(jnp.ones(3))
    with pytest.raises(ValueError, match="state: got dtype int32, want float32 or float64"):
        dynamics.stable_rank(jnp.ones((3, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"gain: got shape \(2, 3\), want \[B,T,HV\]"):
        dynamics.contracting_share(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"gates\['beta'\]: got shape \(2, 3\)"):
        dynamics.gate_statistics({"beta": jnp.ones((2, 3))})
    with pytest.raises(ValueError, match=r"rate: got a value of -1\.0, want none below 0"):
        dynamics.tracking_bound(*(jnp.float32(x) for x in (1, -1, 1, 1)))


def test_refusals_of_capture():
    config = ModelConfig(
        **{"vocab_size": 8, "width": 8, "layers": 2, "mlp_hidden": 8, "pattern": ("rule", "attention")},
        **{"key_dim": 4, "value_dim": 4, "attention_heads": 2},
    )
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    tokens = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="layer: got 1, which is 'attention' in the pattern"):
        dynamics.capture(model, tokens, 1)
    with pytest.raises(ValueError, match=r"layer: got 2, want an integer within -2 .. 1"):
        dynamics.capture(model, tokens, 2)
    with pytest.raises(ValueError, match=r"tokens: got values 9 .. 9, want them within 0 .. 7"):
        dynamics.capture(model, tokens + 9, 0)
