"""What one layer of a model hands to the recurrence."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from qdelta_jax.layers.inputs import check_along, check_tokens
from qdelta_jax.layers.mixer import MixerInputs
from qdelta_jax.models.language_model import LanguageModel

__all__ = ["capture"]


def capture(
    model: LanguageModel, tokens: Any, layer: int, *, segment_ids: Any = None, positions: Any = None
) -> MixerInputs:
    """q, k, v, gates of layer n: those of project(norm(blocks_{n-1}(.. blocks_0(embedding[tokens])))).

    The rule is `model.config.rule`; q and k are normalised already, and the value holds the step of a rule like
    mamba2.

    Args:
        model: a `LanguageModel`.
        tokens: integers [B, T].
        layer: its index, from 0; negative ones count from the end. It must be a "rule" of the pattern.
        segment_ids, positions: as in a call of the model.
    Returns:
        `MixerInputs`: q, k [B, T, H, K] and v [B, T, HV, V] in the model's dtype, gates in float32 or wider.
    Raises:
        ValueError: there is no such layer, it is attention, or an argument does not fit.

    >>> import qdelta_jax as qd
    >>> from qdelta_jax.dynamics import erase_gain
    >>> from qdelta_jax.models import ModelConfig
    >>> config = ModelConfig(vocab_size=16, width=8, layers=2, mlp_hidden=8, heads=2, key_dim=4, value_dim=4)
    >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
    >>> q, k, v, gates = capture(model, jnp.zeros((1, 5), jnp.int32), 1)
    >>> erase_gain(q, k, v, model.config.rule, gates).shape
    (1, 5, 2)
    """
    config = model.config
    index = _index(layer, config.layers)
    kind = config.pattern[index % len(config.pattern)]
    if kind != "rule":
        raise ValueError(f"layer: got {layer}, which is {kind!r} in the pattern {config.pattern}, want a 'rule'")
    check_tokens(tokens, config.vocab_size, segment_ids)
    check_along(tokens.shape, segment_ids, positions)
    graph, parameters = nnx.split(model)
    return _capture(parameters, jnp.asarray(tokens), segment_ids, positions, graph=graph, layer=index)


@partial(jax.jit, static_argnames=("graph", "layer"))
def _capture(
    parameters: Any, tokens: Array, segment_ids: Array | None, positions: Array | None, *, graph: Any, layer: int
) -> MixerInputs:
    model = nnx.merge(graph, parameters)
    x = model.embed(tokens, segment_ids)
    cell, before = divmod(layer, len(model.config.pattern))
    here: Any = model.rest
    if model.cells is not None:
        graph_of_one, stacked = nnx.split(model.cells)

        def body(x: Array, of_one: Any) -> tuple[Array, None]:
            return nnx.merge(graph_of_one, of_one)(x, segment_ids, positions, None)[0], None

        x, _ = lax.scan(body, x, jax.tree.map(lambda p: p[:cell], stacked))
        if cell < model.config.cells:
            here = nnx.merge(graph_of_one, jax.tree.map(lambda p: p[cell], stacked))
    for block in here.blocks[:before]:
        x, _ = block(x, segment_ids=segment_ids, positions=positions)
    block = here.blocks[before]
    return block.mixer.project(block.mixer_norm(x), segment_ids=segment_ids)


def _index(layer: Any, layers: int) -> int:
    if isinstance(layer, bool) or not isinstance(layer, int) or not -layers <= layer < layers:
        raise ValueError(f"layer: got {layer!r}, want an integer within {-layers} .. {layers - 1}")
    return layer % layers
