"""Which parameters decay, the learning rate, and the gradient of a batch in parts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from standin import ONE, StandIn, batch_of, small
from tolerances import SAME, assert_close, assert_same_numbers

from qdelta_jax.models.language_model import LanguageModel
from qdelta_jax.training import OptimizerConfig
from qdelta_jax.training.optimizer import decay_mask, make_optimizer, schedule
from qdelta_jax.training.train_step import Learner, make_mesh, shard_batch


@pytest.mark.parametrize("pattern", [("rule",), ("rule", "window", "attention")])
def test_matrices_decay_and_nothing_else(pattern):
    config = small(pattern=pattern, layers=2 * len(pattern) + 1, gate_low_rank=True, gate_bias=True)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    mask = {
        "/".join(str(p.key) for p in path): on
        for path, on in jax.tree_util.tree_flatten_with_path(decay_mask(params))[0]
    }
    last = {name: name.rsplit("/", 1)[-1] for name in mask}
    assert {last[n] for n in mask if mask[n]} <= {"kernel", "embedding"}
    assert {last[n] for n in mask if not mask[n]} >= {"scale", "bias", "A_log", "dt_bias"}
    assert not any(on for name, on in mask.items() if last[name] in ("scale", "bias", "A_log", "dt_bias"))


def test_weight_decay_moves_only_what_decays():
    params = {"norm": {"scale": jnp.ones((2, 4))}, "out": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(config, 10)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new["out"]["kernel"], 1 - 0.1 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(new["out"]["bias"], 1)
    np.testing.assert_array_equal(new["norm"]["scale"], 1)


def test_gradient_is_clipped_by_its_global_norm():
    grads = {"a": jnp.full((3, 3), 100.0), "b": jnp.full(3, -50.0)}
    optimizer = make_optimizer(OptimizerConfig(clip_norm=0.5, warmup_steps=0), 10)
    with jax.numpy_dtype_promotion("standard"):
        _, state = optimizer.update(grads, optimizer.init(grads), grads)
    first_moment = optax.tree_utils.tree_get(state, "mu")
    # mu = (1 - b1) g after the first step.
    assert float(optax.tree_utils.tree_norm(first_moment)) == pytest.approx(0.1 * 0.5, rel=1e-5)


def test_schedule_warms_up_and_comes_down():
    rate = schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.25), 20)
    values = [float(rate(i)) for i in range(24)]
    np.testing.assert_allclose(values[:5], [0, 0.5, 1, 1.5, 2], rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(values[4:21]))
    np.testing.assert_allclose(values[20:], 0.5, rtol=1e-6)
    assert float(schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=0), 20)(0)) == 2.0
    with pytest.raises(ValueError, match="warmup_steps: got 20, want less than"):
        schedule(OptimizerConfig(warmup_steps=20), 20)
    by_default = OptimizerConfig(learning_rate=2.0)
    assert float(schedule(by_default, 6)(0)) == 2.0
    assert float(schedule(by_default, 100)(10)) == 2.0
    assert float(schedule(by_default, 10_000)(50)) == 2.0


def test_accumulated_gradient_is_that_of_the_whole_batch():
    mesh = make_mesh(ONE)
    batch = batch_of(np.random.default_rng(0), 8, 24)
    # Microbatches of very different weight: the mean of their means would be wrong.
    batch.segment_ids[::4] = 0
    batch.segment_ids[::4, 0] = 1
    results = []
    with jax.set_mesh(mesh):
        for parts in (1, 4):
            learner = Learner(lambda rngs: StandIn(rngs=rngs), optax.sgd(0.1), mesh, parts)
            results.append(jax.jit(learner.gradient)(learner.init(0), shard_batch(batch, mesh)))
    assert_close(results[1], results[0], SAME)
    assert float(results[0][2]) == (batch.segment_ids != 0).sum()


def test_bfloat16_computation_keeps_float32_parameters():
    config = small(dtype="bfloat16", layers=1)
    mesh = make_mesh(ONE)
    with jax.set_mesh(mesh):
        learner = Learner(
            lambda rngs: LanguageModel(config, rngs=rngs),
            make_optimizer(OptimizerConfig(warmup_steps=0), 10),
            mesh,
        )
        state = learner.init(0)
        batch = shard_batch(batch_of(np.random.default_rng(0), 2, 16), mesh)
        losses = []
        for _ in range(4):
            state, metrics = learner.update(state, batch)
            losses.append(float(metrics.loss))
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert losses[-1] < losses[0] - 0.05, losses
    assert int(state.skipped) == 0
    assert int(state.step) == 4


def test_padding_weighs_nothing():
    mesh = make_mesh(ONE)
    rng = np.random.default_rng(0)
    batch = batch_of(rng, 4, 16)
    noise = batch._replace(
        tokens=np.where(batch.segment_ids == 0, 3, batch.tokens),
        targets=np.where(batch.segment_ids == 0, 5, batch.targets),
    )
    assert (noise.targets != batch.targets).any()
    with jax.set_mesh(mesh):
        learner = Learner(lambda rngs: StandIn(rngs=rngs), optax.sgd(0.1), mesh)
        state = learner.init(0)
        a, b = (jax.jit(learner.gradient)(state, shard_batch(x, mesh)) for x in (batch, noise))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_same_numbers(x, y)
