"""State tracking: the label at each position is the state that the inputs so far have led to."""

import itertools

import numpy as np
from jaxtyping import Int

from qdelta_jax.checks import check_count
from qdelta_jax.tasks.draws import Seed, generator
from qdelta_jax.tasks.examples import Examples

__all__ = ["modular_addition", "parity", "permutation_words", "permutations"]

LARGEST_DEGREE = 7


def modular_addition(num_examples: int, *, length: int, modulus: int, seed: Seed) -> Examples:
    """targets[t] = (inputs[0] + .. + inputs[t]) mod m, inputs uniform on 0 .. m - 1; every position counts.

    A recurrence whose transitions have eigenvalues in [0, 1] alone cannot count modulo 2 at every length, and one
    that is triangular with real eigenvalues cannot count modulo 3. Source: arXiv 2411.12537.

    Args:
        num_examples: B.
        length: T.
        modulus: m, at least 2, the size of the vocabulary.
        seed: of the inputs.
    Returns:
        `Examples` [B, T].
    Raises:
        ValueError: a number out of its range.

    >>> examples = modular_addition(1, length=6, modulus=3, seed=0)
    >>> examples.inputs.tolist(), examples.targets.tolist()
    ([[1, 1, 2, 2, 0, 0]], [[1, 2, 1, 0, 0, 0]])
    """
    shape = check_count("num_examples", num_examples), check_count("length", length)
    if not 2 <= check_count("modulus", modulus) <= 2**31:
        raise ValueError(f"modulus: got {modulus}, want 2 to 2^31: tokens are int32")
    inputs = generator(seed).integers(0, modulus, shape, dtype=np.int32)
    targets = np.cumsum(inputs, axis=1, dtype=np.int64) % modulus
    return Examples(inputs, targets.astype(np.int32), np.ones(shape, np.bool_))


def parity(num_examples: int, *, length: int, seed: Seed) -> Examples:
    """targets[t] = inputs[0] xor .. xor inputs[t], bits: `modular_addition` with m = 2. arXiv 2411.12537.

    >>> examples = parity(1, length=6, seed=0)
    >>> examples.inputs.tolist(), examples.targets.tolist()
    ([[0, 1, 1, 1, 0, 0]], [[0, 1, 0, 1, 1, 1]])
    """
    return modular_addition(num_examples, length=length, modulus=2, seed=seed)


def permutations(degree: int) -> Int[np.ndarray, "n degree"]:
    """The n! permutations of 0 .. n - 1, [n!, n], in lexicographic order: row i is token i, and row 0 the identity.

    Raises:
        ValueError: degree is not in 2 .. 7.

    >>> permutations(3).tolist()
    [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
    """
    if not 2 <= check_count("degree", degree) <= LARGEST_DEGREE:
        raise ValueError(f"degree: got {degree}, want 2 to {LARGEST_DEGREE}")
    return np.array(list(itertools.permutations(range(degree))))


def permutation_words(
    num_examples: int, *, length: int, degree: int, seed: Seed, max_moved: int | None = None
) -> Examples:
    """targets[t] = x_t after x_(t-1) .. after x_0, with x_t = inputs[t]: x_0 acts first.

    The state s_t takes the point p to s_t(p) = x_t(s_(t-1)(p)) and is the identity before the first input. Inputs and
    targets are elements of the symmetric group S_n, numbered as the rows of `permutations(n)`; every position counts.
    S_3 is the smallest group that does not commute; words of S_5 are complete for NC^1. A swap is one Householder
    reflection, I - 2 k k^T, and a permutation that moves m points is a product of at most m - 1 swaps.
    Source: arXiv 2411.12537.

    Args:
        num_examples: B.
        length: T.
        degree: n, 2 to 7; the vocabulary has n! tokens.
        seed: of the inputs.
        max_moved: the inputs are uniform on the permutations that move at most so many points: 2 for swaps (and the
            identity), 3 for these and 3-cycles, None for all. Numbers of tokens do not depend on it.
    Returns:
        `Examples` [B, T].
    Raises:
        ValueError: a number out of its range.

    >>> examples = permutation_words(1, length=4, degree=3, seed=0)
    >>> examples.inputs.tolist(), examples.targets.tolist()
    ([[2, 3, 4, 5]], [[2, 5, 2, 3]])
    """
    shape = check_count("num_examples", num_examples), check_count("length", length)
    elements = permutations(degree)
    if max_moved is not None and not 2 <= check_count("max_moved", max_moved) <= degree:
        raise ValueError(f"max_moved: got {max_moved}, want 2 to degree = {degree}, or None")
    moved = np.sum(elements != np.arange(degree), axis=1)
    letters = np.flatnonzero(moved <= (degree if max_moved is None else max_moved))
    inputs = letters[generator(seed).integers(0, len(letters), shape)]
    digits = degree ** np.arange(degree)
    number = np.zeros(degree**degree, np.int32)
    number[elements @ digits] = np.arange(len(elements))
    targets = np.empty(shape, np.int32)
    state = np.tile(np.arange(degree), (shape[0], 1))
    for t in range(shape[1]):
        state = np.take_along_axis(elements[inputs[:, t]], state, axis=1)
        targets[:, t] = number[state @ digits]
    return Examples(inputs.astype(np.int32), targets, np.ones(shape, np.bool_))
