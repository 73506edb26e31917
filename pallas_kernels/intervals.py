"""Which tokens of a chunk each row of a matrix of zeros and ones picks: all are intervals.

They are those of scores.py, with what else gradients need. A kernel makes the matrices from them in registers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.scores import DIAGONAL
from pallas_kernels.tiles import C


class Rows(NamedTuple):
    """The columns first, last of each row of a matrix of zeros and ones, with its sign where there is one.

    sums: whose log_decay a token's exponent is the sum of. spread: whose exponents a token's log_decay is in.
    pairs: with whom it is paired, and with `lower` and `upper` only earlier or only later tokens, itself among them.
    """

    sums: tuple[Any, ...]
    spread: tuple[Any, ...]
    pairs: tuple[Any, ...] = ()
    lower: tuple[Any, ...] = ()
    upper: tuple[Any, ...] = ()
    sign: Any = None


def level_rows(r: Any, half: Any) -> Rows:
    """Pairs of the first and the second half of a block of 2 half tokens, with what is between them."""
    start = jnp.bitwise_and(r, -2 * half)
    middle, end = start + half - 1, start + 2 * half - 1
    second = jnp.bitwise_and(r, half) != 0

    def either(late: tuple[Any, ...], early: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(jnp.where(second, x, y) for x, y in zip(late, early, strict=True))

    return Rows(
        sums=either((middle + 1, r), (r + 1, middle)),
        spread=either((r, end), (start, r - 1)),
        pairs=either((start, middle), (middle + 1, end)),
    )


def diagonal_rows(r: Any) -> Rows:
    """Pairs of a block of DIAGONAL tokens, all referenced to its middle."""
    start = jnp.bitwise_and(r, -DIAGONAL)
    middle, end = start + DIAGONAL // 2 - 1, start + DIAGONAL - 1
    late = r > middle

    def either(after: tuple[Any, ...], before: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(jnp.where(late, x, y) for x, y in zip(after, before, strict=True))

    return Rows(
        sums=either((middle + 1, r), (r + 1, middle)),
        spread=either((r, end), (start, r - 1)),
        lower=(start, r),
        upper=(r, end),
        sign=jnp.where(late, 1.0, -1.0),
    )


def end_rows(r: Any) -> tuple[Rows, Rows, Rows]:
    """From the start of the chunk to a token, from there to the end, and across the chunk."""
    return Rows((0, r), (r, C - 1)), Rows((r + 1, C - 1), (0, r - 1)), Rows((0, C - 1), (0, C - 1))
