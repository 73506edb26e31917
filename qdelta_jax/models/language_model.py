"""A language model: embedding, blocks after a pattern, norm, output layer."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from qdelta_jax.kept import ACTIVATION
from qdelta_jax.layers.block import Block
from qdelta_jax.layers.embedding import lookup
from qdelta_jax.layers.inputs import check_along, check_tokens
from qdelta_jax.layers.linear import Linear, product, wider, xavier_uniform
from qdelta_jax.layers.norms import RMSNorm
from qdelta_jax.layers.partitioning import constrain, partitioned
from qdelta_jax.models.config import ModelConfig
from qdelta_jax.segments import padding_last, reordered

__all__ = ["Cell", "LanguageModel", "ModelCache"]

_named = jax.checkpoint_policies.save_only_these_names


def _products_and(*names: str) -> Any:
    # What the GPU kernels compute is no product to JAX.
    named = _named("delta_rule_out", "delta_rule_saved", *names)
    return jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, named
    )


POLICIES = {
    "full": None,
    "activations": _products_and(ACTIVATION),
    "dots": _products_and(),
    "delta_rule_states": _named("delta_rule_states", "delta_rule_kept", "delta_rule_saved"),
}
"""What `jax.checkpoint` saves, by `ModelConfig.remat`; "none" does not use it."""


class ModelCache(NamedTuple):
    """What has been read.

    cells: one cache per layer of the pattern, each stacked over the cells. rest: one per layer behind them.
    """

    cells: tuple[Any, ...]
    rest: tuple[Any, ...]


class Cell(nnx.Module):
    """One pass over a pattern: a block for each of `kinds`."""

    def __init__(self, config: ModelConfig, kinds: tuple[str, ...], *, rngs: nnx.Rngs):
        init = None if config.init_gain is None else xavier_uniform(config.init_gain)
        self.blocks = nnx.List(
            [
                Block(
                    config.mixer(kind),
                    config.mlp_hidden,
                    kernel_init=init,
                    dtype=jnp.dtype(config.dtype),
                    param_dtype=jnp.dtype(config.param_dtype),
                    rngs=rngs,
                )
                for kind in kinds
            ]
        )

    def init_cache(self, batch_size: int, max_length: int) -> tuple[Any, ...]:
        return tuple(block.init_cache(batch_size, max_length) for block in self.blocks)

    def __call__(
        self,
        x: Array,
        segment_ids: Array | None,
        positions: Array | None,
        caches: tuple[Any, ...] | None,
        zeros_last: bool = False,
    ) -> tuple[Array, tuple[Any, ...] | None]:
        after = []
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            x, cache = block(x, segment_ids=segment_ids, positions=positions, cache=cache, zeros_last=zeros_last)
            after.append(cache)
        return constrain(x, ("batch", None, None)), None if caches is None else tuple(after)


class LanguageModel(nnx.Module):
    """logits = norm(blocks(embedding[tokens])) W.

    The parameters of the repeating cell are stacked and `lax.scan` runs over them: program size and compile
    time do not grow with depth. Layers behind the last whole pattern are a cell of their own.

    Args:
        config: a `ModelConfig`.
        rngs: the stream `params` is used; the same seed gives the same parameters on any mesh.

    >>> config = ModelConfig(vocab_size=256, width=32, layers=2, mlp_hidden=64, key_dim=16, value_dim=16)
    >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 10), jnp.int32)).shape
    (1, 10, 256)
    >>> logits, cache = model(jnp.zeros((1, 10), jnp.int32), cache=model.init_cache(1, 11))
    >>> logits, cache = model(jnp.zeros((1, 1), jnp.int32), cache=cache)
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        param_dtype = jnp.dtype(config.param_dtype)
        types: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "param_dtype": param_dtype, "rngs": rngs}
        normal = nnx.initializers.normal(0.02)
        embedding = partitioned(normal, ("vocab", "embed"))
        self.embedding = nnx.Param(embedding(rngs.params(), (config.vocab_size, config.width), param_dtype))
        self.cells = _stacked(config, rngs) if config.cells else None
        self.rest = Cell(config, config.remainder, rngs=rngs) if config.remainder else None
        self.norm = RMSNorm(config.width, config.norm_eps, **types)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.width, config.vocab_size, axes=("embed", "vocab"), kernel_init=normal, **types)
        )

    def init_cache(self, batch_size: int, max_length: int) -> ModelCache:
        """An empty cache. Its size depends on `max_length` only where the pattern has "attention".

        Beyond `max_length` tokens "attention" drops the oldest keys and goes on with the last `max_length`.
        """
        cells: tuple[Any, ...] = ()
        if self.cells is not None:
            # The stacked cell makes the cache of one of its members; every cache starts at zero.
            one = jax.eval_shape(partial(self.cells.init_cache, batch_size, max_length))
            cells = jax.tree.map(lambda x: jnp.zeros((self.config.cells, *x.shape), x.dtype), one)
        rest = () if self.rest is None else self.rest.init_cache(batch_size, max_length)
        return ModelCache(cells, rest)

    def __call__(
        self,
        tokens: Any,
        *,
        segment_ids: Any = None,
        positions: Any = None,
        cache: ModelCache | None = None,
    ) -> Float[Array, "batch time vocab"] | tuple[Float[Array, "batch time vocab"], ModelCache]:
        """Logits in float32 (float64 for a float64 model), and with a cache the cache after these tokens.

        Args:
            tokens: integers [B, T] within 0 .. vocab_size - 1 (not checked under a transformation, where others
                read as the nearest); what stands in padding does not matter.
            segment_ids: integers [B, T]; 0 is padding (logits 0); segments do not see each other; the first
                continues `cache`.
            positions: integers [B, T], of the tokens in their segments, for attention; counted by default.
            cache: from `init_cache` or the call before. Any number of tokens then continues it, but where the
                pattern has "attention" at most `max_length` in one call, and beyond `max_length` in all the
                oldest keys are dropped.
        Raises:
            ValueError: an argument has another shape or dtype, or the cache another batch size.
        """
        x, after = self.features(tokens, segment_ids=segment_ids, positions=positions, cache=cache)
        logits = self.logits(x)
        return logits if after is None else (logits, after)

    def embed(self, tokens: Any, segment_ids: Any = None) -> Float[Array, "batch time width"]:
        """What the first block takes, in the model's dtype: rows of the embedding, zeros in padding."""
        valid = None if segment_ids is None else segment_ids != 0
        tokens = tokens if valid is None else jnp.where(valid, tokens, 0)
        x = lookup(self.embedding.get_value(), tokens, self.config.dtype, self.config.embedding_gradient)
        # `where` and not a product: whatever row 0 holds, NaN included, stays out of padding.
        return x if valid is None else jnp.where(valid[:, :, None], x, 0)

    def features(
        self,
        tokens: Any,
        *,
        segment_ids: Any = None,
        positions: Any = None,
        cache: ModelCache | None = None,
    ) -> tuple[Float[Array, "batch time width"], ModelCache | None]:
        """The normed hidden state behind the last block, what `logits` takes, and the new cache (or None)."""
        check_tokens(tokens, self.config.vocab_size, segment_ids)
        check_along(tokens.shape, segment_ids, positions)
        back = None
        if segment_ids is not None and cache is None:
            # Padding goes behind the tokens here, once, where it is a few integers: layers would do it with x.
            order, back = padding_last(segment_ids != 0)
            tokens, segment_ids, positions = reordered((tokens, segment_ids, positions), order)
        x = self.embed(tokens, segment_ids)
        x = constrain(x, ("batch", None, None))
        cells: Any = None if cache is None else cache.cells
        rest: Any = None if cache is None else cache.rest
        run = partial(_run, segment_ids, positions, back is not None)
        if self.cells is not None:
            graph, parameters = nnx.split(self.cells)
            # A scan keeps its turns apart by itself; what is computed again in the only one needs a guard.
            unroll = min(self.config.unroll, self.config.cells)
            alone = unroll > 1 or self.config.cells == 1
            body = self._remat(partial(run, graph), alone=alone)
            x, cells = lax.scan(body, x, (parameters, cells), unroll=unroll)
        if self.rest is not None:
            graph, parameters = nnx.split(self.rest)
            x, rest = self._remat(partial(run, graph), alone=True)(x, (parameters, rest))
        x = self.norm(x)
        if back is not None:
            # Zeros in padding stay zeros in every block, and with these zeros here no gradient comes to them.
            x = jnp.where((segment_ids != 0)[:, :, None], x, 0)
            x = reordered(x, back)
        return x, None if cache is None else ModelCache(cells, rest)

    def logits(self, x: Float[Array, "*lead width"]) -> Float[Array, "*lead vocab"]:
        """Scores of the next token, not rounded below float32."""
        dtype = wider(x.dtype, jnp.float32)
        if self.head is not None:
            return self.head(x, out_dtype=dtype)
        return product(x, self.embedding.get_value().astype(x.dtype), axis=1, out_dtype=dtype)

    def readout(self) -> tuple[Array, int] | None:
        """(W, its axis that `features` meet), where the model's value is features times W: a loss needs no more.

        The head's kernel [width, vocab] and 0, or the tied embedding [vocab, width] and 1. None where that is not
        all: a subclass with a `__call__` or `logits` of its own, or a head that is another layer or has a bias.
        """
        kind = type(self)
        if kind.__call__ is not LanguageModel.__call__ or kind.logits is not LanguageModel.logits:
            return None
        if self.head is None:
            return self.embedding.get_value(), 1
        plain = type(self.head) is Linear and self.head.bias is None
        return (self.head.kernel.get_value(), 0) if plain else None

    def _remat(self, body: Any, *, alone: bool) -> Any:
        """alone: it is not within a loop, and the compiler could join what is computed again with what was."""
        if self.config.remat == "none":
            return body
        return jax.checkpoint(body, policy=POLICIES[self.config.remat], prevent_cse=alone)


def _stacked(config: ModelConfig, rngs: nnx.Rngs) -> Cell:
    """The cells of the pattern as one module whose parameters have a leading axis, replicated on any mesh."""

    @nnx.split_rngs(splits=config.cells)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def make(rngs: nnx.Rngs) -> Cell:
        return Cell(config, config.pattern, rngs=rngs)

    return make(rngs)


def _run(
    segment_ids: Array | None, positions: Array | None, zeros_last: bool, graph: Any, x: Array, item: tuple[Any, Any]
) -> tuple[Array, Any]:
    parameters, caches = item
    return nnx.merge(graph, parameters)(x, segment_ids, positions, caches, zeros_last)
