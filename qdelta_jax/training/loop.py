"""`train`: the whole of a run, from files to checkpoints, the same whether it starts or continues."""

import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import grain
import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from qdelta_jax.models.language_model import LanguageModel
from qdelta_jax.training.checkpoint import Checkpoints, has_checkpoint
from qdelta_jax.training.config import RunConfig, TrainConfig
from qdelta_jax.training.data import Batch, batches, held_out_batches
from qdelta_jax.training.documents import Corpus, load_corpus
from qdelta_jax.training.metrics import MetricsWriter, ProgressBar, held_out_metrics
from qdelta_jax.training.optimizer import make_optimizer, schedule
from qdelta_jax.training.train_step import Learner, Metrics, TrainState, make_mesh, shard_batch
from qdelta_jax.training.vocabulary import BpeVocabulary

__all__ = ["TrainResult", "evaluate", "train"]

Build = Callable[[nnx.Rngs], nnx.Module]


@dataclass(frozen=True)
class TrainResult:
    """directory: of the run. step: reached. metrics: held-out numbers there. interrupted: by a signal.

    skipped: updates left out for a loss or gradient that was not finite. seconds: in the loop of this call.
    """

    directory: Path
    step: int
    metrics: dict[str, float]
    interrupted: bool
    skipped: int
    seconds: float


class StopSignal:
    """Inside `with`, SIGINT and SIGTERM only set `received`; a second one has its usual effect."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, self._before[number])

    def agreed(self, now: bool) -> bool:
        """Whether any process was told to stop; several processes ask each other only `now`."""
        if jax.process_count() == 1:
            return self.received
        return now and bool(np.any(multihost_utils.process_allgather(np.asarray(self.received))))


def train(config: TrainConfig, build: Build | None = None) -> TrainResult:
    """Trains `config.model` on `config.data`, from the start or from a checkpoint of `config.run`.

    Args:
        config: the run.
        build: makes the model from its random streams; `LanguageModel(config.model, ..)` by default.
    Raises:
        ValueError: the data, the vocabulary, the mesh or a checkpoint does not fit the config.
        FloatingPointError: `run.max_skipped` updates in a row had a loss or gradient that was not finite, or
            the held-out loss at the end is not.
    """
    build = build or partial(_language_model, config)
    directory, run = Path(config.run.directory), config.run
    # Without a checkpoint, a tokenizer.json there is of a run that never came to anything.
    corpus = load_corpus(config.data, run.seed, directory if has_checkpoint(directory) else None)
    if corpus.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size: got {config.model.vocab_size}, want at least the vocabulary's {corpus.vocab_size}; "
            f"pass --model.vocab-size {corpus.vocab_size} or more, at least the vocabulary's size"
        )
    _keep_vocabulary(config, corpus, directory)
    mesh = make_mesh(config.mesh)
    process = (jax.process_index(), jax.process_count())
    data = batches(
        corpus.train,
        length=config.data.sequence_length,
        rows=_per_process(config.data.batch_size),
        seed=run.seed,
        process=process,
    )
    optimizer = make_optimizer(config.optimizer, run.steps)
    checkpoints = Checkpoints(directory / "checkpoints", run.keep)
    with closing(checkpoints), jax.set_mesh(mesh):
        learner = Learner(build, optimizer, mesh, config.optimizer.accumulation, config.optimizer.loss_chunk)
        state = _start(learner, checkpoints, data, config)
        writer = MetricsWriter(directory, after=int(state.step), tensorboard=run.tensorboard)
        with closing(writer):
            held_out = _held_out(config, corpus, learner)
            parts = Parts(config, learner, data, held_out, corpus.held_out.num_bytes, checkpoints, writer)
            return _loop(parts, state)


@dataclass(frozen=True)
class Parts:
    """What the loop works with; `num_bytes` are those of the held-out text."""

    config: TrainConfig
    learner: Learner
    data: grain.DatasetIterator
    held_out: list[Batch]
    num_bytes: int
    checkpoints: Checkpoints
    writer: MetricsWriter

    def evaluate(self, state: TrainState) -> dict[str, float]:
        return evaluate(self.learner, state, self.held_out, self.num_bytes)


def _language_model(config: TrainConfig, rngs: nnx.Rngs) -> nnx.Module:
    return LanguageModel(config.model, rngs=rngs)


def _keep_vocabulary(config: TrainConfig, corpus: Corpus, directory: Path) -> None:
    """Stores a "bpe" vocabulary, unless it is the one that the checkpoints there belong to."""
    path = directory / "tokenizer.json"
    stored = path.is_file() and has_checkpoint(directory)
    if config.data.vocabulary == "bpe" and isinstance(corpus.vocabulary, BpeVocabulary) and not stored:
        directory.mkdir(parents=True, exist_ok=True)
        corpus.vocabulary.save(path)


def _per_process(rows: int) -> int:
    if rows % jax.process_count():
        raise ValueError(f"data.batch_size: got {rows}, want a multiple of the {jax.process_count()} processes")
    return rows // jax.process_count()


def _start(learner: Learner, checkpoints: Checkpoints, data: grain.DatasetIterator, config: TrainConfig) -> TrainState:
    latest, resume = checkpoints.latest(), config.run.resume
    if latest is not None and resume == "never":
        raise ValueError(
            f"run.resume: got 'never', but {checkpoints.directory} has step {latest}; want another run.directory"
        )
    if latest is None and resume != "must":
        return learner.init(config.run.seed)
    return checkpoints.restore(learner.abstract(), data, config)


def _loop(parts: Parts, state: TrainState) -> TrainResult:
    run, learner, writer = parts.config.run, parts.learner, parts.writer
    rate = schedule(parts.config.optimizer, run.steps)
    stop = min(run.stop_at or run.steps, run.steps)
    first = step = int(state.step)
    numbers, stopping, pending = {}, False, []
    begun = clock = time.perf_counter()
    with StopSignal() as stop_signal, ProgressBar(stop, step, run.progress) as bar:
        if step:
            bar.say(f"continues from step {step} of {parts.checkpoints.directory}")
        while step < stop and not stopping:
            state, metrics = learner.update(state, shard_batch(next(parts.data), learner.mesh))
            pending.append(metrics)
            step += 1
            last = step == stop
            logging = last or step % run.log_every == 0
            stopping = stop_signal.agreed(logging)
            if logging or stopping:
                done = jax.device_get(pending)
                seconds, clock, pending = time.perf_counter() - clock, time.perf_counter(), []
                record = _record(done, seconds, float(np.asarray(rate(step - 1))))
                if logging:
                    writer.write(step, record)
                bar.update(step, f"loss {record['loss']:.3f}  {record['tokens_per_second']:,.0f} tokens/s")
                _check_finite(done, step, run)
            if step % run.evaluate_every == 0 and not stopping and not last:
                numbers = parts.evaluate(state)
                writer.write(step, numbers)
                bar.say(f"step {step}: held-out {_words(numbers)}")
                clock = time.perf_counter()
            if step % run.save_every == 0 or last or stopping:
                parts.checkpoints.save(state, parts.data, parts.config)
                clock = time.perf_counter()
        if stopping:
            bar.say(f"interrupted at step {step} and saved; the same command continues from there")
        else:
            numbers = parts.evaluate(state)
            if step > first:
                writer.write(step, numbers)
            bar.say(f"step {step}: held-out {_words(numbers)}")
            _check_held_out(numbers, step)
    seconds = time.perf_counter() - begun
    return TrainResult(Path(run.directory), step, numbers, stopping, int(state.skipped), seconds)


def _record(done: list[Metrics], seconds: float, rate: float) -> dict[str, float]:
    """The newest step's numbers: means over the steps between would depend on where a run was interrupted."""
    newest = done[-1]
    return {
        "loss": float(newest.loss),
        "gradient_norm": float(newest.gradient_norm),
        "learning_rate": rate,
        "tokens_per_second": sum(float(m.tokens) for m in done) / max(seconds, 1e-9),
        "skipped": int(newest.skipped),
    }


def _check_finite(done: list[Metrics], step: int, run: RunConfig) -> None:
    worst = max(int(m.skipped_in_a_row) for m in done)
    if worst >= run.max_skipped:
        raise FloatingPointError(
            f"{worst} updates in a row up to step {step} had a loss or gradient that is not finite "
            f"(run.max_skipped = {run.max_skipped}). The parameters are those before them. Look at the data, "
            "lower optimizer.learning_rate or optimizer.clip_norm; the last checkpoint is intact."
        )


def _check_held_out(numbers: dict[str, float], step: int) -> None:
    if not math.isfinite(numbers["held_out/loss"]):
        raise FloatingPointError(
            f"the held-out loss at step {step} is {numbers['held_out/loss']}, want a finite number. The model has "
            "diverged or the data has tokens it cannot predict; lower optimizer.learning_rate."
        )


def _held_out(config: TrainConfig, corpus: Corpus, learner: Learner) -> list[Batch]:
    length = config.data.evaluation_length or config.data.sequence_length
    rows = -(-config.data.batch_size * config.data.sequence_length // length)
    rows = -(-rows // learner.mesh.size) * learner.mesh.size
    process = (jax.process_index(), jax.process_count())
    return list(held_out_batches(corpus.held_out, length=length, rows=_per_process(rows), process=process))


def evaluate(learner: Learner, state: TrainState, held_out: list[Batch], num_bytes: int) -> dict[str, float]:
    """Held-out loss, perplexity and bits per byte (`held_out_metrics`)."""
    sums = [jax.device_get(learner.evaluate(state, shard_batch(batch, learner.mesh))) for batch in held_out]
    nats, tokens = (sum(float(s[i]) for s in sums) for i in range(2))
    return held_out_metrics(nats, tokens, num_bytes)


def _words(numbers: dict[str, float]) -> str:
    bits = numbers.get("held_out/bits_per_byte")
    first = f"{bits:.3f} bits per byte, " if bits is not None else f"loss {numbers['held_out/loss']:.3f}, "
    return first + f"perplexity {numbers['held_out/perplexity']:.2f}"
