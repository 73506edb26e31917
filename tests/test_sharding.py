"""Eight simulated devices compute what one does."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
import pytest
from standin import ONE, build, changed, small, small_run
from tolerances import SHARDED

from qdelta_jax.models.language_model import LanguageModel
from qdelta_jax.training import MeshConfig, OptimizerConfig, train
from qdelta_jax.training.data import Batch, batches
from qdelta_jax.training.documents import Documents
from qdelta_jax.training.optimizer import make_optimizer
from qdelta_jax.training.train_step import Learner, make_mesh, shard_batch

STEPS = 4


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path)


def run(mesh_config):
    """Initial parameters, the losses of a few steps, and where the parameters lie."""
    model = small(layers=2)
    mesh = make_mesh(mesh_config)
    text = np.frombuffer(b"the cat and the hat and the rat sat on the mat. " * 60, np.uint8)
    data = batches(Documents([text, text[:20], text[5:30]], 256, 0), length=32, rows=8, seed=0)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1, learning_rate=5e-3), 10)
    with jax.set_mesh(mesh):
        # On eight devices two chunks of the 32 tokens that each has, on one device thirteen of all 256.
        learner = Learner(lambda rngs: LanguageModel(model, rngs=rngs), optimizer, mesh, loss_chunk=20)
        state = learner.init(0)
        first = jax.tree.map(np.asarray, state.params)
        losses = []
        for _ in range(STEPS):
            state, metrics = learner.update(state, shard_batch(next(data), mesh))
            losses.append(float(metrics.loss))
    return first, losses, state


def test_eight_devices_give_the_result_of_one(cpu_devices):
    shape = (2, 4)
    alone, (first, losses, state) = run(ONE), run(MeshConfig(*shape))
    for a, b in zip(jax.tree.leaves(alone[0]), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(losses, alone[1], rtol=SHARDED)
    assert losses[-1] < losses[0]
    # Parameters and their moments really are in parts, and an update leaves them so.
    for tree in (state.params, optax.tree_utils.tree_get(state.opt_state, "mu")):
        embedding = tree["embedding"]
        assert embedding.shape == (257, 16)
        assert embedding.addressable_shards[0].data.shape == (257, 16 // shape[1])
        assert len(embedding.sharding.device_set) == 8


def test_batch_is_spread_over_both_axes(cpu_devices):
    mesh = make_mesh(MeshConfig(4, 2))
    tokens = np.arange(48, dtype=np.int32).reshape(16, 3)
    batch = shard_batch(Batch(tokens, tokens, tokens), mesh)
    assert {shard.data.shape for shard in batch.tokens.addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(batch.tokens, tokens)
    with pytest.raises(ValueError, match="batch_size: got 12, want a multiple of the 8 devices"):
        shard_batch(Batch(tokens[:12], tokens[:12], tokens[:12]), mesh)


def test_a_checkpoint_moves_to_another_mesh(config, cpu_devices):
    config = changed(config, "data", batch_size=8)
    straight = train(config, build)
    moved = changed(config, "run", directory=config.run.directory + "_moved")
    train(changed(moved, "run", stop_at=5), build)
    result = train(replace(moved, mesh=MeshConfig(data=2, fsdp=4)), partial(build))
    assert result.step == 10
    for name, value in straight.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=SHARDED), name
