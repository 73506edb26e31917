"""Every refusal names the argument, what arrived and what is wanted; nothing is broadcast silently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qdelta_jax as qd
from qdelta_jax import delta_rule, segment_final_states, segment_ids_from_cu_seqlens, step

pytestmark = pytest.mark.core

B, T, H, HV, K, V = 2, 5, 2, 4, 3, 7


def good(**changes):
    arguments = {
        "q": jnp.ones((B, T, H, K)),
        "k": jnp.ones((B, T, H, K)),
        "v": jnp.ones((B, T, HV, V)),
        "rule": "q_delta2",
        "gates": {
            "erase": jnp.ones((B, T, HV, K)),
            "write": jnp.ones((B, T, HV, V)),
            "feedback": jnp.ones((B, T, HV)),
            "log_decay": -jnp.ones((B, T, HV, K)),
        },
    }
    gates = {n: x for n, x in changes.items() if n in arguments["gates"] or n == "extra"}
    others = {n: x for n, x in changes.items() if n not in gates}
    arguments["gates"] = {n: x for n, x in {**arguments["gates"], **gates}.items() if x is not None}
    return {**arguments, **others}


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


TABLE = [
    # argument(s), what the message says: the name, what came, what is wanted
    ({"q": "text"}, ["q: got str", "want an array"]),
    ({"q": [[1.0]]}, ["q: got list", "want an array"]),
    ({"v": None}, ["v: got NoneType", "want an array"]),
    ({"q": ones(B, T, K)}, ["q: got shape (2, 5, 3)", "want 4 axes [B,T,H,K]"]),
    ({"v": ones(B, T, HV)}, ["v: got shape (2, 5, 4)", "want 4 axes [B,T,HV,V]"]),
    ({"q": ones(B, T, H, K, dtype=jnp.int32)}, ["q: got dtype int32", "want float32, bfloat16, float16 or float64"]),
    ({"k": ones(B, T, H, K, dtype=jnp.bfloat16)}, ["k: got dtype bfloat16", "float32"]),
    ({"v": ones(B, T, HV, V, dtype=jnp.float16)}, ["v: got dtype float16", "float32"]),
    ({"k": ones(B, T, HV, K)}, ["k: got shape (2, 5, 4, 3)", "(2, 5, 2, 3)"]),
    ({"k": ones(B, T, H, 1)}, ["k: got shape (2, 5, 2, 1)", "(2, 5, 2, 3)"]),
    ({"k": ones(1, T, H, K)}, ["k: got shape (1, 5, 2, 3)", "(2, 5, 2, 3)"]),
    ({"v": ones(1, T, HV, V)}, ["v: got shape (1, 5, 4, 7)", "(2, 5)"]),
    ({"v": ones(B, 1, HV, V)}, ["v: got shape (2, 1, 4, 7)", "(2, 5)"]),
    ({"v": ones(B, T, 3, V)}, ["v: got 3 heads", "multiple of the 2 heads"]),
    ({"v": ones(B, T, 1, V)}, ["v: got 1 heads", "multiple of the 2 heads"]),
    ({"q": ones(B, 0, H, K)}, ["q: got shape (2, 0, 2, 3)", "empty"]),
    ({"v": ones(B, T, HV, 0)}, ["v: got shape (2, 5, 4, 0)", "empty"]),
    ({"rule": "qdelta"}, ["rule: got 'qdelta'", "want a Rule or one of"]),
    ({"rule": None}, ["rule: got None", "want a Rule or one of"]),
    ({"gates": [1]}, ["gates: got list", "dict"]),
    (
        {"gates": None},
        ["gates: rule 'q_delta2' takes", "missing: ['erase', 'feedback', 'log_decay', 'write']"],
    ),
    ({"erase": None}, ["'q_delta2' takes ['erase', 'write', 'feedback', 'log_decay']", "missing: ['erase']"]),
    ({"extra": ones(B, T, HV)}, ["'q_delta2' takes", "unknown: ['extra']"]),
    ({"erase": 0.5}, ["gates['erase']: got float", "want an array"]),
    ({"erase": ones(B, T, HV, K, dtype=jnp.int32)}, ["gates['erase']: got dtype int32", "floating"]),
    ({"erase": ones(B, T, HV)}, ["gates['erase']: got shape (2, 5, 4)", "[B,T,H,3]", "H = 4 or 2 heads"]),
    ({"erase": ones(B, T, HV, 1)}, ["gates['erase']: got shape (2, 5, 4, 1)", "[B,T,H,3]"]),
    ({"erase": ones(B, T, HV, V)}, ["gates['erase']: got shape (2, 5, 4, 7)", "[B,T,H,3]"]),
    ({"write": ones(B, T, HV, K)}, ["gates['write']: got shape (2, 5, 4, 3)", "[B,T,H,7]"]),
    ({"write": ones(B, T, 1, V)}, ["gates['write']: got shape (2, 5, 1, 7)", "H = 4 or 2 heads"]),
    ({"write": ones(B, T, 3, V)}, ["gates['write']: got shape (2, 5, 3, 7)", "H = 4 or 2 heads"]),
    ({"feedback": ones(B, T, HV, 1)}, ["gates['feedback']: got shape (2, 5, 4, 1)", "[B,T,H]"]),
    ({"feedback": ones(B, T)}, ["gates['feedback']: got shape (2, 5)", "[B,T,H]"]),
    ({"feedback": ones(HV)}, ["gates['feedback']: got shape (4,)", "[B,T,H]"]),
    ({"feedback": ones(1, T, HV)}, ["gates['feedback']: got shape (1, 5, 4)", "(2, 5)"]),
    (
        {"log_decay": -ones(B, T, HV, V)},
        ["gates['log_decay']: got shape (2, 5, 4, 7)", "[B,T,H,3] or [B,T,H]"],
    ),
    ({"log_decay": ones(B, T, HV, K)}, ["gates['log_decay']: got a value of 1.0", "<= 0"]),
    (
        {"log_decay": (-ones(B, T, HV)).at[1, 2, 3].set(0.5)},
        ["gates['log_decay']: got a value of 0.5", "<= 0"],
    ),
    ({"scale": "big"}, ["scale: got 'big'", "number"]),
    ({"scale": ones(1)}, ["scale: got", "number"]),
    ({"scale": 1j}, ["scale: got 1j", "number"]),
    ({"scale": float("nan")}, ["scale: got nan", "number"]),
    ({"initial_state": ones(B, HV, V, K)}, ["initial_state: got shape (2, 4, 7, 3)", "(2, 4, 3, 7)"]),
    ({"initial_state": ones(B, H, K, V)}, ["initial_state: got shape (2, 2, 3, 7)", "(2, 4, 3, 7)"]),
    ({"initial_state": ones(1, HV, K, V)}, ["initial_state: got shape (1, 4, 3, 7)", "(2, 4, 3, 7)"]),
    (
        {"initial_state": ones(B, HV, K, V, dtype=jnp.bfloat16)},
        ["initial_state: got dtype bfloat16", "want float32"],
    ),
    ({"initial_state": 0.0}, ["initial_state: got", "[B,HV,K,V]"]),
    ({"segment_ids": ones(B, T)}, ["segment_ids: got dtype float32", "integer"]),
    ({"segment_ids": ones(B, T, dtype=bool)}, ["segment_ids: got dtype bool", "integer"]),
    ({"segment_ids": [[1] * T] * B}, ["segment_ids: got list", "integer"]),
    ({"segment_ids": ones(B, T + 1, dtype=jnp.int32)}, ["segment_ids: got shape (2, 6)", "[B,T] = (2, 5)"]),
    ({"segment_ids": ones(T, dtype=jnp.int32)}, ["segment_ids: got shape (5,)", "[B,T] = (2, 5)"]),
    ({"chunk_size": 0}, ["chunk_size: got 0", "at least 1"]),
    ({"chunk_size": -64}, ["chunk_size: got -64", "at least 1"]),
    ({"chunk_size": 16.0}, ["chunk_size: got 16.0", "integer"]),
    ({"chunk_size": True}, ["chunk_size: got True", "integer"]),
    ({"implementation": "cuda"}, ["implementation: got 'cuda'", "'scan', 'xla'"]),
    ({"implementation": 1}, ["implementation: got 1", "'scan', 'xla'"]),
    ({"residuals": "all"}, ["residuals: got 'all'", "'recompute' or 'keep'"]),
    ({"residuals": None}, ["residuals: got None", "'recompute' or 'keep'"]),
    ({"precision": "exact"}, ["precision: got 'exact'", "want"]),
]


@pytest.mark.parametrize(("changes", "parts"), TABLE, ids=[f"{n}-{'-'.join(c)}" for n, (c, _) in enumerate(TABLE)])
def test_delta_rule_refuses(changes, parts):
    with pytest.raises(ValueError, match=r"got|takes") as error:
        delta_rule(**good(**changes))
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"


@pytest.mark.parametrize("implementation", ["scan", "xla"])
def test_the_same_refusals_under_jit_and_grad(implementation):
    """Shapes are known while tracing: the message is the same."""

    @jax.jit
    @jax.grad
    def loss(v):
        return delta_rule(**good(v=v), implementation=implementation)[0].sum()

    with pytest.raises(ValueError, match="v: got 3 heads"):
        loss(ones(B, T, 3, V))


def test_good_arguments_are_good():
    out, state = delta_rule(**good())
    assert out.shape == (B, T, HV, V)
    assert state.shape == (B, HV, K, V)
    out, _ = delta_rule(**good(chunk_size=np.int64(4), scale=np.float32(2.0), segment_ids=np.ones((B, T), np.int8)))
    assert out.shape == (B, T, HV, V)


def test_numpy_arrays_are_arrays():
    arguments = jax.tree.map(lambda x: np.asarray(x) if hasattr(x, "shape") else x, good())
    np.testing.assert_array_equal(delta_rule(**arguments)[0], delta_rule(**good())[0])


@pytest.mark.parametrize("implementation", ["scan", "xla"])
def test_a_traced_positive_log_decay_is_left_to_validate(implementation):
    """Inside jit a value cannot be looked at: finite here, and refused by validate=True (test_validate)."""
    out = jax.jit(lambda g: delta_rule(**good(log_decay=g), implementation=implementation)[0])(ones(B, T, HV, K) * 0.1)
    assert bool(jnp.all(jnp.isfinite(out)))


STEP = [
    ({"state": ones(B, HV, V, K)}, ["state: got shape (2, 4, 7, 3)", "(2, 4, 3, 7)"]),
    ({"state": ones(B, HV, K, V, dtype=jnp.bfloat16)}, ["state: got dtype bfloat16", "want float32"]),
    ({"state": None}, ["state: got", "[B,HV,K,V]"]),
    ({"q": ones(B, 1, H, K)}, ["q: got shape (2, 1, 2, 3)", "want 3 axes [B,H,K]"]),
    ({"v": ones(B, 3, V)}, ["v: got 3 heads", "multiple of the 2 heads"]),
    ({"gates": {"beta": ones(B, 1, H)}}, ["gates['beta']: got shape (2, 1, 2)", "[B,H]"]),
    ({"gates": {}}, ["missing: ['beta']"]),
    ({"gates": None}, ["missing: ['beta']"]),
    ({"rule": "delta"}, ["rule: got 'delta'", "want a Rule or one of"]),
    ({"mask": ones(B)}, ["mask: got shape (2,) and dtype float32", "bool"]),
    ({"mask": ones(B, 1, dtype=bool)}, ["mask: got shape (2, 1)", "[B] = (2,)"]),
    ({"mask": True}, ["mask: got", "[B] = (2,)"]),
    ({"scale": "big"}, ["scale: got 'big'", "number"]),
]


@pytest.mark.parametrize(("changes", "parts"), STEP, ids=[f"{n}-{'-'.join(c)}" for n, (c, _) in enumerate(STEP)])
def test_step_refuses(changes, parts):
    arguments = {
        "state": ones(B, HV, K, V),
        "q": ones(B, H, K),
        "k": ones(B, H, K),
        "v": ones(B, HV, V),
        "rule": "delta_net",
        "gates": {"beta": ones(B, H)},
        **changes,
    }
    with pytest.raises(ValueError, match=r"got|takes") as error:
        step(**arguments)
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"


FINAL = [
    ({"num_segments": 0}, ["num_segments: got 0", "at least 1"]),
    ({"num_segments": 2.0}, ["num_segments: got 2.0", "integer"]),
    ({"max_length": 0}, ["max_length: got 0", "at least 1"]),
    ({"segment_ids": ones(B, T)}, ["segment_ids: got dtype float32", "integer"]),
    ({"q": "text"}, ["q: got str", "want an array"]),
    ({"q": ones(B, T, K)}, ["q: got shape (2, 5, 3)", "want 4 axes"]),
    ({"write": None}, ["missing: ['write']"]),
    ({"initial_state": ones(HV, K, V)}, ["initial_state: got shape (4, 3, 7)", "(2, 4, 3, 7)"]),
    (
        {"initial_state": ones(B, HV, K, V, dtype=jnp.float16)},
        ["initial_state: got dtype float16", "want float32"],
    ),
]


@pytest.mark.parametrize(("changes", "parts"), FINAL, ids=[f"{n}-{'-'.join(c)}" for n, (c, _) in enumerate(FINAL)])
def test_segment_final_states_refuses(changes, parts):
    arguments = {"segment_ids": ones(B, T, dtype=jnp.int32), "num_segments": 1, **good(**changes)}
    with pytest.raises(ValueError, match=r"got|takes") as error:
        segment_final_states(**{**arguments})
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"


@pytest.mark.parametrize(
    ("cu_seqlens", "length", "parts"),
    [
        (jnp.array([0.0, 3.0]), 3, ["cu_seqlens: got", "float32", "integers"]),
        (jnp.array([0]), 3, ["cu_seqlens: got shape (1,)", "n >= 1"]),
        (jnp.array([[0, 3]]), 3, ["cu_seqlens: got shape (1, 2)", "vector"]),
        ([0, 3], 3, ["cu_seqlens: got list", "vector"]),
        (jnp.array([0, 3]), 0, ["length: got 0", "at least 1"]),
        (jnp.array([0, 3, 2]), 4, ["cu_seqlens: got", "not decrease"]),
        (jnp.array([-1, 3]), 4, ["cu_seqlens: got", "from 0"]),
        (jnp.array([0, 9]), 4, ["cu_seqlens: got", "length 4"]),
    ],
)
def test_cu_seqlens_refuses(cu_seqlens, length, parts):
    with pytest.raises(ValueError, match="got") as error:
        segment_ids_from_cu_seqlens(cu_seqlens, length)
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"


def test_float64_wants_a_float64_state(x64):
    inputs = jax.tree.map(lambda x: x.astype(jnp.float64) if hasattr(x, "dtype") else x, good())
    with pytest.raises(ValueError, match="initial_state: got dtype float32, want float64"):
        delta_rule(**inputs, initial_state=jnp.zeros((B, HV, K, V), jnp.float32))


def test_messages_of_head_counts_without_groups():
    """With as many value heads as heads, only one number is wanted."""
    arguments = {x: ones(1, 2, 3, 4) for x in "qkv"}
    with pytest.raises(ValueError, match=r"gates\['beta'\]: got shape \(1, 2, 2\).*H = 3 heads"):
        delta_rule(**arguments, rule="delta_net", gates={"beta": ones(1, 2, 2)})
    assert qd.RULES["delta_net"].gates["beta"].axis == "head"


def test_narrow_cu_seqlens_do_not_wrap():
    ids = qd.segment_ids_from_cu_seqlens(np.array([0, 3, 200], np.uint8), 300)
    assert [int((ids == i).sum()) for i in (1, 2, 0)] == [3, 197, 100]


def test_padding_may_hold_a_positive_log_decay():
    q = jnp.ones((1, 3, 1, 2))
    gates = {"log_decay": jnp.array([[[1.0], [-1.0], [-1.0]]])}
    out, _ = qd.delta_rule(q, q, q, "mamba2", gates, segment_ids=jnp.array([[0, 1, 1]]))
    assert bool(jnp.isfinite(out).all())
    with pytest.raises(ValueError, match=r"gates\['log_decay'\]: got a value of 1.0, want log_decay <= 0"):
        qd.delta_rule(q, q, q, "mamba2", gates, segment_ids=jnp.array([[1, 1, 1]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qd.Gate("heads"), "axis: got 'heads', want 'head', 'key' or 'value'"),
        (lambda: qd.Gate("head", "sigmoid"), "activation: got 'sigmoid', want a function or a Decay"),
        (lambda: qd.Decay("mambo"), "kind: got 'mambo', want"),
        (lambda: qd.rule(beta=3)(lambda q, k, v, *, beta: None), "gate 'beta': got int, want a Gate"),
        (lambda: qd.rule()(lambda q, k: None), "want q, k, v and then the gates"),
        (
            lambda: qd.rule(log_decay=qd.per_value_channel())(lambda q, k, v, *, log_decay: None),
            "gate 'log_decay': got the axis 'value'",
        ),
    ],
)
def test_rules_are_checked_where_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_dtypes_that_the_solver_does_not_know():
    x = jnp.ones((1, 2, 1, 2), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="q: got dtype float8_e4m3fn, want float32, bfloat16, float16 or float64"):
        qd.delta_rule(x, x, x, "linear_attention")
    x = np.ones((1, 2, 1, 2))
    with pytest.raises(ValueError, match="q: got dtype float64 while jax_enable_x64 is off"):
        qd.delta_rule(x, x, x, "linear_attention")
