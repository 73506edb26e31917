"""The inverse of I + L for strictly lower triangular L, inside a chunk."""

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import Numbers, Operand, iotas, product, put, split


def invert(lower: Array, x_s: Operand, l_s: Operand, numbers: Numbers) -> Array:
    """A = (I + L)^-1 of a float32 tile L [C, C] in registers, strictly lower triangular.

    By doubling: where X inverts the diagonal blocks of width w, X - mask(X L X) inverts those of width 2w, the mask
    being the lower left quarter of each. x_s, l_s: shared memory of two operands [C, C], overwritten.
    """
    size = lower.shape[0]
    r, c = iotas(lower.shape)

    def below(width: int) -> Array:
        same = jnp.bitwise_xor(r, c) < 2 * width
        return same & (jnp.bitwise_and(r, width) > jnp.bitwise_and(c, width))

    x = jnp.where(r == c, 1.0, 0.0) - jnp.where(below(1), lower, 0.0)
    put(l_s, lower, numbers)
    width = 2
    while width < size:
        put(x_s, x, numbers)
        plgpu.commit_smem()
        lx = product(numbers, (l_s, x_s))
        x_parts = split(x, numbers)
        put(x_s, lx, numbers)
        plgpu.commit_smem()
        x = x - jnp.where(below(width), product(numbers, (x_parts, x_s)), 0.0)
        width *= 2
    return x
