"""Packed and padded sequences: what segment ids mean, in one place.

`segment_ids` is `[B, T]` int. 0 is padding: no output, the state untouched. The first non-zero id continues the
initial state; a non-zero id other than the last non-zero id before it clears the state; the same id after padding
continues.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from qdelta_jax.checks import check_count, check_segment_ids

__all__ = ["padding_last", "reordered", "segment_ids_from_cu_seqlens", "segment_masks", "segment_runs"]


def segment_masks(segment_ids: Array) -> tuple[Array, Array]:
    """valid and reset, both [B, T] bool, of segment_ids [B, T].

    valid: the token is not padding. reset: the state is cleared before this token.

    >>> valid, reset = segment_masks(jnp.array([[7, 7, 0, 7, 2]]))
    >>> valid.astype(int).tolist(), reset.astype(int).tolist()
    ([[1, 1, 0, 1, 1]], [[0, 0, 0, 0, 1]])

    Raises:
        ValueError: segment_ids is not an integer array with two axes.
    """
    check_segment_ids(segment_ids, None)
    valid = segment_ids != 0
    positions = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    seen = lax.cummax(jnp.where(valid, positions, -1), axis=1)
    before = jnp.pad(seen[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    last_id = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    return valid, valid & (before >= 0) & (last_id != segment_ids)


def segment_runs(segment_ids: Array) -> Array:
    """Which run a token belongs to, [B, T] int32: 0 for the first segment of the row, 1 for the second, ..

    Padding carries the number of the segment before it (0 before the first).
    """
    return jnp.cumsum(segment_masks(segment_ids)[1], axis=1, dtype=jnp.int32)


def padding_last(valid: Array) -> tuple[Array, Array]:
    """The order [B, T] that moves padding behind the tokens of its row, and the order that undoes it.

    >>> order, back = padding_last(jnp.array([[False, True, True, False, True]]))
    >>> order.tolist(), back.tolist()
    ([[1, 2, 4, 0, 3]], [[3, 0, 1, 4, 2]])
    """
    tokens = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    padding = jnp.cumsum(~valid, axis=1, dtype=jnp.int32)
    back = jnp.where(valid, tokens - 1, tokens[:, -1:] + padding - 1)
    rows = jnp.arange(valid.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.broadcast_to(jnp.arange(valid.shape[1], dtype=jnp.int32), valid.shape)
    order = jnp.zeros_like(index).at[rows, back].set(index, unique_indices=True)
    return order, back


def reordered[T](arrays: T, order: Array) -> T:
    """x[b, order[b, t]] of each x [B, T, ..] of a pytree, for a permutation of each row."""
    rows = jnp.arange(order.shape[0], dtype=jnp.int32)[:, None]

    def take(x: Array) -> Array:
        return x if x.shape[1] == 1 else x.at[rows, order].get(unique_indices=True, mode="promise_in_bounds")

    return jax.tree.map(lambda x: take(jnp.asarray(x)), arrays)


def segment_ids_from_cu_seqlens(cu_seqlens: Array, length: int) -> Array:
    """segment_ids [1, length] of packed sequences whose boundaries are cu_seqlens [n + 1].

    Sequence i covers the tokens cu_seqlens[i] .. cu_seqlens[i+1] - 1 and gets the id i + 1; tokens from
    cu_seqlens[-1] on are padding (id 0). An empty sequence has no tokens and its id does not appear.

    >>> segment_ids_from_cu_seqlens(jnp.array([0, 2, 2, 5]), 6).tolist()
    [[1, 1, 3, 3, 3, 0]]

    Raises:
        ValueError: cu_seqlens is not a vector of at least two integers, or (outside jit) decreases or leaves
            0 .. length; or length < 1.
    """
    wanted = "want a vector of n + 1 integers, n >= 1"
    if not hasattr(cu_seqlens, "ndim") or not hasattr(cu_seqlens, "dtype"):
        raise ValueError(f"cu_seqlens: got {type(cu_seqlens).__name__}, {wanted}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError(f"cu_seqlens: got shape {cu_seqlens.shape} and dtype {cu_seqlens.dtype}, {wanted}")
    length = check_count("length", length)
    if not isinstance(cu_seqlens, jax.core.Tracer):
        concrete = np.asarray(cu_seqlens)
        if np.any(concrete[1:] < concrete[:-1]) or concrete[0] < 0 or concrete[-1] > length:
            raise ValueError(
                f"cu_seqlens: got {concrete}, want ends that do not decrease, from 0 to at most length {length}"
            )
    # Narrow integers would wrap where positions go on.
    ends = jnp.asarray(cu_seqlens).astype(jnp.int32)
    ids = jnp.searchsorted(ends, jnp.arange(length, dtype=jnp.int32), side="right").astype(jnp.int32)
    return jnp.where(ids < cu_seqlens.shape[0], ids, 0)[None]
