"""Rows of an embedding, and two ways to sum their gradients."""

from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer

from pallas_kernels.mesh import vary, varying
from qdelta_jax.layers.linear import wider

__all__ = ["GRADIENTS", "lookup"]

GRADIENTS = ("scatter", "product")
"""How the gradient of an embedding is summed: each token adds to its row, or a product with one-hot rows."""


def lookup(
    table: Float[Array, "vocab width"], tokens: Integer[Array, "*lead"], dtype: Any, gradient: str = "scatter"
) -> Float[Array, "*lead width"]:
    """y_t = table[tokens_t], in `dtype`; a token outside of the table reads the nearest row.

    Args:
        table: [V, D].
        tokens: integers of any shape.
        dtype: of the result.
        gradient: "scatter" adds the gradient of each token to its row: T D additions, on a GPU in another order in
            every run. "product" multiplies with one-hot rows: 2 T V D operations, the same numbers in every run;
            sums are in the wider of the two dtypes, derivatives in reverse mode only. An infinite gradient of a token
            reaches its channel in all rows.
    Raises:
        ValueError: no table, tokens that are no integers, another gradient.
    """
    if getattr(table, "ndim", None) != 2 or 0 in table.shape:
        raise ValueError(f"table: got {getattr(table, 'shape', type(table).__name__)}, want [V, D], no axis empty")
    if not hasattr(tokens, "dtype") or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: got {getattr(tokens, 'dtype', type(tokens).__name__)}, want an integer array")
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient: got {gradient!r}, want one of {GRADIENTS}")
    if gradient == "scatter":
        return _rows(table, tokens, dtype)
    # Before another dtype: a table may have more rows than 8 bits can number.
    last = min(table.shape[0] - 1, int(jnp.iinfo(tokens.dtype).max))
    tokens = jnp.clip(tokens, 0, last).astype(jnp.int32)
    return _by_product(vary(table, varying(tokens)), tokens, jnp.dtype(dtype))


def _rows(table: Array, tokens: Array, dtype: Any) -> Array:
    return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _by_product(table: Array, tokens: Array, dtype: Any) -> Array:
    return _rows(table, tokens, dtype)


def _forward(table: Array, tokens: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    # An empty array says the table's size and dtype.
    return _rows(table, tokens, dtype), (tokens, table[:, :0])


def _backward(dtype: Any, saved: tuple[Array, Array], d_y: Array) -> tuple[Array, None]:
    tokens, empty = saved
    tokens, d_y = tokens.reshape(-1), d_y.reshape(-1, d_y.shape[-1])
    width, wide = d_y.shape[1], wider(d_y.dtype, empty.dtype)
    if jax.default_backend() == "cpu":
        # 16-bit operands have no float32 sums there in every form of a product.
        d_y = d_y.astype(wide)
    elif d_y.dtype == jnp.float32:
        d_y = _in_16_bits(d_y)
    # One-hot rows are exact in any dtype.
    chosen = jax.nn.one_hot(tokens, empty.shape[0], dtype=d_y.dtype)
    made = lax.dot_general(chosen, d_y, (((0,), (0,)), ((), ())), preferred_element_type=wide)
    # From the smallest on.
    return reduce(add, jnp.split(made, made.shape[1] // width, axis=1)[::-1]).astype(empty.dtype), None


def _in_16_bits(x: Array) -> Array:
    """Three numbers whose sum is x, side by side: products of bfloat16 are ten times as fast as those of float32."""
    parts = []
    for _ in range(3):
        # The compiler takes a conversion back and forth for nothing, but not this.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.concatenate(parts, axis=1)


_by_product.defvjp(_forward, _backward)
