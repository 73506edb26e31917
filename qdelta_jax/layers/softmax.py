"""Softmax attention over packed rows: who may attend to whom, and the two ways to compute it.

A token is described by its run (which segment of the row, `NOTHING` for padding) and its position in it.
A query attends to a key of its own run with 0 <= distance < window. Padding attends to padding, so that no
row is without a key and no softmax divides by zero; its output is cleared by the caller.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax.checks import compute_dtype
from qdelta_jax.segments import segment_masks, segment_runs

__all__ = ["Places", "attend", "cudnn_attention", "places", "resolve_attention", "windowed"]

NOTHING = -1
"""The run of a padded token."""

EMPTY = -2
"""The run of a place in a cache that holds no key yet: even padding does not attend to it."""


class Places(NamedTuple):
    """Where each token of a row stands, [B, T] int32 each: its run and its position in the run.

    `tokens` [B] counts the tokens that are not padding.
    """

    run: Array
    position: Array
    tokens: Array


def places(segment_ids: Array | None, batch: int, length: int) -> Places:
    """The places of the tokens of `segment_ids` [B, T] (None: one segment and no padding)."""
    if segment_ids is None:
        index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        tokens = jnp.full((batch,), length, jnp.int32)
        return Places(jnp.zeros_like(index), index, tokens)
    valid, reset = segment_masks(segment_ids)
    run = segment_runs(segment_ids)
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    start = lax.cummax(jnp.where(reset, count - 1, 0), axis=1)
    return Places(jnp.where(valid, run, NOTHING), count - 1 - start, count[:, -1])


def allowed(query: Places, key: Places, window: int | None) -> Array:
    """[.., T, S] bool: the query's run is the key's, and 0 <= their distance < window."""
    distance = query.position[..., :, None] - key.position[..., None, :]
    mask = (query.run[..., :, None] == key.run[..., None, :]) & (distance >= 0)
    return mask if window is None else mask & (distance < window)


def resolve_attention(implementation: str | None, dtype: jnp.dtype, head_dim: int, length: int) -> str:
    """Which of "xla" and "cudnn" a call runs. None takes "cudnn" where it can run, else "xla".

    Raises:
        ValueError: no implementation has that name.
        NotImplementedError: "cudnn" was asked for and cannot run; the message says why.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f"implementation: got {implementation!r}, want None, 'xla' or 'cudnn'")
    if implementation == "xla" or (implementation is None and length == 1):
        return "xla"
    reason = None
    if jax.default_backend() != "gpu":
        reason = f"the backend is {jax.default_backend()!r}, not 'gpu'"
    elif dtype not in (jnp.bfloat16, jnp.float16):
        reason = f"the dtype is {jnp.dtype(dtype)}, not bfloat16 or float16"
    elif head_dim % 8 or head_dim > 128:
        # Hopper takes more in the forward pass; 128 is what every supported GPU differentiates.
        reason = f"a head has {head_dim} channels, not a multiple of 8 up to 128"
    if reason is None:
        return "cudnn"
    if implementation is None:
        return "xla"
    raise NotImplementedError(f"implementation='cudnn' cannot run attention here: {reason}")


def cudnn_attention(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """`jax.nn.dot_product_attention` by cudnn, which wants even lengths: one query and one key may be added behind.

    With `is_causal` no token sees the added key; a mask hides it.
    """
    more, extra = q.shape[1] % 2, k.shape[1] % 2
    length = q.shape[1]
    if more or extra:
        q = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) for x in (k, v))
        if options.get("mask") is not None:
            mask = jnp.pad(options["mask"], ((0, 0), (0, 0), (0, more), (0, 0)), constant_values=True)
            options["mask"] = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, extra)))
    # It promotes bfloat16 with float32 implicitly, which strict mode would refuse.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)[:, :length]


def attend(q: Array, k: Array, v: Array, mask: Array | None, *, implementation: str) -> Array:
    """softmax(q k^T / sqrt(D) + mask) v for q [B, T, H, D] and k, v [B, S, G, D], G dividing H.

    Args:
        mask: [B, T, S] bool, True where a query may attend, somewhere in every row; None means causal, T = S.
        implementation: "xla" (scores and softmax in float32 or better) or "cudnn"; nothing falls back.
    """
    if implementation == "cudnn":
        seen = {"is_causal": True} if mask is None else {"mask": mask[:, None]}
        return cudnn_attention(q, k, v, **seen)
    batch, length, heads, size = q.shape
    groups = k.shape[2]
    wide = compute_dtype(q.dtype)
    if mask is None:
        mask = jnp.tril(jnp.ones((1, length, length), bool))
    grouped = q.reshape(batch, length, groups, heads // groups, size).astype(wide)
    logits = jnp.einsum("btghd,bsgd->bghts", grouped, k.astype(wide)) * size**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, jnp.finfo(wide).min), axis=-1)
    out = jnp.einsum("bghts,bsgd->btghd", weights, v.astype(wide))
    return out.reshape(batch, length, heads, size).astype(q.dtype)


def windowed(
    q: Array,
    query: Places,
    keys: tuple[Array, Array, Places],
    before: tuple[Array, Array, Places] | None,
    window: int,
    *,
    implementation: str,
) -> Array:
    """Attention to the last `window` keys, in blocks of as many queries: T x 2 window scores, not T x T.

    A block of queries sees its own keys and the block before. Rows must not have padding between tokens of
    one run: distance along the row must be distance in the run.

    Args:
        q: [B, T, H, D].
        query: places of the queries.
        keys: k [B, T, G, D], v, and their places (the queries' own).
        before: the `window` keys before the row, oldest first, from a cache.
    """
    k, v, key = keys
    batch, length = q.shape[:2]
    block = min(window, length)
    count = -(-length // block)
    tail = count * block - length

    def lengthen(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, ((0, 0), (0, tail), *[(0, 0)] * (x.ndim - 2)), constant_values=value)

    def pairs(first: Array, x: Array, value: int = 0) -> Array:
        """Each block of x behind the `window` entries before it, [B * count, window + block, ..]."""
        if count == 1:
            return jnp.concatenate([first, x], axis=1)
        row = jnp.concatenate([first, lengthen(x, value)], axis=1).reshape(batch, count + 1, block, *x.shape[2:])
        both = jnp.concatenate([row[:, :-1], row[:, 1:]], axis=2)
        return both.reshape(batch * count, 2 * block, *x.shape[2:])

    if before is None:
        shape = (batch, window)
        zeros = jnp.zeros((*shape, *k.shape[2:]), k.dtype)
        nowhere = Places(jnp.full(shape, EMPTY, jnp.int32), jnp.zeros(shape, jnp.int32), key.tokens)
        before = (zeros, zeros, nowhere)
    q_blocks = lengthen(q).reshape(batch * count, block, *q.shape[2:])
    query_blocks = query._replace(
        run=lengthen(query.run, NOTHING).reshape(batch * count, block),
        position=lengthen(query.position).reshape(batch * count, block),
    )
    key_blocks = key._replace(
        run=pairs(before[2].run, key.run, NOTHING), position=pairs(before[2].position, key.position)
    )
    mask = allowed(query_blocks, key_blocks, window)
    out = attend(q_blocks, pairs(before[0], k), pairs(before[1], v), mask, implementation=implementation)
    return out.reshape(batch, count * block, *q.shape[2:])[:, :length]
