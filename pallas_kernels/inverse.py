"""The inverse of I + L for strictly lower triangular L, alone: the step of the kernels that others may want too."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inputs import DTYPES
from pallas_kernels.mesh import without_axes
from pallas_kernels.supports import machine
from pallas_kernels.tiles import TILE, C, Numbers, iotas, operand, product, put, smem, split
from pallas_kernels.triangular import invert

SIZES = (16, 32, 64, 128)


def unit_lower_inverse(lower: Array, *, accurate: bool = True, interpret: Any = None) -> Array:
    """A = (I + L)^-1 for strictly lower triangular L, on a Hopper GPU.

    By doubling, as stable as forward substitution; entries of L and A beyond 65504 overflow.

    Args:
        lower: [..., C, C], float32, bfloat16 or float16, C one of 16, 32, 64, 128. What stands on and above the
            diagonal is not looked at.
        accurate: products of numbers of two float16 parts (22 bits); else of one (11 bits).
        interpret: a `plgpu.InterpretGPUParams` to run on a CPU.
    Returns:
        A [..., C, C] float32, exactly 1 on the diagonal and 0 above it.
    Raises:
        ValueError: another shape or dtype.
        NotImplementedError: the device is no Hopper GPU.

    It can be differentiated (dA = -A dL A, in plain JAX) and mapped.

    Source: the triangular inverse of the chunked WY form, arXiv 2406.06484.
    """
    if lower.ndim < 2 or lower.shape[-1] not in SIZES or lower.shape[-2] != lower.shape[-1]:
        raise ValueError(f"lower: got shape {lower.shape}, want [..., C, C] with C one of {SIZES}")
    if lower.dtype not in DTYPES:
        raise ValueError(f"lower: got dtype {lower.dtype}, want float32, bfloat16 or float16")
    reason = machine(lower) if interpret is None else None
    if reason is not None:
        raise NotImplementedError(f"unit_lower_inverse: {reason}")
    flat = lower.reshape(-1, *lower.shape[-2:])
    if flat.shape[0] == 0:
        return jnp.zeros(lower.shape, jnp.float32)
    return _inverse(flat, accurate, interpret).reshape(lower.shape)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _inverse(lower: Array, accurate: bool, interpret: Any) -> Array:
    """lower: [n, C, C]."""

    @custom_vmap
    def run(lower: Array) -> Array:
        kernel = partial(_large if lower.shape[-1] > C else _small, accurate=accurate, interpret=interpret)
        with jax.enable_x64(False):  # the kernel counts in 32 bits
            return without_axes(kernel, lower)

    @run.def_vmap
    def fold(size, mapped, lower):
        return run(lower.reshape(-1, *lower.shape[-2:])).reshape(lower.shape), True

    return run(lower)


@_inverse.defjvp
def _inverse_jvp(accurate: bool, interpret: Any, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    x = _inverse(primals[0], accurate, interpret)
    multiply = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return x, -multiply(multiply(x, jnp.tril(tangents[0].astype(jnp.float32), -1)), x)


def _numbers(accurate: bool, interpret: Any) -> Numbers:
    return Numbers(jnp.float16, 2 if accurate else 1, interpret is not None)


def _call(body: Any, lower: Array, shape: tuple[int, ...], blocks: int, scratch: list[Any], interpret: Any) -> Array:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[smem((C, min(C, shape[-1])), lower.dtype), smem((C, min(C, shape[-1])), jnp.float32), *scratch],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(lower)


def _small(lower: Array, *, accurate: bool, interpret: Any) -> Array:
    """C <= 64: as many matrices as fill one tile of 64, block-diagonal in it.

    One block of a grid takes 64 rows of all matrices, [64, C]. A product with a row of identities, [C, 64], repeats
    each row along the tile, of which the blocks on the diagonal are kept; the transposed product brings it back.
    """
    size = lower.shape[-1]
    numbers = _numbers(accurate, interpret)
    one = Numbers(jnp.float16, 1, numbers.interpret)

    def body(lower, out, landing, result, x_s, l_s, lx_s, narrow, identities, barrier):
        rows = pl.ds(lax.axis_index("block") * C, C)
        plgpu.copy_gmem_to_smem(lower.at[rows], landing, barrier)
        plgpu.barrier_wait(barrier)
        r, c = iotas((C, size))
        own = jnp.bitwise_and(r, size - 1)
        x = plgpu.load(landing, layout=TILE, optimized=False).astype(jnp.float32)
        x = jnp.where(own > c, x, 0.0)
        if size < C:
            put(narrow, x, numbers)
            put(identities, jnp.where(own == c, 1.0, 0.0), one)
            plgpu.commit_smem()
            x = product(one, *(((part,), (identities[0].T,)) for part in narrow))
            r, c = iotas((C, C))
            x = jnp.where(jnp.bitwise_xor(r, c) < size, x, 0.0)
        x = invert(x, x_s, l_s, lx_s, numbers)
        if size < C:
            x = product(one, *(((part,), identities) for part in split(x, numbers)))
        result[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, out.at[rows])
        plgpu.wait_smem_to_gmem(0)

    square, narrow = operand((C, C), numbers), operand((C, size), numbers)
    scratch = [square, square, square, narrow, operand((C, size), one), plgpu.Barrier()]
    flat = lower.reshape(-1, size)
    made = _call(body, flat, flat.shape, -(-flat.shape[0] // C), scratch, interpret)
    return made.reshape(lower.shape)


def _large(lower: Array, *, accurate: bool, interpret: Any) -> Array:
    """C = 128: [[X1, 0], [-X2 L21 X1, X2]] of two halves."""
    numbers = _numbers(accurate, interpret)

    def body(lower, out, landing, result, x_s, l_s, lx_s, left, barrier):
        matrix = lax.axis_index("block")
        r, c = iotas((C, C))

        def place(row: int, column: int) -> Any:
            return (matrix, pl.ds(row * C, C), pl.ds(column * C, C))

        def fetch(row: int, column: int) -> Array:
            plgpu.commit_smem()
            plgpu.copy_gmem_to_smem(lower.at[place(row, column)], landing, barrier)
            plgpu.barrier_wait(barrier)
            x = plgpu.load(landing, layout=TILE, optimized=False).astype(jnp.float32)
            return jnp.where(r > c, x, 0.0) if row == column else x

        def store(x: Array, row: int, column: int) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
            result[...] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, out.at[place(row, column)])

        first = invert(fetch(0, 0), x_s, l_s, lx_s, numbers)
        store(first, 0, 0)
        put(x_s, first, numbers)
        put(l_s, fetch(1, 0), numbers)
        plgpu.commit_smem()
        put(left, product(numbers, (l_s, x_s)), numbers)
        store(jnp.where(r < 0, first, 0.0), 0, 1)
        second = invert(fetch(1, 1), x_s, l_s, lx_s, numbers)
        store(second, 1, 1)
        plgpu.commit_smem()
        store(-product(numbers, (split(second, numbers), left)), 1, 0)
        plgpu.wait_smem_to_gmem(0)

    square = operand((C, C), numbers)
    scratch = [square, square, square, square, plgpu.Barrier()]
    return _call(body, lower, lower.shape, lower.shape[0], scratch, interpret)
