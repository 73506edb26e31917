"""Diagnostics of a memory against a loop in NumPy: every rule, packed and padded with NaN, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULE_NAMES, every_core_rule, make_inputs
from reference import ERASE_WRITE, cast_inputs, loop
from test_dynamics import IDS, SHAPE, see
from tolerances import FLOAT64, assert_close

import qdelta_jax as qd
from qdelta_jax import dynamics

PARTS = ("forgotten", "erased", "written")
ERASING = [name for name in RULE_NAMES if name in ERASE_WRITE]


def visits(name, inputs, ids):
    """(row, head, t), its factors, (S_{t-1}, decayed, S_t, opens a segment) in float64, from the papers' e and z."""
    batch, length, heads, key_dim = inputs["q"].shape
    for b, h in np.ndindex(batch, inputs["v"].shape[2]):
        state, last = np.array(inputs["initial_state"][b, h]), None
        for t in range(length):
            if ids[b, t] == 0:
                continue
            opens = last != ids[b, t]
            if opens and last is not None:
                state = np.zeros_like(state)
            last = ids[b, t]
            q, k = (inputs[x][b, t, h * heads // inputs["v"].shape[2]] for x in "qk")
            gates = {g: x[b, t, h] for g, x in inputs["gates"].items()}
            v = inputs["v"][b, t, h]
            made = ERASE_WRITE.get(name, lambda q, k, v, g: (0 * k, v))
            e, z = made(q, k, v, gates)
            decay = np.broadcast_to(np.exp(gates.get("log_decay", np.zeros(()))), (key_dim,))
            decayed = decay[:, None] * state
            after = decayed + np.outer(k, z - decayed.T @ e)
            factors = {"q": q, "k": k, "e": e, "z": z, "v": v, "w": z / v, "decay": decay}
            yield (b, h, t), factors, (state, decayed, after, opens)
            state = after


@pytest.mark.usefixtures("x64")
class TestAgainstALoop:
    """Every rule, packed and padded with NaN, in float64."""

    @pytest.mark.parametrize("name", RULE_NAMES)
    def test_along_states(self, name):
        inputs = make_inputs(name, SHAPE)
        shape = (*IDS.shape, SHAPE.value_heads)
        cos = np.zeros((2, *shape))
        sums = {part: (np.zeros((2, 2, SHAPE.key_dim)), np.zeros((2, 2, SHAPE.value_dim))) for part in PARTS}
        radius, gain = np.ones(shape), np.zeros(shape)
        for at, x, (before, decayed, after, _) in visits(name, inputs, IDS):
            for i, state in enumerate((decayed, after)):
                a, b = state.T @ x["q"], state.T @ x["k"]
                size = np.linalg.norm(a) * np.linalg.norm(b)
                cos[i][at_index(at)] = a @ b / size if size > 0 else 0
            matrix = (np.eye(SHAPE.key_dim) - np.outer(x["k"], x["e"])) * x["decay"][None]
            radius[at_index(at)] = np.abs(np.linalg.eigvals(matrix)).max()
            gain[at_index(at)] = x["k"] @ x["e"]
            changes = before - decayed, np.outer(x["k"], decayed.T @ x["e"]), np.outer(x["k"], x["z"])
            for part, change in zip(PARTS, changes, strict=True):
                for axis, total in zip((1, 0), sums[part], strict=True):
                    total[at[0], at[1]] += np.linalg.norm(change, axis=axis)

        @jax.jit
        def measure(q, k, v, gates, state):
            call, ids = (q, k, v, name, gates), {"segment_ids": jnp.asarray(IDS)}
            both = {"initial_state": state, **ids}
            return {
                "cosines": [dynamics.readout_cosine(*call, **both, after_write=x) for x in (False, True)],
                "radius": dynamics.spectral_radius(*call, **ids),
                "eigenvalues": dynamics.transition_eigenvalues(*call, **ids),
                "activity": dynamics.channel_activity(*call, **both),
                "gain": dynamics.erase_gain(*call, **ids) if name in ERASING else jnp.zeros(shape),
            }

        (q, k, v, _, gates), options = poisoned(name)
        got = see(measure, q, k, v, gates, options["initial_state"])
        assert_close(got["cosines"], list(cos), FLOAT64)
        assert_close(got["radius"], radius, FLOAT64)
        assert_close(np.abs(got["eigenvalues"][..., 0]), radius, FLOAT64)
        assert_close(got["gain"], gain, FLOAT64)
        count = (IDS != 0).sum(1)[:, None, None]
        absent = {"forgotten": "log_decay" not in qd.RULES[name].gates, "erased": name not in ERASING, "written": False}
        for part, totals in sums.items():
            for axis, want in zip(("key", "value"), totals, strict=True):
                seen = getattr(got["activity"], f"{axis}_{part}")
                assert (seen is None) == absent[part]
                if seen is not None:
                    assert_close(seen, want / count, FLOAT64)

    @pytest.mark.parametrize("name", ["delta_net", "kda", "q_delta", "q_delta2"])
    def test_tracking(self, name):
        inputs = make_inputs(name, SHAPE)
        want = {field: np.zeros((*IDS.shape, SHAPE.value_heads)) for field in dynamics.Tracking._fields}
        held: dict = {}
        for at, x, (before, decayed, after, opens) in visits(name, inputs, IDS):
            found, read, left = (s.T @ x["e"] / x["w"] for s in (before, decayed, after))
            gain = x["k"] @ x["e"]
            seen = {"gain": gain, "before": x["v"] - read, "after": x["v"] - left, "counted": 1}
            if opens:
                held = {"rate": 0, "drift": 0, "first": np.linalg.norm(seen["after"]), "steps": 0}
            else:
                parts = x["v"] - held["v"], found - held["left"], read - found
                seen |= dict(zip(("target", "prediction", "forgetting"), parts, strict=True))
                seen["drift"] = parts[0] - parts[1] - parts[2]
                np.testing.assert_allclose(seen["before"], held["error"] + seen["drift"], atol=1e-12)
                held["rate"] = max(held["rate"], abs(1 - gain))
                held["drift"] = max(held["drift"], np.linalg.norm(seen["drift"]))
                held["steps"] += 1
            held |= {"v": x["v"], "left": left, "error": seen["after"]}
            rho = held["rate"]
            powers = sum(rho**i for i in range(1, held["steps"] + 1))
            seen["bound"] = rho ** held["steps"] * held["first"] + powers * held["drift"]
            for field, value in seen.items():
                want[field][at_index(at)] = np.linalg.norm(value) if np.ndim(value) else value
        (q, k, v, _, gates), options = poisoned(name)
        got = see(dynamics.track, q, k, v, name, gates, segment_ids=IDS, **options)
        assert_close(got._asdict(), want, 1e-9)
        assert np.all(got.after <= got.bound * (1 + 1e-9) + 1e-12)
        assert_close(got.after, np.abs(1 - got.gain) * got.before, 1e-9)

    @pytest.mark.parametrize(("name", "size"), [("gla", 1), ("q_delta2", 4)])
    def test_retrieval(self, name, size):
        inputs, ages = make_inputs(name, SHAPE), 5
        error, cosine = (np.zeros((2, 2, ages)) for _ in range(2))
        pairs, stored = np.zeros((2, 2, ages)), {}
        number = np.cumsum(IDS != 0, 1) - 1
        for (b, h, t), x, (_, _, after, opens) in visits(name, inputs, IDS):
            stored[b, h] = [*([] if opens else stored[b, h]), (x["k"], x["v"])]
            if (number[b, t] + 1) % size and number[b, t] != number[b].max():
                continue
            for age, (k, v) in enumerate(stored[b, h][::-1][:ages]):
                got = after.T @ k
                error[b, h, age] += np.linalg.norm(got - v) / np.linalg.norm(v)
                cosine[b, h, age] += got @ v / np.linalg.norm(got) / np.linalg.norm(v)
                pairs[b, h, age] += 1
        (q, k, v, _, gates), options = poisoned(name)
        options |= {"segment_ids": jnp.asarray(IDS), "max_age": ages, "chunk_size": size}
        seen = dynamics.retrieval_by_age(q, k, v, name, gates, **options)
        per_pair = np.maximum(pairs, 1)
        assert_close(tuple(seen), (error / per_pair, cosine / per_pair, pairs[:, 0]), FLOAT64)

    def test_complex_eigenvalues(self):
        """With a decay per channel, a transition may turn: eigenvalues in pairs, as NumPy finds them."""
        random_ = np.random.default_rng(0)
        k, q = (random_.normal(size=(1, 6, 1, 4)) for _ in range(2))
        gates = {
            "erase": random_.uniform(size=(1, 6, 1, 4)),
            "write": np.ones((1, 6, 1, 4)),
            "feedback": np.full((1, 6, 1), 2.0),
            "log_decay": -random_.uniform(size=(1, 6, 1, 4)),
        }
        q, k, gates = jax.tree.map(jnp.asarray, (q, k, gates))
        got = np.asarray(dynamics.transition_eigenvalues(q, k, k, "q_delta2", gates))[0, :, 0]
        e = np.asarray(gates["erase"] * (k + 2.0 * q))[0, :, 0]
        matrices = np.eye(4) - np.asarray(k)[0, :, 0, :, None] * e[:, None]
        want = np.linalg.eigvals(matrices * np.exp(np.asarray(gates["log_decay"]))[0, :, 0, None])
        assert np.abs(want.imag).max() > 0.1
        np.testing.assert_allclose(np.sort_complex(got), np.sort_complex(want), atol=1e-12)
        assert (np.diff(np.abs(got), axis=-1) <= 1e-12).all()


def at_index(at):
    b, h, t = at
    return b, t, h


def poisoned(name):
    """The arguments with NaN in padding."""
    inputs = make_inputs(name, SHAPE)
    for x in (inputs["q"], inputs["k"], inputs["v"], *inputs["gates"].values()):
        x[IDS == 0] = np.nan
    x = cast_inputs(inputs, jnp.float64)
    return (x["q"], x["k"], x["v"], name, x["gates"]), {"initial_state": x["initial_state"]}


@pytest.mark.usefixtures("x64")
@every_core_rule
def test_streamed_states_are_those_of_the_whole(name):
    call, options = poisoned(name)
    options["segment_ids"] = jnp.asarray(IDS)
    stream = list(dynamics.chunk_states(*call, **options, chunk_size=5))
    assert [end for end, _ in stream] == [5, 10, 13]
    inputs = make_inputs(name, SHAPE)
    for end, state in stream:
        cut = {x: inputs[x][:, :end] for x in "qkv"} | {"initial_state": inputs["initial_state"]}
        cut["gates"] = {g: x[:, :end] for g, x in inputs["gates"].items()}
        assert_close(state, loop(name, cut, segment_ids=IDS[:, :end])[1], FLOAT64)
    mapped = dynamics.map_states(same, *call, **options, chunk_size=5)
    assert_close(mapped, np.stack([state for _, state in stream]), FLOAT64)


def same(state):
    return state
