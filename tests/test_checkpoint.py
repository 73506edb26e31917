"""Stopping and going on: bit for bit, or not at all."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from standin import StandIn, build, changed, losses, small_run
from tolerances import assert_same_numbers

from qdelta_jax.training import (
    Checkpoints,
    load_model,
    train,
)
from qdelta_jax.training.checkpoint import FORMAT_VERSION


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path)


def stored(config, step=10):
    """Every array of a checkpoint, as NumPy."""
    checkpoints = Checkpoints(f"{config.run.directory}/checkpoints")
    try:
        names = ("model", "optimizer")
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore() for name in names})
        out = checkpoints.manager.restore(step, args=args)
        return [np.asarray(x) for name in names for x in jax.tree.leaves(out[name])]
    finally:
        checkpoints.close()


def assert_same_run(config, other):
    for a, b in zip(stored(config), stored(other), strict=True):
        assert_same_numbers(a, b)
    for (step, a), (other_step, b) in zip(losses(config), losses(other), strict=True):
        assert step == other_step
        assert_same_numbers(a, b)
    assert [s for s, _ in losses(config)] == list(range(1, 11))


def test_resumed_run_is_the_straight_run_bit_for_bit(config, tmp_path):
    """The language model itself: 10 steps, against 3 and a fresh start for the other 7."""
    whole = train(config)
    parts = changed(config, "run", directory=str(tmp_path / "parts"))
    first = train(changed(parts, "run", stop_at=3))
    assert first.step == 3
    second = train(changed(parts, "run", resume="must"))
    assert whole.step == second.step == 10
    assert_same_run(config, parts)
    assert whole.metrics.keys() == second.metrics.keys()
    for name, value in whole.metrics.items():
        assert_same_numbers(second.metrics[name], value)
    # What the checkpoint holds is the model that was evaluated, and works outside of training.
    model, restored, vocabulary = load_model(config.run.directory)
    assert restored == config
    assert vocabulary.size == 257
    assert nnx.jit(lambda model, x: model(x))(model, jnp.zeros((1, 5), jnp.int32)).shape == (1, 5, 257)
    # Continuing a finished run changes nothing.
    again = train(config)
    assert_same_numbers(list(again.metrics.values()), list(whole.metrics.values()))
    assert again.metrics == whole.metrics
    assert_same_run(config, parts)


def test_resume_after_a_crash_between_checkpoints(config, tmp_path):
    """Steps after the last checkpoint are made again, and written once."""
    train(config, build)
    parts = changed(config, "run", directory=str(tmp_path / "parts"))
    train(changed(parts, "run", stop_at=7), build)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "7")
    assert [s for s, _ in losses(parts)] == list(range(1, 8))
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    train(changed(parts, "run", resume="must"), build)
    assert_same_run(config, parts)


def test_accumulation_and_a_longer_run_may_change(config):
    train(changed(config, "run", stop_at=4), build)
    longer = changed(changed(config, "run", steps=12), "optimizer", accumulation=2, learning_rate=3e-3)
    # And how the model is computed.
    assert train(changed(longer, "model", remat="full", unroll=2), build).step == 12


def test_refuses_another_model_data_or_seed(config):
    train(changed(config, "run", stop_at=4), build)
    other = changed(changed(config, "model", width=32), "data", sequence_length=16)
    with pytest.raises(ValueError, match=r"model.width: 16, now 32; data.sequence_length: 32, now 16"):
        train(other, build)
    with pytest.raises(ValueError, match=r"run.seed: 0, now 1"):
        train(changed(config, "run", seed=1), build)
    # And the refusal harmed nothing.
    assert train(config, build).step == 10


def test_refuses_another_format_version(config):
    train(changed(config, "run", stop_at=4), build)
    (about,) = [p for p in (config_dir(config) / "4" / "about").iterdir() if p.is_file() and "metadata" in p.name]
    content = json.loads(about.read_text())
    assert content["format_version"] == FORMAT_VERSION
    about.write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(ValueError, match=rf"format version 99, want {FORMAT_VERSION}"):
        train(config, build)
    with pytest.raises(ValueError, match="format version 99"):
        load_model(config.run.directory)


def config_dir(config):
    return Path(config.run.directory) / "checkpoints"


def test_refuses_arrays_of_another_shape(config):
    """Whatever the config says, the arrays must fit."""
    train(changed(config, "run", stop_at=4), build)
    with pytest.raises(ValueError, match="cannot be read"):
        train(config, lambda rngs: StandIn(width=24, rngs=rngs))


def test_missing_checkpoints(config, tmp_path):
    with pytest.raises(ValueError, match=r"has none, want one"):
        train(changed(config, "run", resume="must"), build)
    with pytest.raises(ValueError, match="not the directory of a run"):
        load_model(tmp_path / "nowhere")
    train(changed(config, "run", stop_at=4), build)
    with pytest.raises(ValueError, match=r"has the steps \[4\], want 3"):
        load_model(config.run.directory, step=3)
    with pytest.raises(ValueError, match=r"'never', but .* has step 4"):
        train(changed(config, "run", resume="never"), build)


def test_interrupted_write_is_no_checkpoint(config):
    train(changed(config, "run", stop_at=4), build)
    directory = config_dir(config)
    # What a write that was killed leaves behind.
    shutil.copytree(directory / "4", directory / "8.orbax-checkpoint-tmp")
    assert Checkpoints(directory).latest() == 4
    assert train(config, build).step == 10


def test_damaged_checkpoint_is_refused(config):
    train(changed(config, "run", stop_at=4), build)
    for path in (config_dir(config) / "4" / "model").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        train(config, build)


def test_only_the_newest_are_kept(config):
    train(changed(config, "run", save_every=2, keep=2), build)
    assert sorted(p.name for p in config_dir(config).iterdir() if p.name.isdigit()) == ["10", "8"]
