"""Text from a language model: read the prompts at once, then one token after the other in constant memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from qdelta_jax.checks import check_count
from qdelta_jax.layers.inputs import check_number
from qdelta_jax.models.language_model import LanguageModel, ModelCache

__all__ = ["Generated", "generate", "sample"]

NO_TOKEN = -1
SMALLEST_BUCKET = 16


class Generated(NamedTuple):
    """tokens [B, max_new_tokens] int32, -1 behind a stop token; finished [B] bool, whether there is one."""

    tokens: Array
    finished: Array


class Sampling(NamedTuple):
    """Arguments of `sample`, as values of a compiled program: changing one recompiles nothing."""

    temperature: Array
    top_k: Array
    top_p: Array


def sample(logits: Array, keys: Array, sampling: Sampling, *, filtered: bool = True) -> Array:
    """A token [B] from softmax(logits / temperature), cut to the top_k most likely, then to their nucleus.

    The nucleus is the fewest of the most likely tokens that hold at least top_p of what top_k left.

    Args:
        logits: [B, vocab] float32.
        keys: [B] random keys, one per row: what a row draws does not depend on its neighbours.
        sampling: temperature > 0, top_k >= 1, 0 < top_p <= 1.
        filtered: whether top_k or top_p cut anything; without them nothing is sorted.

    Source of top_p: arXiv 1904.09751.
    """
    logits = logits / sampling.temperature
    if not filtered:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    order = jnp.argsort(logits, axis=-1, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape)
    ranked = jnp.where(rank < sampling.top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Nothing is before the first one: it always stays.
    ranked = jnp.where(before < sampling.top_p, ranked, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, ranked)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


def generate(
    model: LanguageModel,
    prompts: Any,
    *,
    max_new_tokens: Any,
    lengths: Any = None,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    stop_tokens: Any = (),
    rng: Any = None,
) -> Generated:
    """Continues each prompt by up to `max_new_tokens` tokens.

    Prompts of different lengths go in one batch, and each is continued as it would be alone. Both lengths are
    rounded up to powers of two inside, so that new lengths seldom compile anything. It compiles itself and reads
    the values of its arguments: it is not for use under `jax.jit` or another transformation.

    Args:
        model: a language model.
        prompts: a list of lists of tokens, or an array [B, P] with the tokens of each row first.
        max_new_tokens: an integer, at most so many new tokens; fewer once every row has drawn a stop token.
        lengths: [B], tokens of each row when `prompts` is an array; P for all by default.
        temperature: a number, 0 for the most likely token each time.
        top_k, top_p: see `sample`; None cuts nothing.
        stop_tokens: a sequence of tokens; a row that draws one of these is finished.
        rng: one random key, needed when temperature > 0.
    Returns:
        `Generated`: tokens and finished.
    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    rows = _rows(prompts, lengths, model.config.vocab_size)
    _check(max_new_tokens, temperature, top_k, top_p)
    stop_tokens = _stops(stop_tokens, model.config.vocab_size)
    if temperature > 0 and rng is None:
        raise ValueError("rng: got None, want a random key (jax.random.key(seed)) when temperature > 0")
    if rng is not None:
        _check_key(rng)
    length = bucket(max(map(len, rows)))
    tokens, valid = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.int32)
    for i, row in enumerate(rows):
        # Padding on the left: every prompt ends in the last column.
        tokens[i, length - len(row) :], valid[i, length - len(row) :] = row, 1
    stops = np.full(bucket(max(len(stop_tokens), 1), 1), NO_TOKEN, np.int32)
    stops[: len(stop_tokens)] = stop_tokens
    vocabulary = model.config.vocab_size
    sampling = Sampling(
        jnp.float32(temperature or 1.0),
        jnp.int32(vocabulary if top_k is None else min(top_k, vocabulary)),
        jnp.float32(1.0 if top_p is None else top_p),
    )
    graph, parameters = nnx.split(model)
    out, finished = _generate(
        graph,
        parameters,
        jnp.asarray(tokens),
        jnp.asarray(valid),
        jnp.int32(max_new_tokens),
        jnp.asarray(stops),
        sampling,
        jax.random.key(0) if rng is None else rng,
        new=bucket(max_new_tokens),
        greedy=temperature == 0,
        filtered=top_k is not None or top_p is not None,
    )
    return Generated(out[:, :max_new_tokens], finished)


def bucket(length: int, smallest: int = SMALLEST_BUCKET) -> int:
    """The next power of two, at least `smallest`.

    >>> [bucket(n) for n in (1, 16, 17, 1000)]
    [16, 16, 32, 1024]
    """
    return max(smallest, 1 << (length - 1).bit_length())


@partial(jax.jit, static_argnames=("graph", "new", "greedy", "filtered"))
def _generate(
    graph: Any,
    parameters: Any,
    tokens: Array,
    valid: Array,
    limit: Array,
    stops: Array,
    sampling: Sampling,
    rng: Array,
    *,
    new: int,
    greedy: bool,
    filtered: bool,
) -> tuple[Array, Array]:
    model = nnx.merge(graph, parameters)
    batch, length = tokens.shape
    rows = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(batch))

    def draw(x: Array, i: Array, finished: Array) -> tuple[Array, Array]:
        logits = model.logits(x[:, -1])
        if greedy:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(rows, i)
            token = sample(logits, keys, sampling, filtered=filtered)
        token = jnp.where(finished, NO_TOKEN, token)
        return token, finished | jnp.any(token[:, None] == stops[None], axis=-1)

    def unfinished(carry: tuple) -> Array:
        i, _, _, _, finished = carry
        return (i < limit) & ~jnp.all(finished)

    def advance(carry: tuple[Array, Array, Array, ModelCache, Array]) -> tuple:
        i, out, token, cache, finished = carry
        # A finished row goes on, unseen: its NO_TOKEN reads as token 0.
        x, cache = model.features(token[:, None], cache=cache)
        token, finished = draw(x, i, finished)
        return i + 1, out.at[:, i].set(token), token, cache, finished

    x, cache = model.features(tokens, segment_ids=valid, cache=model.init_cache(batch, length + new))
    token, finished = draw(x, jnp.int32(0), jnp.zeros(batch, bool))
    out = jnp.full((batch, new), NO_TOKEN, jnp.int32).at[:, 0].set(token)
    carry = lax.while_loop(unfinished, advance, (jnp.int32(1), out, token, cache, finished))
    return carry[1], carry[4]


def _rows(prompts: Any, lengths: Any, vocabulary: int) -> list[np.ndarray]:
    """The prompts as a list of vectors without padding."""
    if hasattr(prompts, "ndim"):
        if prompts.ndim != 2:
            raise ValueError(f"prompts: got shape {prompts.shape}, want [B, P] or a list of lists of tokens")
        counts = np.full(len(prompts), prompts.shape[1]) if lengths is None else np.asarray(lengths)
        if counts.shape != (len(prompts),) or np.any(counts > prompts.shape[1]):
            raise ValueError(f"lengths: got {counts.tolist()}, want one per row of prompts {prompts.shape}, at most P")
        if not np.issubdtype(counts.dtype, np.integer):
            raise ValueError(f"lengths: got dtype {counts.dtype}, want integers")
        rows = [np.asarray(row)[: max(n, 0)] for row, n in zip(np.asarray(prompts), counts, strict=True)]
    else:
        if lengths is not None:
            raise ValueError("lengths: only an array of prompts has them; a list of lists says them itself")
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts: got {type(prompts).__name__}, want [B, P] or a list of lists of tokens")
        rows = [np.asarray(row) for row in prompts]
    if not rows:
        raise ValueError("prompts: got none, want at least one")
    for i, row in enumerate(rows):
        if row.size and not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompts: row {i} has dtype {row.dtype}, want integers (tokens)")
        if row.ndim != 1 or not row.size:
            raise ValueError(f"prompts: row {i} has shape {row.shape}, want at least one token")
        if row.min() < 0 or row.max() >= vocabulary:
            raise ValueError(f"prompts: row {i} has values outside the tokens 0 .. {vocabulary - 1}")
    return rows


def _stops(stop_tokens: Any, vocabulary: int) -> list[int]:
    """The stop tokens as integers."""
    wanted = f"a sequence of integers within 0 .. {vocabulary - 1}"
    if getattr(stop_tokens, "ndim", None) == 1:
        stop_tokens = list(np.asarray(stop_tokens))
    if isinstance(stop_tokens, str | bytes) or not isinstance(stop_tokens, Sequence):
        raise ValueError(f"stop_tokens: got {stop_tokens!r}, want {wanted}")
    for token in stop_tokens:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
            raise ValueError(f"stop_tokens: got {token!r} in it, want {wanted}")
    return [int(token) for token in stop_tokens]


def _check_key(rng: Any) -> None:
    """One random key, of `jax.random.key` or the older `jax.random.PRNGKey`."""
    wanted = "one random key (jax.random.key(seed))"
    if not hasattr(rng, "dtype") or not hasattr(rng, "shape"):
        raise ValueError(f"rng: got {type(rng).__name__}, want {wanted}")
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    if rng.shape != (() if typed else raw.shape) or not (typed or rng.dtype == raw.dtype):
        raise ValueError(f"rng: got shape {rng.shape} and dtype {rng.dtype}, want {wanted}")


def _check(max_new_tokens: Any, temperature: Any, top_k: Any, top_p: Any) -> None:
    check_count("max_new_tokens", max_new_tokens)
    if check_number("temperature", temperature, "a number of at least 0") < 0:
        raise ValueError(f"temperature: got {temperature}, want a number of at least 0")
    if top_k is not None:
        check_count("top_k", top_k)
    if top_p is not None and not 0 < check_number("top_p", top_p, "0 < top_p <= 1, or None") <= 1:
        raise ValueError(f"top_p: got {top_p}, want 0 < top_p <= 1, or None")
