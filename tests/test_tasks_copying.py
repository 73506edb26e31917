"""Copying and selective copying against their definition."""

import itertools

import numpy as np
import pytest

from qdelta_jax.tasks import copying, selective_copying

TASKS = [copying, selective_copying]


@pytest.mark.parametrize("make", TASKS)
@pytest.mark.parametrize(("length", "tokens", "vocab"), [(64, 16, 16), (7, 3, 4), (8, 4, 100), (2, 1, 5)])
def test_every_row_is_what_the_definition_says(make, length, tokens, vocab):
    examples = make(25, length=length, tokens=tokens, vocab_size=vocab, seed=1)
    assert [x.shape for x in examples] == [(25, length)] * 3
    assert [x.dtype for x in examples] == [np.int32, np.int32, np.bool_]
    for inputs, targets, mask in zip(*(x.tolist() for x in examples), strict=True):
        assert mask == [False] * (length - tokens) + [True] * tokens
        assert inputs[length - tokens :] == [vocab - 1] * tokens
        data = [x for x in inputs[: length - tokens] if x != 0]
        assert len(data) == tokens
        assert all(1 <= x <= vocab - 2 for x in data)
        assert targets == [0] * (length - tokens) + data
        if make is copying:
            assert inputs[:tokens] == data


@pytest.mark.parametrize("make", TASKS)
def test_data_are_uniform(make):
    counts = np.bincount(make(1000, length=64, tokens=16, vocab_size=10, seed=2).targets[:, -16:].ravel())
    assert len(counts) == 9
    assert counts[0] == 0
    assert np.all(np.abs(counts[1:] - 2000) < 5 * np.sqrt(2000))


def test_places_are_uniform():
    """All (6 choose 3) choices of places are as frequent."""
    rows = 20_000
    examples = selective_copying(rows, length=9, tokens=3, seed=3)
    places = np.nonzero(examples.inputs[:, :6])[1].reshape(rows, 3)
    counts = [int(np.all(places == choice, axis=1).sum()) for choice in itertools.combinations(range(6), 3)]
    assert len(counts) == 20
    assert sum(counts) == rows
    assert np.all(np.abs(np.array(counts) - 1000) < 5 * np.sqrt(1000))


@pytest.mark.parametrize("make", TASKS)
def test_the_seed_decides(make):
    one, same, other = (make(8, length=100, seed=s) for s in (4, 4, 5))
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.targets, other.targets)
    if make is selective_copying:
        assert not np.array_equal(one.inputs == 0, other.inputs == 0)


@pytest.mark.parametrize("make", TASKS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 0}, "num_examples: got 0, want an integer of at least 1"),
        ({"length": 31}, "length: got 31, want at least 2 \\* tokens = 32"),
        ({"tokens": 0}, "tokens: got 0, want an integer of at least 1"),
        ({"vocab_size": 3}, "vocab_size: got 3, want at least 4"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_bad_arguments(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**{"num_examples": 2, "length": 64, "seed": 0, **changes})
