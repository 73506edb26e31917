"""Causal softmax attention, full or over a sliding window, with a cache for generation."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from qdelta_jax.checks import check_count, own_values
from qdelta_jax.layers.inputs import (
    check_along,
    check_array,
    check_cache_batch,
    check_dtypes,
    check_hidden,
    check_number,
)
from qdelta_jax.layers.linear import Initializer, Linear
from qdelta_jax.layers.norms import RMSNorm
from qdelta_jax.layers.rope import rope
from qdelta_jax.layers.softmax import (
    EMPTY,
    NOTHING,
    Places,
    allowed,
    attend,
    cudnn_attention,
    places,
    resolve_attention,
    windowed,
)
from qdelta_jax.segments import padding_last, reordered

__all__ = ["Attention", "AttentionCache", "AttentionConfig"]


@dataclass(frozen=True)
class AttentionConfig:
    """What `Attention` computes.

    width: of the hidden state.
    heads: of queries, `head_dim` channels each (even: they turn in pairs).
    kv_heads: of keys and values, dividing `heads`; None for as many as `heads`.
    window: a query sees the last `window` tokens of its segment, itself included; None for all.
    rope_theta: base of the rotary frequencies.
    qk_norm: RMSNorm on each head of q and k, before the rotation.
    implementation: "xla", "cudnn" (refused where it cannot run), or None: cudnn where it can run.
    """

    width: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    window: int | None = None
    rope_theta: float = 10000.0
    qk_norm: bool = False
    norm_eps: float = 1e-6
    implementation: str | None = None

    def __post_init__(self) -> None:
        own_values(self)
        for name in ("width", "heads", "head_dim", "kv_heads", "window"):
            value = getattr(self, name)
            if value is not None or name in ("width", "heads", "head_dim"):
                check_count(name, value)
        for name in ("rope_theta", "norm_eps"):
            check_number(name, getattr(self, name), positive=True)
        if self.heads % self.groups:
            raise ValueError(f"kv_heads: got {self.kv_heads}, want a divisor of the {self.heads} heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, want an even number (channels turn in pairs)")
        if self.implementation not in (None, "xla", "cudnn"):
            raise ValueError(f"implementation: got {self.implementation!r}, want None, 'xla' or 'cudnn'")

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads


class AttentionCache(NamedTuple):
    """The last S keys and values of each row: the token with index i of its segment lies at place i mod S.

    keys, values: [B, S, G, D], keys already rotated.  length: [B] int32, tokens of the segment so far.
    """

    keys: Array
    values: Array
    length: Array

    def places(self, length: Array) -> Places:
        """The places of the keys of a row of `length` [B] tokens: the newest of those that share a place."""
        size = self.keys.shape[1]
        newest = length[:, None] - 1
        index = newest - (newest - jnp.arange(size, dtype=jnp.int32)[None]) % size
        return Places(jnp.where(index >= 0, 0, EMPTY), index, length)


class Attention(nnx.Module):
    """y = W_o concat_h softmax(rope(q_h) rope(k_h)^T / sqrt(D) + causal mask) v_h.

    Args:
        config: an `AttentionConfig`.
        kernel_init: of the four projections; LeCun normal by default.
        dtype: of the computation; None for the wider of the input's and the parameters'.
        param_dtype: of the parameters.
        rngs: the stream `params` is used.

    Source: arXiv 1706.03762; grouped keys and values 2305.13245; rotation 2104.09864.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        rngs: nnx.Rngs,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        check_dtypes(dtype, param_dtype)
        self.config, self.dtype, self.param_dtype = config, dtype, param_dtype
        inner, outer = config.heads * config.head_dim, config.groups * config.head_dim
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        linear = {"kernel_init": kernel_init, **options}
        self.q = Linear(config.width, inner, axes=("embed", "heads"), **linear)
        self.k = Linear(config.width, outer, axes=("embed", "heads"), **linear)
        self.v = Linear(config.width, outer, axes=("embed", "heads"), **linear)
        self.out = Linear(inner, config.width, axes=("heads", "embed"), **linear)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, **options) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, **options) if config.qk_norm else None

    def _check_cache(self, cache: Any, batch: int, length: int) -> None:
        if not isinstance(cache, AttentionCache):
            raise ValueError(f"cache: got {type(cache).__name__}, want an AttentionCache as from init_cache")
        if getattr(cache.keys, "ndim", 0) != 4:
            raise ValueError(f"cache.keys: got {type(cache.keys).__name__}, want an array [B,N,H,D] as from init_cache")
        check_cache_batch(cache.keys.shape[0], batch)
        size = cache.keys.shape[1] if self.config.window is None else self.config.window
        for name in ("keys", "values"):
            shape = (batch, size, self.config.groups, self.config.head_dim)
            check_array(f"cache.{name}", getattr(cache, name), "[B,N,H,D]", shape)
        check_array("cache.length", cache.length, "[B]", (batch,), "integer")
        if self.config.window is None and length > size:
            raise ValueError(f"x: got {length} tokens in one call, want at most the cache's max_length = {size}")

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = None) -> AttentionCache:
        """An empty cache of `max_length` keys, or of `window` keys if that is set (then memory is constant).

        Beyond `max_length` tokens the oldest keys are dropped: full attention goes on with the last `max_length`.
        """
        size = max_length if self.config.window is None else self.config.window
        shape = (batch_size, size, self.config.groups, self.config.head_dim)
        dtype = dtype or self.dtype or self.param_dtype
        return AttentionCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch_size, jnp.int32))

    def __call__(
        self,
        x: Any,
        *,
        segment_ids: Any = None,
        positions: Any = None,
        cache: AttentionCache | None = None,
        zeros_last: bool = False,
    ) -> tuple[Float[Array, "batch time width"], AttentionCache | None]:
        """y, and the cache after these tokens (None without one).

        Args:
            x: hidden states, floating [B, T, width], any T >= 1.
            segment_ids: integers [B, T]. 0 is padding: output 0, whatever is there, NaN included. Segments do not
                see each other; the first one continues the cache, and the cache holds the last one afterwards.
            positions: integers [B, T], angles of the rotation; by default tokens count within their segment,
                padding left out.
                The window always counts tokens.
            cache: from `init_cache` or the call before. Without a window one call reads at most as many tokens
                as the cache holds; beyond `max_length` in all the oldest keys are dropped.
            zeros_last: the caller knows that padding stands behind the tokens of its row.
        Raises:
            ValueError: an argument has another shape or dtype, the cache another batch size or too few places.
        """
        check_hidden(x, self.config.width)
        check_along(x.shape[:2], segment_ids, positions)
        batch, length, _ = x.shape
        if cache is not None:
            self._check_cache(cache, batch, length)
        valid = None
        if segment_ids is not None:
            # Before anything else: 0 * NaN is NaN, in products and in their gradients.
            valid = (segment_ids != 0)[:, :, None]
            x = jnp.where(valid, x, 0)
        back = None
        needed = cache is not None or self.config.window is not None
        if segment_ids is not None and length > 1 and needed and not zeros_last:
            order, back = padding_last(segment_ids != 0)
            x, segment_ids, positions = reordered((x, segment_ids, positions), order)
        here = places(segment_ids, batch, length)
        if cache is not None:
            # The first segment goes on where the cache ends.
            index = here.position + jnp.where(here.run == 0, cache.length[:, None], 0)
            here = here._replace(position=index)
        q, k, v = self._project(x, here.position if positions is None else positions)
        mixed, cache = self._mix(q, k, v, here, cache, packed=segment_ids is not None)
        y = self.out(mixed.reshape(batch, length, -1))
        y = y if back is None else reordered(y, back)
        return (y if valid is None else jnp.where(valid, y, 0)), cache

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        q, k, v = (f(x).reshape(*x.shape[:2], -1, self.config.head_dim) for f in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        theta = self.config.rope_theta
        return rope(q, positions, theta), rope(k, positions, theta), v

    def _mix(
        self, q: Array, k: Array, v: Array, here: Places, cache: AttentionCache | None, *, packed: bool
    ) -> tuple[Array, AttentionCache | None]:
        """The heads' outputs [B, T, H, D] and the new cache; with a cache or a window, padding comes last."""
        window, length = self.config.window, q.shape[1]
        chosen = resolve_attention(self.config.implementation, q.dtype, self.config.head_dim, length)
        if cache is None:
            if window is None or window >= length:
                mask = allowed(here, here, None) if packed else None
                return attend(q, k, v, mask, implementation=chosen), None
            if chosen == "cudnn" and not packed:
                return cudnn_attention(q, k, v, is_causal=True, local_window_size=(window - 1, 0)), None
            return windowed(q, here, (k, v, here), None, window, implementation=chosen), None
        after = _append(cache, k, v, here)
        if length == 1:
            mask = allowed(here._replace(run=jnp.zeros_like(here.run)), after.places(after.length), None)
            keys, values = after.keys.astype(k.dtype), after.values.astype(v.dtype)
            # A padded token may meet an empty cache; the caller clears its output.
            return attend(q, keys, values, mask, implementation=chosen), after
        before = _oldest_first(cache) if window is not None else (cache.keys, cache.values, cache.places(cache.length))
        before = (before[0].astype(k.dtype), before[1].astype(v.dtype), before[2])
        if window is not None:
            return windowed(q, here, (k, v, here), before, window, implementation=chosen), after
        everything = here._replace(
            run=jnp.concatenate([before[2].run, here.run], axis=1),
            position=jnp.concatenate([before[2].position, here.position], axis=1),
        )
        keys = jnp.concatenate([before[0], k], axis=1)
        values = jnp.concatenate([before[1], v], axis=1)
        return attend(q, keys, values, allowed(here, everything, None), implementation=chosen), after


def _append(cache: AttentionCache, k: Array, v: Array, here: Places) -> AttentionCache:
    """The cache after the tokens of `here`, padding last in each row: the last run's newest keys."""
    size, length = cache.keys.shape[1], k.shape[1]
    rows = jnp.arange(k.shape[0], dtype=jnp.int32)
    end = jnp.maximum(here.tokens - 1, 0)
    total = jnp.where(here.tokens > 0, here.position[rows, end] + 1, cache.length)
    if length == 1:
        # One place changes: an update in place, where the general form would rewrite the whole cache.
        place = cache.length % size
        real = (here.run[:, 0] != NOTHING)[:, None, None]

        def put(old: Array, new: Array) -> Array:
            new = jnp.where(real, new[:, 0].astype(old.dtype), old[rows, place])
            return old.at[rows, place].set(new, unique_indices=True)

    else:
        # The key of that age, counted from the newest, is so many places before the last token of the row.
        # (Ages that reach into an earlier run belong to places which a run this short leaves empty.)
        age = total[:, None] - 1 - cache.places(total).position
        fresh = (age < here.tokens[:, None])[:, :, None, None]
        source = jnp.clip(here.tokens[:, None] - 1 - age, 0, length - 1)

        def put(old: Array, new: Array) -> Array:
            return jnp.where(fresh, new[rows[:, None], source].astype(old.dtype), old)

    return AttentionCache(put(cache.keys, k), put(cache.values, v), total)


def _oldest_first(cache: AttentionCache) -> tuple[Array, Array, Places]:
    """Keys, values and places of a full window, the newest last."""
    size = cache.keys.shape[1]
    there = cache.places(cache.length)
    order = (cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]) % size
    keys, values, run, position = reordered((cache.keys, cache.values, there.run, there.position), order)
    return keys, values, there._replace(run=run, position=position)
