"""Scores between the tokens of a chunk, L_ij = sum_d e_id k_jd exp(G_id - G_jd) and P likewise with q.

One decay per key channel does not factor out of the sum. Level s (32, 16, ..) covers the pairs with j in the first and
i in the second half of one block of 2 s tokens: both are referenced to the last token of the first half, so that one
tile of exponents D, sums of log_decay between a token and that reference, serves both sides and is never positive:
L_s = (e exp D)(k exp D)^T. D is itself a product of a matrix of zeros and ones with log_decay: nothing is subtracted.

With operands of two parts the levels go down to s = 1, for any log_decay. With one part they stop at 8, and the pairs
inside a block of 8 tokens are referenced to its middle, by exp D and exp -D in bfloat16: finite because a step decays
by 2^-31 at most (`FLOOR`), which stands for every stronger decay.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import TILE, C, Numbers, Operand, iotas, product, put, split, take, transposed

LOG2_E = 1.4426950408889634
SCALE = 512.0
"""log_decay is kept as SCALE log2(exp(log_decay)) in two float16 parts: 22 bits, 1e-10 next to 0."""

PAIR = Numbers(jnp.float16, parts=2)
"""The format of log_decay."""

DIAGONAL = 8
"""Width of the blocks referenced to their middle."""


def floor(parts: int) -> float:
    """log2 of the strongest decay of one token; it stands for every stronger one."""
    return -31.0 if parts == 1 else -100.0


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


def store_log_decay(log_decay: Array, into: Operand, parts: int) -> None:
    put(into, jnp.maximum(log_decay * LOG2_E, floor(parts)) * SCALE, PAIR)


def summed(select: Any, log_decay: Operand, interpret: bool) -> Array:
    """log2 of the decays that a matrix of `selections` picks, [C, D]."""
    a = (plgpu.load(select, layout=TILE, optimized=False),)
    return product(Numbers(jnp.float16, 1, interpret), *((a, (part,)) for part in log_decay))


def _scaled(x: Operand, factor: Array, numbers: Numbers) -> tuple[Array, ...]:
    """x factor as parts; float16 numbers are multiplied as they are, others in float32."""
    if numbers.parts == 1 and jnp.dtype(numbers.dtype) == jnp.float16:
        return (plgpu.load(x[0], layout=TILE, optimized=False) * factor.astype(numbers.dtype),)
    return split(take(x) * factor, numbers)


def _store(x: Operand, parts: tuple[Array, ...]) -> None:
    for ref, part in zip(x, parts, strict=True):
        ref[...] = part


def channel_scores(
    numbers: Numbers,
    q: Operand,
    k: Operand,
    e: Operand | None,
    log_decay: Operand,
    select: Any,
    kx: Operand,
    kx_wide: Operand,
    sums: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Adds the scores of 64 key channels to `sums`: P, or P and L where something is erased (float32, [C, C]).

    q, k, e: [C, 64] operands; log_decay: its two parts; select: `selections`; kx: shared memory of one operand,
    overwritten, and kx_wide the same memory as bfloat16.
    """
    left = (q,) if e is None else (q, e)
    r, c = iotas()
    steps = levels(numbers.parts)

    def level(index: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        half = jnp.right_shift(jnp.int32(C // 2), index)
        factor = jnp.exp2(summed(select.at[index], log_decay, numbers.interpret))
        _store(kx, _scaled(k, factor, numbers))
        scaled = [_scaled(x, factor, numbers) for x in left]
        plgpu.commit_smem()
        start = jnp.where(jnp.bitwise_and(r, half) != 0, jnp.bitwise_and(r, -2 * half), 2 * C)
        inside = (c >= start) & (c < start + half)
        return tuple(
            jnp.where(inside, total + product(numbers, (x, transposed(kx))), total)
            for total, x in zip(sums, scaled, strict=True)
        )

    sums = lax.fori_loop(0, len(steps), level, tuple(sums))
    if numbers.parts == 2:
        own = product(numbers, (q, transposed(k)))
        return (jnp.where(r == c, sums[0] + own, sums[0]), *sums[1:])
    wide = Numbers(jnp.bfloat16, 1, numbers.interpret)
    exponent = summed(select.at[len(steps)], log_decay, numbers.interpret)
    _store(kx_wide, split(take(k) * jnp.exp2(-exponent), wide))
    factor = jnp.exp2(exponent)
    scaled = [split(take(x) * factor, wide) for x in left]
    plgpu.commit_smem()
    start = jnp.bitwise_and(r, -DIAGONAL)
    inside = ((c >= start) & (c <= r), (c >= start) & (c < r))
    return tuple(
        jnp.where(mask, total + product(wide, (x, transposed(kx_wide))), total)
        for mask, total, x in zip(inside, sums, scaled, strict=False)
    )
