"""The language model on packed and padded rows: what a segment or padding may reach."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from small_models import VOCAB, build, draw, every_pattern, run
from tolerances import FLOAT32, assert_close


@every_pattern
def test_packed_is_separate(pattern):
    """Segments of 1, 17, 2 and 9 tokens, padding before, between and inside, against each in its own row."""
    model = build(pattern)
    ids = np.repeat([0, 4, 1, 0, 1, 2, 0, 3], [2, 1, 6, 3, 11, 2, 1, 9])
    tokens = np.array(draw((1, len(ids))))
    packed = run(model, jnp.array(tokens), jnp.array(ids)[None])[0]
    alone = np.zeros((4, 17), np.int32)
    for row, segment in enumerate([4, 1, 2, 3]):
        inside = tokens[0, ids == segment]
        alone[row, : len(inside)] = inside
    separate = run(model, jnp.array(alone))
    for row, segment in enumerate([4, 1, 2, 3]):
        got = packed[ids == segment]
        assert_close(got, separate[row, : len(got)], FLOAT32, f"segment {segment}")
    assert np.all(np.asarray(packed)[ids == 0] == 0)


@every_pattern
def test_layers_move_no_padding(pattern):
    """A model brings padding behind its tokens before its first layer: more layers have no more of that."""
    tokens = draw((2, 12))
    ids = jnp.array([[0, 0, 1, 1, 1, 0, 1, 1, 2, 2, 2, 0], [3] * 12])

    def count(layers):
        model = build(pattern * 3, layers=layers)  # not a scan, which has one body
        return str(jax.make_jaxpr(lambda t: model(t, segment_ids=ids))(tokens)).count("unique_indices=True")

    assert count(4) == count(2) > 0


@every_pattern
def test_a_nan_gradient_of_padding_reaches_nothing(pattern):
    model = build(pattern)
    ids = jnp.array([[1] * 5 + [0, 0, 1]])

    @nnx.jit
    def gradients(model, poison):
        def loss(model):
            x, _ = model.features(draw((1, 8)), segment_ids=ids)
            return jnp.sum(jnp.sin(x) * jnp.where((ids == 0)[:, :, None], poison, 1.0))

        return jax.tree.leaves(nnx.grad(loss)(model))

    assert_close(gradients(model, jnp.nan), gradients(model, 0.0), 0.0)


@every_pattern
def test_nan_in_padding_reaches_nothing(pattern):
    """A NaN row of the embedding that only padding looks up: same logits and gradients as without."""
    model = build(pattern)
    tokens = draw((2, 12)).clip(1)
    ids = jnp.array([[0, 0, 1, 1, 1, 0, 1, 1, 2, 2, 2, 0], [3] * 12])
    dirty = nnx.clone(model)
    dirty.embedding.set_value(dirty.embedding.get_value().at[0].set(jnp.nan))

    @nnx.jit
    def value(model, tokens):
        def loss(m):
            return jnp.sum(jnp.sin(m(tokens, segment_ids=ids)))

        return nnx.value_and_grad(loss)(model)

    want = value(model, tokens)
    for padded, other in [(0, dirty), (-5, model), (VOCAB + 7, model)]:
        got = value(other, jnp.where(ids == 0, padded, tokens))
        assert_close(jax.tree.leaves(got), jax.tree.leaves(want), 0.0)
