"""Random numbers of the tasks: one generator per seed, and draws without replacement for many rows at once."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

__all__ = ["Seed", "distinct", "distinct_by_weight", "generator"]

Seed = int | tuple[int, ...]
"""An integer from 0, or several, as in (seed, step): each tuple has a stream of its own."""

CELLS = 2**20
"""Cells of a table that are filled at once: a block of rows stays in the cache."""


def generator(seed: Any, *key: int) -> np.random.Generator:
    """The generator of `seed` (an integer from 0, or a tuple of them) and of a stream `key` within it.

    Raises:
        ValueError: seed is neither.
    """
    parts = seed if isinstance(seed, tuple) else (seed,)
    fine = [isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= 0 for x in parts]
    if not parts or not all(fine):
        raise ValueError(f"seed: got {seed!r}, want an integer of at least 0, or a tuple of them")
    # NumPy pads with zeros, which would give 1 and (1, 0) one stream: the length keeps them apart.
    return np.random.default_rng(np.random.SeedSequence([len(parts), *map(int, parts)], spawn_key=key))


def distinct(rng: np.random.Generator, rows: int, population: int, count: int) -> Int[np.ndarray, "rows count"]:
    """In each row, `count` integers of [0, population) without replacement, every order equally likely.

    The first `count` cards of a shuffled deck (Fisher and Yates), for a block of rows at a time.
    """
    out = np.empty((rows, count), np.int64)
    size = max(1, CELLS // population)
    for start in range(0, rows, size):
        block = out[start : start + size]
        row = np.arange(len(block))
        deck = np.tile(np.arange(population, dtype=np.int32), (len(block), 1))
        for i in range(count):
            j = rng.integers(i, population, len(block))
            block[:, i] = deck[row, j]
            deck[row, j] = deck[:, i]
    return out


def distinct_by_weight(
    rng: np.random.Generator, rows: int, log_weights: Float[np.ndarray, " population"], count: int
) -> Int[np.ndarray, "rows count"]:
    """In each row, `count` indices one after the other, each with probability w_i / (sum of the weights left).

    Clocks that ring after Exponential(1) / w_i ring in that order. Times are compared as logarithms, so that no
    weight is too large or too small.
    """
    out = np.empty((rows, count), np.int64)
    size = max(1, CELLS // len(log_weights))
    for start in range(0, rows, size):
        block = out[start : start + size]
        times = np.log(rng.exponential(size=(len(block), len(log_weights)))) - log_weights
        first = np.argpartition(times, count - 1, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
        block[:] = np.take_along_axis(first, order, axis=1)
    return out
