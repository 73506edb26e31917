"""Multi-query associative recall against its definition, and the draws it is made of."""

import itertools

import numpy as np
import pytest

from qdelta_jax.tasks import Examples, accuracy, mqar
from qdelta_jax.tasks.draws import distinct, distinct_by_weight, generator

GRID = [(64, 4), (64, 16), (128, 8), (512, 64)]


def chi_squared_per_degree(counts, expected):
    """About 1 for counts of that law; its standard deviation is sqrt(2 / degrees)."""
    counts, expected = np.ravel(counts), np.ravel(expected)
    return float(np.sum((counts - expected) ** 2 / expected) / (len(counts) - 1))


def law(slots, power):
    weights = power * np.arange(1, slots + 1, dtype=float) ** (power - 1)
    return weights / weights.sum()


@pytest.mark.parametrize(("length", "pairs"), GRID)
@pytest.mark.parametrize("filler", ["zero", "random"])
def test_every_row_is_what_the_definition_says(length, pairs, filler):
    vocab = 1024
    examples = mqar(40, length=length, pairs=pairs, seed=3, vocab_size=vocab, filler=filler)
    assert [x.shape for x in examples] == [(40, length)] * 3
    assert [x.dtype for x in examples] == [np.int32, np.int32, np.bool_]
    for inputs, targets, mask in zip(*examples, strict=True):
        keys, values = inputs[: 2 * pairs : 2].tolist(), inputs[1 : 2 * pairs : 2].tolist()
        assert len(set(keys)) == pairs
        assert len(set(values)) == pairs
        assert all(1 <= k < vocab // 2 for k in keys)
        assert all(vocab // 2 <= v < vocab for v in values)
        stored = dict(zip(keys, values, strict=True))
        asked = np.flatnonzero(mask)
        assert np.all(asked >= 2 * pairs)
        assert np.all(asked % 2 == 0)
        assert sorted(inputs[asked].tolist()) == sorted(keys), "each key is asked once"
        assert [stored[k] for k in inputs[asked].tolist()] == targets[asked].tolist()
        assert not targets[~mask].any()


def test_filler_changes_nothing_else():
    zero, noise = (mqar(50, length=128, pairs=8, seed=1, vocab_size=200, filler=f) for f in ("zero", "random"))
    np.testing.assert_array_equal(zero.targets, noise.targets)
    np.testing.assert_array_equal(zero.mask, noise.mask)
    free = ~zero.mask
    free[:, :16] = False
    np.testing.assert_array_equal(zero.inputs[~free], noise.inputs[~free])
    assert not zero.inputs[free].any()
    filled = noise.inputs[free]
    assert filled.min() == 0
    assert filled.max() == 199
    counts = np.bincount(filled, minlength=200)
    assert 0.5 < chi_squared_per_degree(counts, np.full(200, len(filled) / 200)) < 1.5


def test_full_rows_have_no_slot_to_spare():
    examples = mqar(20, length=16, pairs=4, seed=0, vocab_size=17)
    np.testing.assert_array_equal(np.flatnonzero(examples.mask[0]), [8, 10, 12, 14])
    assert np.all(examples.mask == examples.mask[0])
    orders = {tuple(row[8::2]) for row in examples.inputs}
    assert len(orders) > 10


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0, 2.0])
def test_first_gap_has_the_power_law(power):
    rows, slots = 40_000, 30
    examples = mqar(rows, length=2 + 2 * slots, pairs=1, seed=5, vocab_size=128, power=power)
    gaps = (examples.mask.argmax(axis=1) - 2) // 2
    counts, expected = np.bincount(gaps, minlength=slots), rows * law(slots, power)
    assert 0.3 < chi_squared_per_degree(counts, expected) < 2
    # The test would see another law.
    assert chi_squared_per_degree(counts, rows * law(slots, power + 0.2)) > 2


def test_second_gap_is_drawn_from_the_slots_left():
    """P(i, j) = p_i p_j / (1 - p_i), gap i of the first key and j of the second."""
    rows, slots = 60_000, 6
    examples = mqar(rows, length=4 + 2 * slots, pairs=2, seed=6, vocab_size=64)
    gaps = [
        ((examples.inputs == examples.inputs[:, i : i + 1]) & examples.mask).argmax(axis=1) // 2 - 2 for i in (0, 2)
    ]
    counts = np.zeros((slots, slots))
    np.add.at(counts, tuple(gaps), 1)
    p = law(slots, 0.01)
    expected = rows * p[:, None] * p / (1 - p[:, None])
    other = ~np.eye(slots, dtype=bool)
    assert not counts[~other].any()
    assert 0.3 < chi_squared_per_degree(counts[other], expected[other]) < 1.8
    assert chi_squared_per_degree(counts[other], expected.T[other]) > 5, "the order of the draws matters"


def test_pairs_are_uniform_and_independent():
    rows, vocab = 20_000, 20
    examples = mqar(rows, length=16, pairs=2, seed=7, vocab_size=vocab)
    for position, low, high in ((0, 1, 10), (2, 1, 10), (1, 10, 20), (3, 10, 20)):
        counts = np.bincount(examples.inputs[:, position], minlength=vocab)
        assert counts[low:high].sum() == rows
        assert chi_squared_per_degree(counts[low:high], np.full(high - low, rows / (high - low))) < 3
    both = np.zeros((9, 10))
    np.add.at(both, (examples.inputs[:, 0] - 1, examples.inputs[:, 1] - 10), 1)
    assert 0.6 < chi_squared_per_degree(both, np.full(90, rows / 90)) < 1.5


def test_the_seed_decides():
    def make(seed):
        return mqar(30, length=64, pairs=4, seed=seed, filler="random")

    for seed in (0, 12345, (0, 7)):
        for a, b in zip(make(seed), make(seed), strict=True):
            np.testing.assert_array_equal(a, b)
    seeds = [0, 1, (0, 0), (0, 1), (1, 0), (0, 1, 0)]
    for a, b in itertools.combinations([make(seed) for seed in seeds], 2):
        assert not np.array_equal(a.inputs[:, :8], b.inputs[:, :8])
        assert not np.array_equal(a.mask, b.mask)


def test_large_sets_have_rows_of_their_own():
    """Blocks of rows that are filled together do not repeat each other."""
    examples = mqar(3000, length=64, pairs=4, seed=0)
    assert len(np.unique(examples.inputs, axis=0)) == 3000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 0}, "num_examples: got 0, want an integer of at least 1"),
        ({"length": 63}, "length: got 63, want an even number of at least 4 \\* pairs = 16"),
        ({"length": 14}, "length: got 14, want an even number of at least 4 \\* pairs = 16"),
        ({"pairs": 0}, "pairs: got 0, want an integer of at least 1"),
        ({"vocab_size": 64}, "vocab_size: got 64, want more than length = 64"),
        ({"power": 0.0}, "power: got 0.0, want a finite number above 0"),
        ({"power": float("nan")}, "power: got nan, want a finite number above 0"),
        ({"filler": "noise"}, "filler: got 'noise', want one of"),
        ({"seed": -1}, "seed: got -1, want an integer of at least 0"),
        ({"seed": (3, -1)}, "seed: got \\(3, -1\\), want an integer of at least 0"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        mqar(**{"num_examples": 2, "length": 64, "pairs": 4, "seed": 0, **changes})


@pytest.mark.parametrize("seed", [(), 1.0, "0", True, None])
def test_what_is_no_seed(seed):
    with pytest.raises(ValueError, match="seed: got"):
        generator(seed)


@pytest.mark.parametrize(("population", "count"), [(1, 1), (5, 2), (4, 4)])
def test_distinct_has_every_order_equally_often(population, count):
    rows = 24_000
    found = distinct(generator(0), rows, population, count)
    orders = list(itertools.permutations(range(population), count))
    counts = [int(np.all(found == order, axis=1).sum()) for order in orders]
    assert sum(counts) == rows
    if len(orders) > 1:
        assert 0.2 < chi_squared_per_degree(counts, np.full(len(orders), rows / len(orders))) < 2


def test_weights_of_any_size_can_be_drawn():
    found = distinct_by_weight(generator(0), 1000, np.array([-2000.0, 2000.0, 0.0, 2000.0]), 4)
    np.testing.assert_array_equal(found[:, 2:], np.tile([2, 0], (1000, 1)))
    assert 400 < np.sum(found[:, 0] == 1) < 600


def test_accuracy_counts_what_the_mask_says():
    targets = np.arange(12, dtype=np.int32).reshape(2, 6)
    mask = np.zeros((2, 6), bool)
    mask[0, :3] = mask[1, 5] = True
    examples = Examples(targets, targets, mask)
    guesses = np.full((2, 6), -1)
    guesses[0, 1], guesses[1, 5], guesses[1, 0] = 1, 11, 6
    assert accuracy(guesses, examples) == 0.5
    assert accuracy(targets, examples) == 1
    with pytest.raises(ValueError, match=r"predictions: got shape \(6, 2\), want \[B,T\] = \(2, 6\)"):
        accuracy(guesses.T, examples)
    with pytest.raises(ValueError, match="got a mask without any true position"):
        accuracy(guesses, examples._replace(mask=~mask & mask))
