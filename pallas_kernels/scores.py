"""Scores between the tokens of a chunk, L_ij = sum_d e_id k_jd exp(G_id - G_jd) and P likewise with q.

One decay per key channel does not factor out of the sum. Level s (32, 16, ..) covers the pairs with j in the first and
i in the second half of one block of 2 s tokens: both are referenced to the last token of the first half, so that one
tile of exponents D, sums of log_decay between a token and that reference, serves both sides and is never positive:
L_s = (e exp D)(k exp D)^T. D is itself a product of a matrix of zeros and ones with log_decay: nothing is subtracted.

With operands of two parts the levels go down to s = 1, for any log_decay. With one part they stop at 8, and the pairs
inside a block of 8 tokens are referenced to its middle, by exp D and exp -D in bfloat16: finite because a step decays
by 2^-27 at most (`floor`), which stands for every stronger decay. (Four such steps leave q a factor of 2^-108, and
18 bits above the smallest normal number.)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import TILE, C, Numbers, Operand, products, put, split, sync, take, transposed

LOG2_E = 1.4426950408889634
SCALE = 512.0
"""log_decay is kept as SCALE log2(exp(log_decay)) in float16, one or two parts: a relative error of 2^-12 (an error of
2^-12 x in a decay exp(-x), at most 1e-4) or 2^-22, and 1e-10 next to 0."""

DIAGONAL = 8
"""Width of the blocks referenced to their middle."""


def log_numbers(numbers: Numbers) -> Numbers:
    """The format of log_decay."""
    return Numbers(jnp.float16, numbers.parts, numbers.interpret)


def floor(parts: int) -> float:
    """log2 of the strongest decay of one token; it stands for every stronger one."""
    return -27.0 if parts == 1 else -100.0


def levels(parts: int) -> list[int]:
    return [s for s in (32, 16, 8, 4, 2, 1) if parts == 2 or s >= DIAGONAL]


def selections(parts: int) -> np.ndarray:
    """[n, C, C]: which tokens' log_decay each row sums, times 1 / SCALE, one matrix for each level, then for the
    diagonal blocks (one part only), then from the start of the chunk to a token, then from there to the end."""
    r, c = np.indices((C, C))

    def between(reference: np.ndarray) -> np.ndarray:
        after, before = (c > reference) & (c <= r), (c > r) & (c <= reference)
        return after.astype(int) - before.astype(int)

    made = [np.abs(between((r & -2 * s) + s - 1)) for s in levels(parts)]
    if parts == 1:
        made.append(between((r & -DIAGONAL) + DIAGONAL // 2 - 1))
    made += [c <= r, c > r]
    return (np.stack(made) / SCALE).astype(np.float16)


def store_log_decay(log_decay: Array, into: Operand, numbers: Numbers) -> None:
    put(into, jnp.maximum(log_decay * (LOG2_E * SCALE), floor(numbers.parts) * SCALE), log_numbers(numbers))


def exponents(numbers: Numbers, sums: Sequence[tuple[Any, Operand]]) -> list[Array]:
    """log2 of the decays that matrices of `selections` pick, [C, D] each, in flight at the same time.

    sums: pairs of a matrix, in shared memory or in registers, and log_decay.
    """
    one = Numbers(jnp.float16, 1, numbers.interpret)
    return products(one, *([((matrix,), (part,)) for part in log_decay] for matrix, log_decay in sums))


def scaled(x: Operand, factor: Array, numbers: Numbers) -> tuple[Array, ...]:
    """x factor as parts; float16 numbers are multiplied as they are, others in float32."""
    if numbers.parts == 1 and jnp.dtype(numbers.dtype) == jnp.float16:
        return (plgpu.load(x[0], layout=TILE, optimized=False) * factor.astype(numbers.dtype),)
    return split(take(x) * factor, numbers)


def store_parts(x: Operand, parts: tuple[Array, ...]) -> None:
    for ref, part in zip(x, parts, strict=True):
        ref[...] = part


class Piece(NamedTuple):
    """64 key channels: q, k, e, log_decay as operands; memory for the scaled keys of a level, and as bfloat16."""

    q: Operand
    k: Operand
    e: Operand | None
    log_decay: Operand
    scaled: Operand
    scaled_wide: Operand


def channel_scores(
    numbers: Numbers, pieces: Sequence[Piece], select: Callable[[Any], Any], numbered: tuple[Array, Array], erases: bool
) -> tuple[Array, ...]:
    """Products with q, and where something is erased with e, or with k where e has no tile, [C, C]; wrong above the
    diagonal, and all but the first on it.

    select: a matrix of `selections` by number; numbered: row and column numbers.
    """
    r, c = numbered
    steps = levels(numbers.parts)

    def pairs(index: Any, wide: bool) -> list[Array]:
        """One level: the products of all pieces. Operands one after the other: registers are what is scarce."""
        kind = Numbers(jnp.bfloat16, 1, numbers.interpret) if wide else numbers
        left: list[list[Any]] = []
        sync()
        for piece, exponent in zip(
            pieces, exponents(numbers, [(select(index), p.log_decay) for p in pieces]), strict=True
        ):
            target = piece.scaled_wide if wide else piece.scaled
            factor = jnp.exp2(exponent)
            store_parts(target, scaled(piece.k, jnp.exp2(-exponent) if wide else factor, kind))
            left.append([scaled(piece.q, factor, kind)])
            if erases:
                same = piece.e is None and not wide
                left[-1].append(target if same else scaled(piece.e or piece.k, factor, kind))
        sync()
        targets = [transposed(p.scaled_wide if wide else p.scaled) for p in pieces]
        return products(kind, *(list(zip(xs, targets, strict=True)) for xs in zip(*left, strict=True)))

    def level(index: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        # A pair below the diagonal whose numbers differ first in this bit; above it all is wrong anyway.
        half = jnp.right_shift(jnp.int32(C // 2), index)
        of_column = jnp.bitwise_and(c, -steps[-1])
        inside = jnp.bitwise_and(r, -half) == jnp.bitwise_xor(jnp.bitwise_and(of_column, -half), half)
        return tuple(jnp.where(inside, x, total) for total, x in zip(sums, pairs(index, wide=False), strict=True))

    if numbers.parts == 2:
        sums = products(numbers, [(piece.q, transposed(piece.k)) for piece in pieces])
        if erases:
            sums.append(sums[0])
    else:
        sums = pairs(len(steps), wide=True)
    return lax.fori_loop(0, len(steps), level, tuple(sums))
