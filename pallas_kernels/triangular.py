"""The inverse of I + L for strictly lower triangular L, inside a chunk."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.tiles import Numbers, Operand, iotas, product, put, split, sync


def invert(
    lower: Array,
    x_s: Operand,
    l_s: Operand,
    lx_s: Operand,
    numbers: Numbers,
    meanwhile: Callable[[], None] | None = None,
    numbered: Any = None,
) -> Array:
    """A = (I + L)^-1 of a tile L [C, C] in registers, strictly lower triangular; float32.

    By doubling: where X inverts the diagonal blocks of width w, -X L X is the lower left quarter of the inverse of
    each diagonal block of width 2w. x_s, l_s, lx_s: shared memory of three operands [C, C], overwritten; another
    warp may read lx_s when this one is done. meanwhile: called once on the way, to start copies. numbered: row and
    column numbers.
    """
    size = lower.shape[0]
    r, c = iotas() if numbered is None else numbered
    pair = jnp.bitwise_and(c, -2)  # one mask for two neighbours, which a thread has both of

    def double(x: Array, width: Any) -> Array:
        # Every warp is done with X when it has come to the second barrier, and with L X at the next one's first.
        put(x_s, x, numbers)
        sync()
        lx = product(numbers, (l_s, x_s))
        put(lx_s, lx, numbers)
        sync()
        made = product(numbers, (split(x, numbers), lx_s))
        # Both factors are lower triangular: a pair whose numbers differ first in this bit has the larger row.
        below = jnp.bitwise_and(r, -width) == jnp.bitwise_xor(jnp.bitwise_and(pair, -width), width)
        return jnp.where(below, -made, x)

    lower = lower.astype(jnp.float32)
    x = jnp.where(r == c, 1.0, 0.0) - jnp.where((r == c + 1) & (jnp.bitwise_and(r, 1) == 1), lower, 0.0)
    sync()
    put(l_s, lower, numbers)
    if meanwhile is not None:
        x = double(x, 2)
        meanwhile()
    first = 1 if meanwhile is None else 2
    return lax.fori_loop(first, size.bit_length() - 1, lambda i, x: double(x, jnp.left_shift(jnp.int32(1), i)), x)
