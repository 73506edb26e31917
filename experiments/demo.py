"""Does it learn? A small q_delta model reads Shakespeare byte by byte, three minutes on two CPU cores.

    python -m experiments.demo

It trains, stops half-way, starts again from its own checkpoint, and then shows the held-out loss beside that
of an interpolated trigram of the same text, a loss curve and some text that it wrote. `make demo` calls
this.
"""

import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.style import pyplot
from experiments.trigram import Trigram
from qdelta_jax.models.config import ModelConfig
from qdelta_jax.models.generation import generate
from qdelta_jax.training import (
    DataConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    TrainResult,
    load_model,
    train,
)
from qdelta_jax.training.documents import load_corpus, sample_text
from qdelta_jax.training.metrics import read_metrics

LAYERS = 3
CONFIG = TrainConfig(
    model=ModelConfig(
        vocab_size=257,
        width=128,
        layers=LAYERS,
        # One cell of all layers: three unrolled layers run faster on a CPU than a scan over three.
        pattern=("rule",) * LAYERS,
        rule="q_delta",
        heads=2,
        key_dim=32,
        value_dim=64,
        mlp_hidden=320,
        implementation="xla",
    ),
    data=DataConfig(sequence_length=256, batch_size=8, evaluation_length=1024),
    optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=30, final_fraction=0.05, weight_decay=0.1),
    run=RunConfig(directory="runs/demo", steps=400, log_every=1, evaluate_every=100, save_every=10_000),
)
PROMPT = "MACBETH.\n"
SAMPLE_BYTES = 600
WANTED_GAIN = 0.3


@dataclass(frozen=True)
class Demo:
    """directory: of checkpoints, metrics, curve.png and sample.txt; an earlier demo there is removed.

    steps: of training.
    """

    directory: str = CONFIG.run.directory
    steps: int = CONFIG.run.steps


def main(demo: Demo) -> dict[str, Any]:
    config = replace(CONFIG, run=replace(CONFIG.run, directory=demo.directory, steps=demo.steps))
    directory = Path(demo.directory)
    forget(directory)
    # The second half compiles the same program again: the cache hands it over.
    jax.config.update("jax_compilation_cache_dir", str(directory.absolute() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)

    corpus = load_corpus(config.data, config.run.seed)
    assert corpus.vocabulary is not None
    texts = [corpus.vocabulary.decode(part.tokens[0]).encode() for part in (corpus.train, corpus.held_out)]
    print(f"training text {len(texts[0]):,} bytes, held-out {len(texts[1]):,} bytes of {sample_text().name}")
    trigram = Trigram(texts[0]).bits_per_byte(texts[1])

    began = time.perf_counter()
    half = demo.steps // 2
    train(replace(config, run=replace(config.run, stop_at=half)))
    print(f"stopped at step {half}; everything is built anew from {directory / 'checkpoints'}")
    result = train(replace(config, run=replace(config.run, resume="must")))
    seconds = time.perf_counter() - began

    curve, sample = directory / "curve.png", directory / "sample.txt"
    plot(directory, trigram, curve)
    sample.write_text(write_sample(directory), encoding="utf-8")
    print(f"\n{sample.read_text(encoding='utf-8')}\n")
    return report(result, trigram, seconds, [curve, sample])


def forget(directory: Path) -> None:
    """Removes what an earlier demo left there, and nothing else."""
    for name in ("checkpoints", "tensorboard", "compiled"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("metrics.jsonl", "curve.png", "sample.txt"):
        (directory / name).unlink(missing_ok=True)


def report(result: TrainResult, trigram: float, seconds: float, paths: list[Path]) -> dict[str, Any]:
    """Prints the verdict, and returns it."""
    bits = result.metrics["held_out/bits_per_byte"]
    print(f"held-out loss  q_delta model  {bits:.3f} bits per byte")
    print(f"               trigram        {trigram:.3f} bits per byte")
    print(f"               difference     {trigram - bits:.3f} (wanted: at least {WANTED_GAIN})")
    print(f"trained to step {result.step} in {seconds:.0f} s, compiling and one restart included")
    for path in paths:
        print(f"{path.suffix[1:]:>4}: {path}")
    if not bits <= trigram - WANTED_GAIN:
        raise SystemExit(f"the model is not {WANTED_GAIN} bits per byte better than the trigram")
    return {"bits_per_byte": bits, "trigram": trigram, "seconds": seconds, "paths": paths}


def plot(directory: Path, trigram: float, path: Path) -> None:
    """Training and held-out loss in bits per byte against steps, with the trigram as a line."""
    plt = pyplot()
    records = read_metrics(directory)
    train_curve = [(r["step"], r["loss"] / math.log(2)) for r in records if r.get("loss") is not None]
    held_out = [(r["step"], r["held_out/bits_per_byte"]) for r in records if "held_out/bits_per_byte" in r]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(*zip(*train_curve, strict=True), color="#9ecae1", linewidth=0.8, label="training, each batch")
    axes.plot(*zip(*held_out, strict=True), color="#08519c", marker="o", markersize=4, label="held-out")
    axes.axhline(trigram, color="#d94801", linestyle="--", label=f"interpolated trigram, held-out ({trigram:.2f})")
    axes.set(xlabel="step", ylabel="bits per byte", title="A q_delta byte model on nine plays by Shakespeare")
    axes.set_ylim(1.5, 5.0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_sample(directory: Path) -> str:
    """What the model of the last checkpoint writes after `PROMPT`."""
    model, _, vocabulary = load_model(directory)
    assert vocabulary is not None
    prompt = [vocabulary.end, *vocabulary.encode(PROMPT).tolist()]
    tokens, _ = generate(
        model,
        [prompt],
        max_new_tokens=SAMPLE_BYTES,
        temperature=0.7,
        top_p=0.95,
        stop_tokens=(vocabulary.end,),
        rng=jax.random.key(0),
    )
    return PROMPT + vocabulary.decode(tokens[0].tolist())


if __name__ == "__main__":
    main(tyro.cli(Demo, description=__doc__))
