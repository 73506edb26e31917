"""Which tokens of a chunk each row of a matrix of zeros and ones picks: intervals, from a first to a last column.

They are those of scores.py, for kernels that make the matrices in registers. r: the numbers of rows.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.scores import DIAGONAL
from pallas_kernels.tiles import C

Columns = tuple[Any, Any]
"""First and last, a vector or a number each."""


def _either(which: Any, one: Columns, other: Columns) -> Columns:
    first, last = (jnp.where(which, x, y) for x, y in zip(one, other, strict=True))
    return first, last


def level_columns(r: Any, half: Any) -> tuple[Columns, Columns]:
    """Of a level of pairs from the first to the second half of blocks of 2 half tokens: what lies between a token and
    the end of the first half, and the tokens that it is paired with."""
    start = jnp.bitwise_and(r, -2 * half)
    middle, end = start + half - 1, start + 2 * half - 1
    second = jnp.bitwise_and(r, half) != 0
    between = _either(second, (middle + 1, r), (r + 1, middle))
    return between, _either(second, (start, middle), (middle + 1, end))


def diagonal_columns(r: Any) -> tuple[Columns, Columns, Columns, Any]:
    """Of the pairs within blocks of `DIAGONAL` tokens: what lies between a token and the middle of its block; the
    tokens up to it, and those from it on; and 1 for a token behind the middle, otherwise -1."""
    start = jnp.bitwise_and(r, -DIAGONAL)
    middle, end = start + DIAGONAL // 2 - 1, start + DIAGONAL - 1
    late = r > middle
    return _either(late, (middle + 1, r), (r + 1, middle)), (start, r), (r, end), jnp.where(late, 1.0, -1.0)


def end_columns(r: Any) -> tuple[Columns, Columns, Columns]:
    """From the start of the chunk to a token, from there to its end, and across it."""
    return (0, r), (r + 1, C - 1), (0, C - 1)
