"""The three batched matrix products that the chunked solver is written in; leading axes are batches."""

from typing import Any

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


def mapped_together(tree: Any) -> Any:
    """The same arrays, each with every axis that `vmap` gave to any of them, off the CPU; there, the same arrays.

    A product with a mapped axis on one side alone (a stack of gates with one set of keys, say) makes XLA's GPU
    compiler abort the process: its algebraic simplifier fails a check on the transposed result (seen with jaxlib
    0.11.2; with the axis on both sides it compiles). Nothing is ever selected here, and the barrier keeps XLA from
    undoing the broadcast; without `vmap` neither costs anything.
    """
    if jax.default_backend() == "cpu":
        return tree
    leaves, structure = jax.tree.flatten(tree)
    probe = jnp.zeros((), jnp.float32)
    for x in leaves:
        probe = lax.select_n(False, probe, x[(0,) * x.ndim].astype(jnp.float32))
    together = [lax.select_n(False, x, jnp.broadcast_to(probe.astype(x.dtype), x.shape)) for x in leaves]
    return jax.tree.unflatten(structure, lax.optimization_barrier(together))
