"""What can still be read: pairs that were stored, against their age."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax.checks import check_count
from qdelta_jax.dynamics.call import Call, make_call, masks, read
from qdelta_jax.dynamics.readout import cosine
from qdelta_jax.dynamics.states import advance, in_chunks
from qdelta_jax.rules import Rule
from qdelta_jax.segments import padding_last, reordered

__all__ = ["Retrieval", "retrieval_by_age"]


class Retrieval(NamedTuple):
    """Means over the pairs of one age, 0 for the pair just written.

    error: [B, HV, A], mean |S_t^T k_s - v_s| / |v_s| with age = t - s.
    cosine: [B, HV, A], mean cosine of S_t^T k_s and v_s, which no scale of keys or gates changes.
    pairs: [B, A], how many, the most of any head; where there are none, the means are 0.
    """

    error: Array
    cosine: Array
    pairs: Array


def retrieval_by_age(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    max_age: int = 64,
    chunk_size: int = 64,
) -> Retrieval:
    """error(age) = mean_t |S_t^T k_{t - age} - v_{t - age}| / |v_{t - age}|.

    Read without the scale of the output, by the key as it was written. States are those behind chunks of tokens;
    each is asked for the last `max_age` pairs of its segment.

    Args:
        q, k, v, rule, gates, initial_state, segment_ids: as in `qdelta_jax.delta_rule`. Padding has no age: it is
            taken out before chunks are cut.
        max_age: A, ages 0 .. A - 1.
        chunk_size: tokens between two states; 1 asks all of them. Memory is one state and the inputs.
    Returns:
        A `Retrieval` in float32 (float64 for float64 inputs). A pair whose value is 0 does not count.
    Raises:
        ValueError: as `delta_rule`; max_age is no integer of at least 1.

    Orthogonal keys, whole writes: nothing is lost.

    >>> import jax.numpy as jnp
    >>> k = jnp.eye(4).reshape(1, 4, 1, 4)
    >>> seen = retrieval_by_age(k, k, 1 + k, "delta_net", {"beta": jnp.ones((1, 4, 1))}, max_age=4, chunk_size=4)
    >>> seen.error.ravel().tolist(), seen.pairs.ravel().tolist()
    ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])

    Source: the probe of associative recall, arXiv 2102.11174.
    """
    call, which = make_call(q, k, v, rule, gates, initial_state=initial_state, segment_ids=segment_ids)
    sizes = check_count("max_age", max_age), check_count("chunk_size", chunk_size)
    return _retrieve(call, which, sizes)


@partial(jax.jit, static_argnames=("rule", "sizes"))
def _retrieve(call: Call, rule: Rule, sizes: tuple[int, int]) -> Retrieval:
    ages, size = sizes
    (batch, length), heads, dtype = call.q.shape[:2], call.v.shape[2], call.state.dtype
    valid, reset = masks(call)
    inputs, valid, reset = _to_the_left((call.q, call.k, call.v, call.gates), valid, reset)
    tokens = jnp.sum(valid, axis=1, dtype=jnp.int32)
    runs = jnp.cumsum(reset, axis=1, dtype=jnp.int32)
    age = jnp.arange(ages, dtype=jnp.int32)[None]

    def body(held: tuple, item: tuple) -> tuple[tuple, None]:
        state, (error, cos, count) = held
        number, tokens_of_chunk, masked = item
        state = advance(state, tokens_of_chunk, masked, rule)
        last = jnp.minimum((number + 1) * size, tokens) - 1
        at = jnp.maximum(last[:, None] - age, 0)
        here = jnp.take_along_axis(runs, jnp.maximum(last, 0)[:, None], axis=1)
        asked = (last[:, None] >= age) & (last[:, None] >= number * size)
        asked &= jnp.take_along_axis(runs, at, axis=1) == here
        keys, values = (_heads(_take(x, at).astype(dtype), heads) for x in (inputs[1], inputs[2]))
        got = jax.vmap(read, in_axes=(None, 1), out_axes=1)(state, keys)
        length_of = jnp.linalg.norm(values, axis=-1)
        counted = asked[:, :, None] & (length_of > 0)
        wrong = jnp.linalg.norm(got - values, axis=-1) / jnp.where(length_of > 0, length_of, 1)
        sums = (jnp.where(counted, x, 0) for x in (wrong, cosine(got, values), jnp.ones_like(wrong)))
        return (state, tuple(a + b for a, b in zip((error, cos, count), sums, strict=True))), None

    zeros = jnp.zeros((batch, ages, heads), dtype)
    chunks = in_chunks((inputs, (valid, reset)), size)
    numbers = jnp.arange(-(-length // size), dtype=jnp.int32)
    (_, (error, cos, count)), _ = lax.scan(body, (call.state, (zeros,) * 3), (numbers, *chunks))
    error, cos = (jnp.moveaxis(x / jnp.maximum(count, 1), 1, 2) for x in (error, cos))
    return Retrieval(error, cos, jnp.max(count, axis=2))


def _to_the_left(inputs: tuple, valid: Array, reset: Array) -> tuple[tuple, Array, Array]:
    """Every row's padding behind its last token."""
    order, _ = padding_last(valid)
    return reordered((inputs, valid, reset), order)


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def _heads(x: Array, heads: int) -> Array:
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)
