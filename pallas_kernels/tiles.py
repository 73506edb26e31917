"""The few words the kernels are written in: shared-memory tiles, matrix products, broadcasts and masks.

A kernel works on chunks of C = 64 tokens with one warpgroup per task. A matrix product takes its operands from shared
memory as an `Operand`: one 16-bit array, or for float32 accuracy two of them, x = high + low, whose product is
high high + high low + low high.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

C = 64
"""Tokens of a chunk: the rows of one matrix instruction of a warpgroup."""

SMEM_LIMIT = 232_448
"""Bytes of shared memory that one block may use on Hopper."""

PROCESSORS = 132
"""Multiprocessors of a full Hopper chip."""

TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)  # a vector with one number per row of a tile
COL = TILE.reduce(0)  # a vector with one number per column of a tile

Operand = tuple[Any, ...]
"""One reference per part, or one register array per part (only as the left side of a product)."""


@dataclass(frozen=True)
class Numbers:
    """How matrix products are computed: the 16-bit type of the operands, and how many of them make one number."""

    dtype: Any
    parts: int = 1
    interpret: bool = False


def smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """A shared-memory tile that matrix instructions and the copy engine can read, with the widest swizzle that fits."""
    row = shape[-1] * jnp.dtype(dtype).itemsize
    width = next(w for w in (128, 64, 32) if row % w == 0)
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    transforms = (tiling((8, width // jnp.dtype(dtype).itemsize)), swizzling(width))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand(shape: tuple[int, ...], numbers: Numbers) -> tuple[Any, ...]:
    """Shared memory of one operand."""
    return tuple(smem(shape, numbers.dtype) for _ in range(numbers.parts))


def transposed(x: Operand) -> Operand:
    return tuple(ref.T for ref in x)


def split(x: Array, numbers: Numbers) -> tuple[Array, ...]:
    """A float32 tile as 16-bit parts."""
    if numbers.parts == 1:
        return (x.astype(numbers.dtype),)
    if jnp.dtype(numbers.dtype) == jnp.bfloat16:
        # Rounded by its bits: a conversion is slow for one number at a time.
        bits = lax.bitcast_convert_type(x, jnp.int32) + jnp.int32(1 << 15)
        high = lax.bitcast_convert_type(jnp.bitwise_and(bits, jnp.int32(-(1 << 16))), jnp.float32)
        return high.astype(numbers.dtype), (x - high).astype(numbers.dtype)
    high = x.astype(numbers.dtype)
    return high, (x - high.astype(jnp.float32)).astype(numbers.dtype)


def sync() -> None:
    """Every warp of the warpgroup has come here, and what it has stored is visible to products and copies.

    The kernels run without the barriers that the compiler would put around each store, so each place where one warp
    overwrites what another may still read has its own. Loads and stores of a 16-bit tile need none: a warp has its own
    16 rows. Right sides of products are read by all warps; a product is complete for the warp that waited for it only.
    """
    plgpu.commit_smem()


def put(x: Operand, value: Array, numbers: Numbers) -> None:
    """Stores a float32 tile; `sync` must follow before a product or a copy reads it."""
    for ref, part in zip(x, split(value, numbers), strict=True):
        ref[...] = part


def take(x: Operand) -> Array:
    """Loads a tile as float32."""
    parts = [widened(plgpu.load(ref, layout=TILE, optimized=False)) for ref in x]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def widened(x: Array) -> Array:
    """As float32; bfloat16 by its bits, which takes one instruction for each number where a conversion takes two."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
    return lax.bitcast_convert_type(lax.shift_left(bits, jnp.int32(16)), jnp.float32)


def vector(ref: Any, layout: Any = ROW) -> Array:
    """Loads C numbers from device memory, ready to be broadcast along a tile."""
    return plgpu.load(ref, layout=layout, optimized=False)


def rows(x: Array, columns: int) -> Array:
    """x_i -> [i, any column]."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def cols(x: Array, height: int) -> Array:
    """x_j -> [any row, j]."""
    return lax.broadcast_in_dim(x, (height, x.shape[0]), (1,))


def zeros(shape: tuple[int, ...]) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def iotas(shape: tuple[int, int] = (C, C)) -> tuple[Array, Array]:
    """Row and column numbers of a tile."""
    r, c = (plgpu.broadcasted_iota(jnp.int32, shape, d, layout=TILE) for d in (0, 1))
    return r, c


def _pairs(a: Operand, b: Operand) -> list[tuple[Any, Any]]:
    if len(a) == 1:
        return [(a[0], b[0])]
    return [(a[0], b[0]), (a[0], b[1]), (a[1], b[0])]


def product(numbers: Numbers, *terms: tuple[Operand, Operand]) -> Array:
    """The sum of a b over the terms (a, b): float32 in registers, [M, N].

    a: [M, D] in shared memory or registers, b: [D, N] in shared memory.
    """
    return products(numbers, terms)[0]


def accumulate(
    numbers: Numbers,
    sums: Sequence[tuple[Sequence[tuple[Operand, Operand]], Array]],
    meanwhile: Callable[[], None] | None = None,
) -> list[Array]:
    """Several sums of products, each added to a tile, in flight at the same time. meanwhile: is done until they are."""
    groups = [[pair for a, b in terms for pair in _pairs(a, b)] for terms, _ in sums]
    if numbers.interpret:
        made = [x + _interpreted(pairs) for pairs, (_, x) in zip(groups, sums, strict=True)]
        if meanwhile is not None:
            meanwhile()
        return made

    def run(accumulators):
        for acc, pairs in zip(accumulators, groups, strict=True):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)
        if meanwhile is not None:
            meanwhile()
        plgpu.wgmma_wait(0)

    return list(pl.run_state(run)(tuple(plgpu.ACC.init(x) for _, x in sums)))


def products(numbers: Numbers, *sums: Sequence[tuple[Operand, Operand]]) -> list[Array]:
    """Several sums of products, in flight at the same time."""
    groups = [[pair for a, b in terms for pair in _pairs(a, b)] for terms in sums]
    if numbers.interpret:
        return [_interpreted(pairs) for pairs in groups]

    def run(*accumulators):
        for acc, pairs in zip(accumulators, groups, strict=True):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)
        return [acc[...] for acc in accumulators]

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in groups]
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def _interpreted(pairs: Sequence[tuple[Any, Any]]) -> Array:
    """A sum of products in the CPU interpreter, which has no operands in registers."""
    in_memory = [(a, b) for a, b in pairs if not isinstance(a, jax.Array)]
    sums = [jnp.dot(a, b[...], preferred_element_type=jnp.float32) for a, b in pairs if isinstance(a, jax.Array)]

    def run(acc):
        for a, b in in_memory:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    if in_memory:
        shape = (in_memory[0][0].shape[0], in_memory[0][1].shape[1])
        sums.append(pl.run_scoped(run, plgpu.ACC(shape, jnp.float32)))
    total = sums[0]
    for x in sums[1:]:
        total = total + x
    return total
