"""States along time, chunk by chunk: one is held at a time."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from qdelta_jax.checks import check_count
from qdelta_jax.chunked import ChunkOptions, chunked_plain
from qdelta_jax.dynamics.call import PRECISION, Call, make_call, masks
from qdelta_jax.rules import Rule

__all__ = ["ChunkState", "advance", "chunk_states", "in_chunks", "map_states"]


class ChunkState(NamedTuple):
    """state: [B, HV, K, V] after the tokens before `end`."""

    end: int
    state: Array


def chunk_states(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
) -> Iterator[ChunkState]:
    """S_C, S_2C, .., S_T: the state behind each chunk of C = chunk_size tokens, one after the other.

    Args:
        q, k, v, rule, gates, initial_state, segment_ids: as in `qdelta_jax.delta_rule`.
        chunk_size: tokens between two states; any number.
    Returns:
        An iterator of (end, state): state [B, HV, K, V] float32 (float64 for float64 inputs) after the tokens before
        `end`. Where a chunk ends in padding it is the state that the padding found. Arguments are checked at once,
        states are computed as they are asked for.
    Raises:
        ValueError: as `delta_rule`.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 5, 1, 2))
    >>> [(end, float(state[0, 0, 0, 0])) for end, state in chunk_states(x, x, x, "linear_attention", chunk_size=2)]
    [(2, 2.0), (4, 4.0), (5, 5.0)]

    Source: the chunked form, arXiv 2406.06484.
    """
    call, which = make_call(q, k, v, rule, gates, initial_state=initial_state, segment_ids=segment_ids)
    return _iterate(call, which, check_count("chunk_size", chunk_size))


def _iterate(call: Call, rule: Rule, size: int) -> Iterator[ChunkState]:
    masked, length, state = masks(call), call.q.shape[1], call.state
    inputs = (call.q, call.k, call.v, call.gates)
    for start in range(0, length, size):
        end = min(start + size, length)
        state = _advance_from(state, inputs, masked, np.int32(start), rule=rule, size=end - start)
        yield ChunkState(end, state)


@partial(jax.jit, static_argnames=("rule", "size"))
def _advance_from(state: Array, inputs: tuple, masked: tuple, start: Any, *, rule: Rule, size: int) -> Array:
    """`advance` by `size` tokens from `start` on, which is traced: one program for all chunks."""
    inputs, masked = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1), (inputs, masked))
    return advance(state, inputs, masked, rule)


def advance(state: Array, inputs: tuple, masked: tuple[Array, Array], rule: Rule) -> Array:
    """The state behind a few tokens; `masked` says which count and which open a segment."""
    # Precision and chunk size are those of `delta_rule` where it is asked for float32 products.
    options = ChunkOptions(scale=1.0, precision=PRECISION)
    return chunked_plain(rule, options, *inputs, state, *masked)[1]


def map_states(
    summary: Callable[[Array], Any],
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int = 64,
) -> Any:
    """summary(S_C), summary(S_2C), .., summary(S_T) of the states behind chunks of C tokens, as one scan.

    What `chunk_states` gives, inside jit and vmap: only what `summary` returns is kept.

    Args:
        summary: [B, HV, K, V] to an array or a pytree of arrays (`effective_rank`, `singular_values`, ..). Compiled
            once for each function: pass the same one again, not a new lambda.
        q, k, v, rule, gates, initial_state, segment_ids: as in `qdelta_jax.delta_rule`.
        chunk_size: tokens between two states; any number.
    Returns:
        What summary returns, with a leading axis of ceil(T / chunk_size).
    Raises:
        ValueError: as `delta_rule`; summary is not callable.

    >>> import jax.numpy as jnp
    >>> from qdelta_jax.dynamics import effective_rank
    >>> x = jnp.ones((1, 5, 1, 2))
    >>> map_states(effective_rank, x, x, x, "linear_attention", chunk_size=2).ravel().round(3).tolist()
    [1.0, 1.0, 1.0]
    """
    if not callable(summary):
        raise ValueError(f"summary: got {type(summary).__name__}, want a function of a state [B,HV,K,V]")
    call, which = make_call(q, k, v, rule, gates, initial_state=initial_state, segment_ids=segment_ids)
    return _map(call, rule=which, summary=summary, size=check_count("chunk_size", chunk_size))


@partial(jax.jit, static_argnames=("rule", "summary", "size"))
def _map(call: Call, *, rule: Rule, summary: Callable[[Array], Any], size: int) -> Any:
    def body(state: Array, item: tuple) -> tuple[Array, Any]:
        inputs, masked = item
        state = advance(state, inputs, masked, rule)
        return state, summary(state)

    items = in_chunks(((call.q, call.k, call.v, call.gates), masks(call)), size)
    return lax.scan(body, call.state, items)[1]


def in_chunks(tree: Any, size: int) -> Any:
    """[B, T, ...] -> [n, B, size, ...], zeros (False) behind the end."""

    def cut(x: Array) -> Array:
        behind = -x.shape[1] % size
        x = jnp.pad(x, ((0, 0), (0, behind), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, tree)
