"""Which targets count, and how much: in the loss of a readout, of a Learner, in microbatches and over devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from standin import ONE, StandIn, batch_of, small
from test_cross_entropy import AXES, draw, plain
from tolerances import FLOAT32, FLOAT64, SHARDED, assert_close

from qdelta_jax.models import LanguageModel
from qdelta_jax.training import MeshConfig
from qdelta_jax.training.cross_entropy import summed_cross_entropy
from qdelta_jax.training.data import held_out_batches
from qdelta_jax.training.documents import Documents
from qdelta_jax.training.train_step import Learner, make_mesh, shard_batch


def language_model(rngs):
    return LanguageModel(small(layers=1, pattern=("window",)), rngs=rngs)


BUILDS = pytest.mark.parametrize("build", [language_model, lambda rngs: StandIn(rngs=rngs)], ids=["chunks", "logits"])


def drawn(rows=4, length=9):
    """A packed batch and weights [B, T], some of them 0."""
    rng = np.random.default_rng(1)
    batch = batch_of(rng, rows, length)
    return batch, np.where(rng.random((rows, length)) < 0.4, 0, rng.uniform(0.1, 2, (rows, length))).astype(np.float32)


@cache
def learner_of(build, mesh_config, **options):
    """Its gradient, its evaluation, its state and its mesh: compiled once for every kind of weights."""
    mesh = make_mesh(mesh_config)
    with jax.set_mesh(mesh):
        learner = Learner(build, optax.sgd(0.1), mesh, **options)
        return jax.jit(learner.gradient), learner.evaluate, learner.init(0), mesh


def results(build, batch, mesh_config=ONE, **options):
    """Mean loss, gradient and tokens; summed loss and tokens of the evaluation."""
    gradient, evaluate, state, mesh = learner_of(build, mesh_config, **options)
    with jax.set_mesh(mesh):
        batch = shard_batch(batch, mesh)
        return jax.device_get((gradient(state, batch), evaluate(state, batch)))


@AXES
def test_weighted_readout(axis, x64):
    """Value and gradients of the sum by hand, in any chunk; what weighs 0 may be anything."""
    x, kernel, targets, counted = draw(axis, "float64")
    weights = jnp.where(counted, jnp.linspace(0.1, 3.0, counted.size).reshape(counted.shape), 0)

    def by_hand(x, kernel):
        return sum(
            weights[b, t] * plain(x[b : b + 1, t : t + 1], kernel, targets[b : b + 1, t : t + 1], True, axis)
            for b, t in zip(*np.nonzero(np.asarray(counted)), strict=True)
        )

    want = jax.jit(jax.value_and_grad(by_hand, (0, 1)))(x, kernel)
    dirty, wild = jnp.where(counted[..., None], x, jnp.nan), jnp.where(counted, targets, -5)
    for chunk in (1, 4, None):
        loss = partial(summed_cross_entropy, axis=axis, chunk=chunk)
        assert_close(jax.jit(jax.value_and_grad(loss, (0, 1)))(dirty, kernel, wild, weights), want, FLOAT64)
        assert_close(loss(dirty, kernel, wild, weights), want[0], FLOAT64)
    ones = summed_cross_entropy(x, kernel, targets, counted.astype(jnp.float32), axis=axis)
    assert ones == summed_cross_entropy(x, kernel, targets, counted, axis=axis)


@BUILDS
def test_weights_are_terms_left_out_by_hand(build):
    """Booleans count targets. Of numbers, loss and gradient are the weighted means of those of single targets."""
    batch, weights = drawn()
    get = partial(results, build, accumulation=2)
    counted = weights != 0
    (loss, _, tokens), (total, number) = get(batch._replace(weights=counted))
    assert tokens == number == np.sum(counted & (batch.segment_ids != 0))
    assert loss == pytest.approx(total / number, rel=FLOAT32)
    places = list(zip(*np.nonzero(counted & (batch.segment_ids != 0)), strict=True))[:3]
    # Together less than one target.
    factors = np.asarray([0.25, 0.05, 0.1], np.float32)
    single, together = np.zeros((3, *weights.shape), np.float32), np.zeros_like(weights)
    for i, place in enumerate(places):
        single[(i, *place)], together[place] = 1, factors[i]
    parts = [get(batch._replace(weights=one))[0] for one in single]
    assert [part[2] for part in parts] == [1, 1, 1]
    want = jax.tree.map(lambda *x: sum(f * y for f, y in zip(factors, x, strict=True)) / 0.4, *(p[:2] for p in parts))
    (loss, slope, tokens), _ = get(batch._replace(weights=together))
    assert tokens == pytest.approx(0.4)
    assert_close((loss, slope), want, 10 * FLOAT32)


@BUILDS
def test_no_weights_are_ones_and_padding_never_counts(build):
    batch, _ = drawn()
    plain_results = results(build, batch)
    padding = batch.segment_ids == 0
    assert padding.any()
    for weights in (
        np.ones(batch.tokens.shape, np.float32),
        np.ones(batch.tokens.shape, bool),
        np.where(padding, np.nan, 1).astype(np.float32),
        np.where(padding, 7, 1).astype(np.float16),
    ):
        jax.tree.map(np.testing.assert_array_equal, results(build, batch._replace(weights=weights)), plain_results)
    (loss, grads, tokens), _ = results(build, batch._replace(weights=np.zeros(batch.tokens.shape, bool)))
    assert loss == tokens == 0
    assert not any(x.any() for x in jax.tree.leaves(grads))


@BUILDS
def test_over_devices(build, cpu_devices):
    batch, weights = drawn(rows=8)
    batch = batch._replace(weights=weights)
    mesh = make_mesh(MeshConfig(2, 4))
    placed = shard_batch(batch, mesh)
    assert {shard.data.shape for shard in placed.weights.addressable_shards} == {(1, 9)}
    assert shard_batch(batch._replace(weights=None), mesh).weights is None
    assert_close(results(build, batch, MeshConfig(2, 4)), results(build, batch), SHARDED)


def test_other_weights_are_refused():
    batch, weights = drawn()
    for wrong, came in ((weights[:, :4], r"float32 \(4, 4\)"), (weights.astype(np.int32), r"int32 \(4, 9\)")):
        with pytest.raises(ValueError, match=rf"weights: got {came}, want bool or floating \[B,T\] = \(4, 9\)"):
            results(language_model, batch._replace(weights=wrong))


def test_rows_that_cannot_be_cut_are_refused():
    batch, _ = drawn()
    with pytest.raises(ValueError, match="batch: got 4 rows, want a multiple of accumulation = 3"):
        results(language_model, batch, accumulation=3)


def test_held_out_batches_have_none():
    documents = Documents([np.arange(20, dtype=np.int32), np.arange(5, dtype=np.int32)], 256, 0)
    for batch in held_out_batches(documents, length=8, rows=3):
        assert batch.weights is None
        assert batch.tokens.shape == batch.targets.shape == batch.segment_ids.shape == (3, 8)


@pytest.mark.parametrize("options", [{"loss_chunk": 0}, {"accumulation": 0}])
def test_counts_are_checked_before_anything_runs(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}: got {options[name]}, want an integer of at least 1"):
        Learner(language_model, optax.sgd(0.1), make_mesh(ONE), **options)
