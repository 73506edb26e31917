"""The three batched matrix products that the chunked solver is written in; leading axes are batches."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def rows(a: Array, b: Array, precision: lax.PrecisionLike) -> Array:
    """a b: [..., I, J], [..., J, K] -> [..., I, K]."""
    return jnp.matmul(a, b, precision=precision)


def scores(a: Array, b: Array, precision: lax.PrecisionLike) -> Array:
    """a b^T: [..., I, D], [..., J, D] -> [..., I, J]."""
    return jnp.einsum("...id,...jd->...ij", a, b, precision=precision)


def columns(a: Array, b: Array, precision: lax.PrecisionLike) -> Array:
    """a^T b: [..., J, I], [..., J, K] -> [..., I, K].

    XLA's CPU product is more than twice as slow with a transposed left side as with a transposed copy, so there the
    copy is forced (the barrier keeps XLA from folding it back into the product).
    """
    transposed = jnp.swapaxes(a, -1, -2)
    if jax.default_backend() == "cpu":
        transposed = lax.optimization_barrier(transposed)
    return jnp.matmul(transposed, b, precision=precision)
