"""The loop and the command line: updates that are left out, signals, and refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from standin import ONE, Poisoned, StandIn, batch_of, build, changed, losses, small_run
from tolerances import assert_same_numbers

from experiments import train as command
from experiments.trigram import Trigram
from qdelta_jax.training import (
    Checkpoints,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    train,
)
from qdelta_jax.training.metrics import read_metrics
from qdelta_jax.training.train_step import Learner, make_mesh, shard_batch
from qdelta_jax.training.vocabulary import load_vocabulary

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path)


def test_config_round_trip_and_unknown_fields():
    made = TrainConfig(data=DataConfig(files=("a.txt", "b.txt")), optimizer=OptimizerConfig(accumulation=4))
    values = made.to_dict()
    assert TrainConfig.from_dict(values) == made
    for part in ("model", "data", "optimizer", "mesh", "run"):
        with pytest.raises(ValueError, match=r"unknown field.*nonsense"):
            TrainConfig.from_dict({**values, part: {**values[part], "nonsense": 1}})
    with pytest.raises(ValueError, match=r"TrainConfig: unknown field nonsense"):
        TrainConfig.from_dict({**values, "nonsense": {}})


def unannotated(kind, **fields):
    """As `kind(**fields)`, past the annotations that conftest.py has checked before __post_init__ is asked."""
    made = object.__new__(kind)
    vars(made).update({**vars(kind()), **fields})
    made.__post_init__()
    return made


def test_numpy_values_of_a_config_become_its_own():
    made = (
        unannotated(OptimizerConfig, b1=np.float32(0.5), accumulation=np.int64(2), warmup_steps=np.int8(0)),
        unannotated(RunConfig, progress=np.bool_(False), seed=np.uint32(7)),
    )
    assert json.loads(json.dumps([vars(x) for x in made]))[1]["seed"] == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig(sequence_length=0), "sequence_length: got 0, want above 0"),
        (lambda: OptimizerConfig(clip_norm=-1.0), "clip_norm: got -1.0"),
        (lambda: RunConfig(steps=0), "steps: got 0"),
        (lambda: MeshConfig(data=-1, fsdp=-1), "at most one of them -1"),
        (
            lambda: TrainConfig(optimizer=OptimizerConfig(accumulation=3)),
            "accumulation: got 3, want a divisor",
        ),
        (lambda: OptimizerConfig(b1=1.0), "b1: got 1.0, want 0 or more and below 1"),
        (lambda: OptimizerConfig(b2=-0.1), "b2: got -0.1"),
        (lambda: OptimizerConfig(learning_rate=float("inf")), "learning_rate: got inf, want a finite"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "learning_rate: got nan"),
        (lambda: OptimizerConfig(eps=0.0), "eps: got 0.0"),
        (lambda: OptimizerConfig(final_fraction=1.5), "final_fraction: got 1.5, want 0 to 1"),
        (lambda: OptimizerConfig(weight_decay=float("inf")), "weight_decay: got inf"),
        (lambda: OptimizerConfig(warmup_steps=-1), "warmup_steps: got -1"),
        (
            lambda: unannotated(OptimizerConfig, warmup_steps=1.5),
            r"warmup_steps: got 1.5 \(float\), want an integer or None",
        ),
        (lambda: RunConfig(steps=5, stop_at=6), "stop_at: got 6, want at most steps = 5"),
        (lambda: unannotated(RunConfig, steps=True), "steps: got True"),
        (lambda: unannotated(RunConfig, steps="5"), r"steps: got '5' \(str\), want an integer"),
        (lambda: unannotated(RunConfig, resume="maybe"), "resume: got 'maybe'.*want one of 'auto', 'must', 'never'"),
        (lambda: unannotated(RunConfig, directory=3), "directory: got 3.*want a string"),
        (lambda: unannotated(MeshConfig, data=1.0), "data: got 1.0"),
        (lambda: unannotated(DataConfig, files="book.txt"), "files: got a string, want a tuple of paths"),
        (lambda: unannotated(DataConfig, files=(3,)), "files: got .*want a tuple of paths"),
        (lambda: unannotated(TrainConfig, model=3), "model: got 3.*want a ModelConfig"),
        (lambda: TrainConfig.from_dict({"model": 3}), "model: got 3, want a dict"),
        (lambda: make_mesh(MeshConfig(data=-1, fsdp=3)), "want a product of 8"),
        (lambda: make_mesh(MeshConfig(data=16, fsdp=1)), "want a product of 8"),
    ],
)
def test_bad_configs_are_named(make, message, cpu_devices):
    with pytest.raises(ValueError, match=message):
        make()


def test_one_bad_batch_is_left_out_and_counted():
    mesh = make_mesh(ONE)
    good = batch_of(np.random.default_rng(0), 2, 8)
    bad = good._replace(tokens=np.zeros_like(good.tokens))
    with jax.set_mesh(mesh):
        learner = Learner(lambda rngs: Poisoned(rngs=rngs), optax.adam(0.01), mesh)
        state = learner.init(0)
        for expected in ((1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 2, 0)):
            bad_now = expected[2] > 0
            before = jax.tree.map(np.asarray, (state.params, state.opt_state))
            state, metrics = learner.update(state, shard_batch(bad if bad_now else good, mesh))
            same = all(
                np.array_equal(a, b)
                for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state)), strict=True)
            )
            assert same == bad_now
            assert np.isfinite(float(metrics.loss)) != bad_now
            assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == expected
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_a_run_of_bad_batches_ends_with_a_message(config):
    class Broken(StandIn):
        def __call__(self, tokens, *, segment_ids=None):
            return super().__call__(tokens) * np.float32(np.nan)

    config = changed(config, "run", max_skipped=3, save_every=100)
    with pytest.raises(FloatingPointError, match=r"3 updates in a row up to step 3 .*run.max_skipped = 3"):
        train(config, lambda rngs: Broken(rngs=rngs))
    assert [r["loss"] for r in read_metrics(config.run.directory)] == [None] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(config, tmp_path, monkeypatch, number):
    from qdelta_jax.training import loop

    whole = train(config, build)
    parts = changed(config, "run", directory=str(tmp_path / "parts"))
    shard = loop.shard_batch
    calls = []

    def interrupted(batch, mesh):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return shard(batch, mesh)

    before = signal.getsignal(number)
    monkeypatch.setattr(loop, "shard_batch", interrupted)
    result = train(parts, build)
    assert result.interrupted
    assert result.step == 3
    assert len(calls) == 3
    assert signal.getsignal(number) is before
    assert Checkpoints(tmp_path / "parts" / "checkpoints").latest() == 3
    finished = train(parts, build)
    assert not finished.interrupted
    assert_same_numbers(list(finished.metrics.values()), list(whole.metrics.values()))
    assert_same_numbers(losses(parts), losses(config))


def test_command_line_in_its_own_process_stops_at_sigterm(tmp_path):
    """The whole path: text file, language model, signal, clean exit, and the same command again."""
    text = tmp_path / "text.txt"
    text.write_text("the cat and the hat and the rat sat on the mat. " * 100)
    sizes = "--model.width 16 --model.layers 1 --model.heads 2 --model.key-dim 8 --model.value-dim 8"
    arguments = f"{sizes} --model.mlp-hidden 16 --data.files {text} --data.sequence-length 16 --data.batch-size 8"
    run = f"--run.directory {tmp_path / 'run'} --run.log-every 1 --optimizer.warmup-steps 1 --run.no-progress"
    run += " --mesh.data 1 --mesh.fsdp 1"
    arguments = [sys.executable, "-m", "experiments.train", *arguments.split(), *run.split()]
    process = subprocess.Popen(
        [*arguments, "--run.steps", "1000000"],
        cwd=ROOT,
        # As conftest.py does: compile fast, run slowly.
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not losses_of(tmp_path / "run") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "interrupted at step" in errors
    assert "everything in" in out
    step = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert step is not None
    assert len(losses_of(tmp_path / "run")) in (step, step - 1)


def losses_of(directory):
    return [r for r in read_metrics(directory) if "loss" in r]


def test_command_line_refuses_what_it_does_not_know(tmp_path, capsys):
    refused = {
        "nonsense": ["--data.nonsense", "1"],
        "enormous": ["--size", "enormous"],
        "maybe": ["--run.resume", "maybe"],
        "batch_size: got 0": ["--data.batch-size", "0"],
    }
    for word, arguments in refused.items():
        with pytest.raises(SystemExit) as failure:
            command.main(arguments)
        assert failure.value.code == 2
        assert word in capsys.readouterr().err
    run = ["--run.directory", str(tmp_path), "--data.files", str(tmp_path / "nowhere.txt")]
    with pytest.raises(SystemExit, match=r"nowhere\.txt does not exist"):
        command.main(run)
    with pytest.raises(SystemExit) as helped:
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert helped.value.code == 0
    for option in (
        "--data.files",
        "--optimizer.learning-rate",
        "--mesh.fsdp",
        "--run.seed",
        "--model.rule",
        "--size",
        "q_delta_340m",
    ):
        assert option in shown


def test_model_must_know_the_vocabulary(config):
    small_vocabulary = changed(config, "model", vocab_size=200)
    with pytest.raises(ValueError, match=r"model.vocab_size: got 200, want at least the vocabulary's 257"):
        train(small_vocabulary)


def test_bpe_run_resumes_with_its_own_vocabulary(config):
    config = changed(config, "data", vocabulary="bpe", bpe_size=260)
    config = replace(config, model=replace(config.model, vocab_size=260))

    def wide(rngs):
        return StandIn(260, rngs=rngs)

    first = train(changed(config, "run", stop_at=4), wide)
    assert (Path(config.run.directory) / "tokenizer.json").is_file()
    assert train(config, wide).step == 10
    assert first.step == 4


def test_a_refused_bpe_run_leaves_no_vocabulary(config):
    stored = Path(config.run.directory) / "tokenizer.json"
    narrow = changed(config, "data", vocabulary="bpe", bpe_size=265)
    with pytest.raises(ValueError, match=r"got 257, want at least .* pass --model.vocab-size 265 or more"):
        train(narrow)
    assert not stored.exists()
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text("of a run without a checkpoint")
    small = changed(changed(narrow, "data", bpe_size=257), "run", stop_at=1)
    assert train(small, build).step == 1
    assert load_vocabulary(stored).size == 257


def test_a_held_out_loss_that_is_not_finite_is_an_error(config, monkeypatch):
    numbers = {"held_out/loss": float("nan"), "held_out/perplexity": float("nan")}
    monkeypatch.setattr("qdelta_jax.training.loop.evaluate", lambda *_: numbers)
    with pytest.raises(FloatingPointError, match="held-out loss at step 1 is nan, want a finite number"):
        train(changed(config, "run", stop_at=1), build)


def test_trigram_is_a_distribution_and_knows_its_text():
    text = b"the cat and the hat and the rat sat on the mat. " * 60
    model = Trigram(text)
    parts, bucket = model._parts(text[:500])
    assert np.all(parts >= 0)
    assert np.allclose(model.weights[np.unique(bucket)].sum(axis=1), 1)
    # Over all third bytes of one context the probabilities sum to 1.
    every = b"".join(b"th" + bytes([c]) for c in range(256))
    parts, bucket = model._parts(every)
    total = np.sum(model.weights[bucket] * parts, axis=1)[::3].sum()
    assert total == pytest.approx(1, abs=1e-9)
    assert model.bits_per_byte(text) < 1 < model.bits_per_byte(bytes(range(256)))
