"""The table of rules: how rules collapse into each other, and what `rule` refuses."""

import numpy as np
import pytest
from cases import RULE_NAMES, every_implementation, make_cotangents, make_inputs
from reference import solve
from tolerances import FLOAT64, assert_close

import qdelta_jax as qd
from qdelta_jax import RULES, Coefficients, Rule, get_rule

pytestmark = pytest.mark.usefixtures("x64")


def channels(gate: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(gate[..., None], size, axis=-1)


def all_equal(inputs: dict, **gates) -> dict:
    return {**inputs, "gates": gates}


def values(x: dict) -> dict:
    """What both sides of a collapse have: everything but the gradients of gates."""
    return {n: x[n] for n in ("output", "final_state", "grad_q", "grad_k", "grad_v", "grad_initial_state")}


@pytest.fixture
def gates():
    """One of each gate, per head, over SMALL."""
    made = make_inputs("q_delta")["gates"]
    return made["beta"], made["feedback"], made["log_decay"]


def collapses(beta, feedback, log_decay):
    """(rule, its gates, the rule it becomes, its gates, {gate: the gates whose gradients sum to the gate's})."""
    key, value = 8, 6
    erase, write, decay = channels(beta, key), channels(beta, value), channels(log_decay, key)
    zero = np.zeros_like(log_decay)
    kda = {"beta": beta, "log_decay": decay}
    return [
        ("gated_delta_net2", {"erase": erase, "write": write, "log_decay": decay}, "kda", kda),
        ("kda", kda, "gated_delta_net", {"beta": beta, "log_decay": log_decay}),
        (
            "q_delta",
            {"beta": beta, "feedback": zero, "log_decay": log_decay},
            "gated_delta_net",
            {"beta": beta, "log_decay": log_decay},
        ),
        (
            "q_delta2",
            {"erase": erase, "write": write, "feedback": zero, "log_decay": decay},
            "gated_delta_net2",
            {"erase": erase, "write": write, "log_decay": decay},
        ),
        ("gated_delta_net", {"beta": beta, "log_decay": zero}, "delta_net", {"beta": beta}),
        ("kda", {"beta": beta, "log_decay": 0 * decay}, "delta_net", {"beta": beta}),
        ("mamba2", {"log_decay": zero}, "linear_attention", {}),
        ("retnet", {"log_decay": zero}, "linear_attention", {}),
        ("gla", {"log_decay": 0 * decay}, "linear_attention", {}),
        ("gla", {"log_decay": decay}, "mamba2", {"log_decay": log_decay}),
        (
            "gated_delta_net2",
            {"erase": 0 * erase, "write": 0 * write + 1, "log_decay": decay},
            "gla",
            {"log_decay": decay},
        ),
        (
            "q_delta2",
            {"erase": 0 * erase, "write": 0 * write + 1, "feedback": feedback, "log_decay": decay},
            "mamba2",
            {"log_decay": log_decay},
        ),
        ("retnet", {"log_decay": log_decay}, "mamba2", {"log_decay": log_decay}),
    ]


@pytest.mark.parametrize("number", range(13))
@every_implementation
def test_collapses(implementation, number, gates):
    name, rule_gates, other, other_gates = collapses(*gates)[number]
    inputs, cotangents = make_inputs("linear_attention"), make_cotangents()
    got = solve(name, implementation, {**inputs, "gates": rule_gates}, cotangents)
    want = solve(other, implementation, {**inputs, "gates": other_gates}, cotangents)
    assert_close(values(got), values(want), FLOAT64, f"{name} -> {other} ")
    if "log_decay" in rule_gates and "log_decay" in other_gates:
        decay = got["grad_log_decay"]
        wide = decay.ndim > want["grad_log_decay"].ndim
        assert_close(decay.sum(-1) if wide else decay, want["grad_log_decay"], FLOAT64, "grad_log_decay ")
    if "beta" in rule_gates and "beta" in other_gates:
        assert_close(got["grad_beta"], want["grad_beta"], FLOAT64, "grad_beta ")
    if "erase" in rule_gates and "beta" in other_gates:
        both = got["grad_erase"].sum(-1) + got["grad_write"].sum(-1)
        assert_close(both, want["grad_beta"], FLOAT64, "grad_beta of erase and write ")


@every_implementation
def test_without_feedback_the_gradient_of_feedback_remains(implementation, gates):
    """feedback = 0 is a point, not a switch: q_delta can learn away from it."""
    beta, _, log_decay = gates
    inputs = {**make_inputs("q_delta"), "gates": {"beta": beta, "feedback": 0 * beta, "log_decay": log_decay}}
    got = solve("q_delta", implementation, inputs, make_cotangents())
    assert np.all(np.abs(got["grad_feedback"]) > 1e-9)


@every_implementation
def test_a_channel_decay_may_be_given_per_head(implementation, gates):
    beta, _, log_decay = gates
    inputs, cotangents = make_inputs("linear_attention"), make_cotangents()
    narrow = {**inputs, "gates": {"beta": beta, "log_decay": log_decay}}
    wide = {**inputs, "gates": {"beta": beta, "log_decay": channels(log_decay, 8)}}
    got, want = (solve("kda", implementation, x, cotangents) for x in (narrow, wide))
    assert_close(values(got), values(want), FLOAT64)
    assert_close(got["grad_log_decay"], want["grad_log_decay"].sum(-1), FLOAT64)


@pytest.mark.parametrize("name", RULE_NAMES)
def test_every_entry_is_complete(name):
    entry = RULES[name]
    assert entry.name == name
    assert get_rule(name) is entry
    assert get_rule(entry) is entry
    assert entry.source
    assert entry.__doc__.startswith("S_t = ")
    assert hash(entry) == hash(RULES[name])
    assert name in repr(entry)


def test_rules_that_normalise_are_the_delta_rules():
    plain = {name for name, entry in RULES.items() if not entry.normalize}
    assert plain == {"linear_attention", "retnet", "mamba2", "gla"}


@pytest.mark.parametrize("which", ["qdelta", "", None, 3, len])
def test_unknown_rule(which):
    with pytest.raises(ValueError, match=r"rule: got .*want a Rule or one of \['delta_net'"):
        get_rule(which)


def test_the_gates_of_a_rule_are_its_keyword_arguments():
    def wrong(q, k, v, *, beta):
        return Coefficients(k, e=None, z=v, log_decay=None)

    with pytest.raises(ValueError, match=r"'wrong'.*\['beta'\].*@rule declares \['alpha'\]"):
        qd.rule(alpha=qd.per_head())(wrong)


def run(function, **gates):
    made = qd.rule(**{g: qd.per_head() for g in gates})(function)
    inputs = make_inputs("linear_attention")
    inputs["gates"] = {g: np.full(inputs["v"].shape[:3], x) for g, x in gates.items()}
    for implementation in ("scan", "xla"):
        solve(made, implementation, inputs, make_cotangents())


def test_a_rule_that_returns_no_coefficients():
    def pair(q, k, v):
        return k, v

    with pytest.raises(ValueError, match="rule 'pair': the function returned tuple, want Coefficients"):
        run(pair)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("k", lambda c: c._replace(k=c.k[..., :3])),
        ("e", lambda c: c._replace(e=c.z)),
        ("e", lambda c: c._replace(e=1.0)),
        ("z", lambda c: c._replace(z=c.k)),
        ("z", lambda c: c._replace(z=c.z.astype("float16"))),
        ("z", lambda c: c._replace(z=None)),
        ("log_decay", lambda c: c._replace(log_decay=c.z)),
        ("log_decay", lambda c: c._replace(log_decay=c.k[..., 0])),
        ("log_decay", lambda c: c._replace(log_decay=c.k[:, :1])),
    ],
)
def test_a_rule_that_returns_a_wrong_shape(field, change):
    """Nothing is broadcast silently: the message names the rule, the field, what came and what is wanted."""

    def crooked(q, k, v, *, beta):
        return change(Coefficients(k, e=beta * k, z=beta * v, log_decay=None))

    with pytest.raises(ValueError, match=f"rule 'crooked': {field} has shape .* want ") as error:
        run(crooked, beta=0.5)
    assert "(4, " in str(error.value)


def test_a_rule_is_a_value():
    assert isinstance(RULES["kda"], Rule)
    with pytest.raises(AttributeError):
        RULES["kda"].name = "other"
