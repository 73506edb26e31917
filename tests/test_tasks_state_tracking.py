"""Parity, modular addition and permutation words against products taken one by one, and the laws of groups."""

import itertools
import math

import numpy as np
import pytest

from qdelta_jax.tasks import modular_addition, parity, permutation_words, permutations

GROUPS = [(2, None), (3, None), (3, 2), (5, None), (5, 2), (5, 3), (7, 2)]


def assert_all_counts(examples, shape):
    assert [x.shape for x in examples] == [shape] * 3
    assert [x.dtype for x in examples] == [np.int32, np.int32, np.bool_]
    assert examples.mask.all()


def test_parity_is_the_number_of_ones():
    examples = parity(30, length=101, seed=0)
    assert_all_counts(examples, (30, 101))
    assert set(np.unique(examples.inputs)) == {0, 1}
    for bits, states in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
        odd = False
        for bit, state in zip(bits, states, strict=True):
            odd ^= bit == 1
            assert state == odd
    assert abs(examples.inputs.mean() - 0.5) < 0.05
    # Adding what is next undoes nothing: both states are as frequent.
    assert abs(examples.targets.mean() - 0.5) < 0.05


@pytest.mark.parametrize("modulus", [2, 3, 5, 60])
def test_modular_addition_is_the_remainder_of_the_sum(modulus):
    examples = modular_addition(20, length=77, modulus=modulus, seed=1)
    assert_all_counts(examples, (20, 77))
    for row, states in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
        assert states == [total % modulus for total in itertools.accumulate(row)]
    counts = np.bincount(modular_addition(200, length=100, modulus=modulus, seed=2).inputs.ravel(), minlength=modulus)
    assert len(counts) == modulus
    expected = 20_000 / modulus
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


def test_large_remainders_do_not_overflow():
    examples = modular_addition(1, length=5000, modulus=2_000_000_011, seed=0)
    assert examples.targets[0, -1] == sum(examples.inputs[0].tolist()) % 2_000_000_011


def test_permutations_are_numbered_in_order():
    for degree in range(2, 8):
        found = permutations(degree)
        assert found.shape == (math.factorial(degree), degree)
        assert [tuple(p) for p in found.tolist()] == sorted(set(itertools.permutations(range(degree))))


@pytest.mark.parametrize(("degree", "max_moved"), GROUPS)
def test_words_are_products_of_permutations(degree, max_moved):
    examples = permutation_words(15, length=40, degree=degree, seed=2, max_moved=max_moved)
    assert_all_counts(examples, (15, 40))
    elements = list(itertools.permutations(range(degree)))
    number = {p: i for i, p in enumerate(elements)}
    for word, states in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
        state = tuple(range(degree))
        for letter, wanted in zip(word, states, strict=True):
            state = tuple(elements[letter][point] for point in state)
            assert wanted == number[state]


@pytest.mark.parametrize(
    ("degree", "max_moved", "count"), [(3, None, 6), (3, 2, 4), (3, 3, 6), (5, None, 120), (5, 2, 11), (5, 3, 31)]
)
def test_letters_move_as_few_points_as_wanted(degree, max_moved, count):
    """1 identity, (5 choose 2) = 10 swaps and 20 cycles of three."""
    examples = permutation_words(600, length=50, degree=degree, seed=3, max_moved=max_moved)
    letters, counts = np.unique(examples.inputs, return_counts=True)
    assert len(letters) == count
    moved = np.sum(permutations(degree)[letters] != np.arange(degree), axis=1)
    assert moved.max() == (degree if max_moved is None else max_moved)
    expected = 30_000 / count
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


def test_one_step_of_s3_is_a_group():
    """The table (state, letter) -> state, read off the data: closed, associative, with inverses, not commutative."""
    examples = permutation_words(400, length=30, degree=3, seed=4)
    table = {}
    before = np.pad(examples.targets[:, :-1], ((0, 0), (1, 0)))
    for s, x, after in zip(before.ravel(), examples.inputs.ravel(), examples.targets.ravel(), strict=True):
        assert table.setdefault((int(s), int(x)), int(after)) == after
    everything = range(6)
    assert set(table) == set(itertools.product(everything, everything))
    for s in everything:
        assert table[s, 0] == table[0, s] == s, "0 is the identity"
        assert sorted(table[s, x] for x in everything) == sorted(table[x, s] for x in everything) == [*everything]
        for x, y in itertools.product(everything, everything):
            assert table[table[s, x], y] == table[s, table[x, y]]
    assert any(table[s, x] != table[x, s] for s, x in table)


def test_signs_of_s5_multiply():
    """The sign is a homomorphism onto parity, so that parity hides in every permutation word."""
    sign = np.round(np.linalg.det(np.eye(5)[permutations(5)]))
    examples = permutation_words(50, length=60, degree=5, seed=5)
    np.testing.assert_array_equal(np.cumprod(sign[examples.inputs], axis=1), sign[examples.targets])


TASKS = [
    lambda seed: parity(4, length=50, seed=seed),
    lambda seed: modular_addition(4, length=50, modulus=7, seed=seed),
    lambda seed: permutation_words(4, length=50, degree=5, seed=seed),
]


@pytest.mark.parametrize("make", TASKS)
def test_the_seed_decides(make):
    for a, b in zip(make(9), make(9), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(make(9).inputs, make(10).inputs)
    assert not np.array_equal(make(9).inputs, make((9, 0)).inputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parity(0, length=3, seed=0), "num_examples: got 0, want an integer of at least 1"),
        (lambda: parity(1, length=0, seed=0), "length: got 0, want an integer of at least 1"),
        (lambda: parity(1, length=3, seed=-5), "seed: got -5"),
        (lambda: modular_addition(1, length=3, modulus=1, seed=0), "modulus: got 1, want 2 to"),
        (lambda: modular_addition(1, length=3, modulus=2**31 + 1, seed=0), "modulus: got 2147483649, want 2 to"),
        (lambda: permutation_words(1, length=3, degree=1, seed=0), "degree: got 1, want 2 to 7"),
        (lambda: permutation_words(1, length=3, degree=8, seed=0), "degree: got 8, want 2 to 7"),
        (lambda: permutation_words(1, length=3, degree=5, seed=0, max_moved=1), "max_moved: got 1, want 2 to degree"),
        (lambda: permutation_words(1, length=3, degree=5, seed=0, max_moved=6), "max_moved: got 6, want 2 to degree"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
