"""Packed and padded sequences: what segment_ids promise, over every rule and implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHUNK, FEWER, SMALL, conformance, every_core_rule, every_structure, make_cotangents, make_inputs
from reference import loop, solve
from tolerances import FLOAT64, assert_close, assert_same_numbers

from qdelta_jax import RULES, delta_rule, segment_final_states, step

PATTERNS = np.array(
    [
        [1] * 40,
        [5, 2, 2, 3, 3, 3, 4, 9, 9, 8, 8, 8, 7, 1, 1, 6] + [2, 3, 4, 4] + [5] * 14 + [6, 6, 6, 1, 2, 2],
        [0] * 5 + [3] * 9 + [0] * 4 + [3] * 6 + [7] * 10 + [0] * 6,
        [0] * 17 + [1, 0, 1, 0, 2, 0, 0, 2, 3] + [0] * 13 + [-1],
    ],
    np.int32,
)
"""One whole row; segments of 1 to 3 tokens, also across chunk boundaries; padding left, inside and right; and
segments that padding interrupts, chunks that are padding alone, a negative id."""

EMPTY = np.zeros((4, 40), np.int32)


def segments_of(row: np.ndarray) -> list[np.ndarray]:
    """The token numbers of each segment of one row, in order."""
    found, last = [], None
    for t in np.flatnonzero(row):
        if row[t] != last:
            found.append([])
            last = row[t]
        found[-1].append(t)
    return [np.array(x) for x in found]


def tokens(inputs: dict) -> dict:
    """What has a time axis."""
    return {**{x: inputs[x] for x in "qkv"}, **inputs["gates"]}


def with_tokens(inputs: dict, change) -> dict:
    """The inputs with `change` applied to each array that has a time axis."""
    return {
        **{x: change(inputs[x]) for x in "qkv"},
        "gates": {n: change(x) for n, x in inputs["gates"].items()},
        "initial_state": inputs["initial_state"],
    }


@pytest.mark.parametrize(("name", "implementation"), FEWER)
def test_values_of_the_definition(name, implementation, x64):
    inputs = make_inputs(name)
    got = solve(name, implementation, inputs, make_cotangents(), PATTERNS)
    out, state = loop(name, inputs, segment_ids=PATTERNS)
    assert_close(
        {"output": got["output"], "final_state": got["final_state"]},
        {"output": out, "final_state": state},
        FLOAT64,
    )


@conformance
def test_packed_is_separate(name, implementation, x64):
    """Every segment alone, as a left-aligned row, gives the outputs and the gradients it has in the pack."""
    inputs, (d_out, d_state) = make_inputs(name), make_cotangents()
    packed = solve(name, implementation, inputs, (d_out, d_state), PATTERNS)
    pieces = [(b, i, where) for b, row in enumerate(PATTERNS) for i, where in enumerate(segments_of(row))]
    last = {b: i for b, i, _ in pieces}
    rows = len(PATTERNS)
    for first in range(0, len(pieces), rows):
        batch = pieces[first : first + rows]
        ids = np.zeros_like(PATTERNS)
        alone = jax.tree.map(np.zeros_like, inputs)
        cotangents = np.zeros_like(d_out), np.zeros_like(d_state)
        for row, (b, i, where) in enumerate(batch):
            ids[row, : len(where)] = 1
            for x, y in zip(jax.tree.leaves(tokens(alone)), jax.tree.leaves(tokens(inputs)), strict=True):
                x[row, : len(where)] = y[b, where]
            cotangents[0][row, : len(where)] = d_out[b, where]
            if i == 0:
                alone["initial_state"][row] = inputs["initial_state"][b]
            if i == last[b]:
                cotangents[1][row] = d_state[b]
        got = solve(name, implementation, alone, cotangents, ids)
        for row, (b, i, where) in enumerate(batch):
            for n in ("output", *(f"grad_{x}" for x in tokens(inputs))):
                np.testing.assert_allclose(
                    got[n][row, : len(where)], packed[n][b, where], rtol=0, atol=1e-10, err_msg=n
                )
            if i == 0:
                np.testing.assert_allclose(got["grad_initial_state"][row], packed["grad_initial_state"][b], atol=1e-10)
            if i == last[b]:
                np.testing.assert_allclose(got["final_state"][row], packed["final_state"][b], atol=1e-10)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e30])
@conformance
def test_padding_reaches_nothing(name, implementation, poison, x64):
    """NaN, infinities and a decay above 1 in padded tokens: outputs, states and gradients do not change by a bit."""
    inputs, cotangents = make_inputs(name), make_cotangents()
    padding = PATTERNS == 0

    def poisoned(x):
        return np.where(padding.reshape(*padding.shape, *[1] * (x.ndim - 2)), poison, x)

    clean = solve(name, implementation, inputs, cotangents, PATTERNS)
    got = solve(
        name,
        implementation,
        with_tokens(inputs, poisoned),
        (poisoned(cotangents[0]), cotangents[1]),
        PATTERNS,
    )
    for n, x in clean.items():
        np.testing.assert_array_equal(got[n], x, err_msg=n)
    for n in ("output", *(f"grad_{x}" for x in tokens(inputs))):
        assert np.all(got[n][padding] == 0), n


@conformance
def test_a_row_of_padding_keeps_the_state(name, implementation, x64):
    inputs, cotangents = make_inputs(name), make_cotangents()
    got = solve(name, implementation, inputs, cotangents, EMPTY)
    np.testing.assert_array_equal(got["final_state"], inputs["initial_state"])
    np.testing.assert_array_equal(got["grad_initial_state"], cotangents[1])
    for n in ("output", *(f"grad_{x}" for x in tokens(inputs))):
        assert np.all(got[n] == 0), n


@conformance
def test_left_padding_moves_nothing(name, implementation, x64):
    """A row of 11 tokens gives the same wherever in the row it stands."""
    inputs, (d_out, d_state) = make_inputs(name), make_cotangents()
    length, starts = 11, (0, 3, 16, 29)
    ids = np.zeros_like(PATTERNS)
    same = np.zeros(4, int)
    moved, d_moved = jax.tree.map(lambda x: x[same].copy(), (inputs, d_out))
    for row, start in enumerate(starts):
        ids[row, start : start + length] = 4
        for x in (*jax.tree.leaves(tokens(moved)), d_moved):
            x[row, start : start + length] = x[row, :length].copy() if start else x[row, :length]
    for row, start in enumerate(starts):
        for x, y in zip(jax.tree.leaves(tokens(moved)), jax.tree.leaves(tokens(inputs)), strict=True):
            x[row, start : start + length] = y[0, :length]
        d_moved[row, start : start + length] = d_out[0, :length]
    got = solve(name, implementation, moved, (d_moved, d_state[same]), ids)
    for row, start in enumerate(starts):
        for n in ("output", *(f"grad_{x}" for x in tokens(inputs))):
            want = got[n][0, :length]
            np.testing.assert_allclose(got[n][row, start : start + length], want, rtol=0, atol=1e-10, err_msg=n)
        for n in ("final_state", "grad_initial_state"):
            np.testing.assert_allclose(got[n][row], got[n][0], rtol=0, atol=1e-10, err_msg=n)


@every_core_rule
def test_no_ids_means_one_segment(name, x64):
    inputs, cotangents = make_inputs(name), make_cotangents()
    got = solve(name, "xla", inputs, cotangents, None)
    assert_close(got, solve(name, "xla", inputs, cotangents, np.full_like(PATTERNS, 3)), FLOAT64)


@every_structure
def test_segment_final_states(name, x64):
    """The state after each segment, against the definition run on it alone; rows with fewer have zeros behind."""
    inputs = make_inputs(name)
    ids = PATTERNS.copy()
    ids[1, 4:] = np.repeat([4, 0, 6], 12)
    count = max(len(segments_of(row)) for row in ids)
    args = (*(jnp.asarray(inputs[x]) for x in "qkv"), name, jax.tree.map(jnp.asarray, inputs["gates"]))
    got = segment_final_states(
        *args,
        segment_ids=jnp.asarray(ids),
        num_segments=count,
        initial_state=jnp.asarray(inputs["initial_state"]),
        chunk_size=CHUNK,
    )
    assert got.shape == (4, count, *inputs["initial_state"].shape[1:])
    for b, row in enumerate(ids):
        segments = segments_of(row)
        for i in range(count):
            if i >= len(segments):
                assert np.all(np.asarray(got[b, i]) == 0)
                continue
            alone = with_tokens(inputs, lambda x, b=b, where=segments[i]: x[b : b + 1, where])
            alone["initial_state"] = inputs["initial_state"][b : b + 1] * (i == 0)
            np.testing.assert_allclose(np.asarray(got[b, i]), loop(name, alone)[1][0], rtol=0, atol=1e-10)


def test_padding_before_a_segment_does_not_count_to_its_length():
    """max_length = 3 suffices for segments of 3 tokens, wherever padding stands around them."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(1, 12, 1, 2)), jnp.float32) for _ in range(3))
    ids = jnp.array([[0, 0, 0, 5, 5, 5, 0, 0, 6, 6, 6, 0]])
    states = segment_final_states(q, k, v, "linear_attention", segment_ids=ids, num_segments=2, max_length=3)
    for i, first in enumerate((3, 8)):
        alone = slice(first, first + 3)
        want = delta_rule(q[:, alone], k[:, alone], v[:, alone], "linear_attention", implementation="scan")[1]
        np.testing.assert_allclose(states[:, i], want, rtol=1e-5, atol=1e-6)


def test_step_with_a_mask(x64):
    inputs = make_inputs("q_delta2")
    token = with_tokens(inputs, lambda x: jnp.asarray(x[:, 0]))
    state = jnp.asarray(inputs["initial_state"])
    arguments = {"rule": "q_delta2", "gates": token["gates"]}
    mask = np.array([True, False, True, False])
    out, after = step(state, token["q"], token["k"], token["v"], **arguments)
    poisoned = jax.tree.map(lambda x: jnp.asarray(np.where(mask.reshape(4, *[1] * (x.ndim - 1)), x, np.nan)), token)
    masked_out, masked_after = step(
        state, *(poisoned[x] for x in "qkv"), rule="q_delta2", gates=poisoned["gates"], mask=jnp.asarray(mask)
    )
    assert_same_numbers(masked_out[mask], out[mask])
    assert_same_numbers(masked_after[mask], after[mask])
    assert np.all(np.asarray(masked_out)[~mask] == 0)
    np.testing.assert_array_equal(masked_after[~mask], state[~mask])


def test_masks_matter_at_batch_size_one(x64):
    inputs = make_inputs("kda", SMALL._replace(batch=1))
    args = (*(jnp.asarray(inputs[x]) for x in "qkv"), "kda", jax.tree.map(jnp.asarray, inputs["gates"]))
    ids = np.concatenate([np.zeros(12, np.int32), np.ones(28, np.int32)])[None]
    for implementation in ("scan", "xla"):
        padded, _ = delta_rule(*args, segment_ids=jnp.asarray(ids), implementation=implementation)
        plain, _ = delta_rule(*args, implementation=implementation)
        assert np.all(np.asarray(padded[:, :12]) == 0)
        assert not np.allclose(padded[:, 12:], plain[:, 12:])


def test_every_rule_is_in_the_table():
    assert len(RULES) == 10
