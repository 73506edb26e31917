"""Which memory models real text best? Every rule, a Transformer, hybrids and the papers' ablations, on the same tokens.

    python -m experiments.language_model                            the shipped text, tiny models, minutes on two cores
    python -m experiments.corpus --out runs/corpus                  gathers some 150 MB of free English text
    python -m experiments.language_model --grid full --minutes 25   one GPU; the same command goes on

Blocks of one weight (`training_models.weigh`), one tokenizer, and for each seed the same tokens in the same order: a
difference between two models is paired by seed. For each model the same learning rates are tried with a seed of their
own (0), the best on every other held-out document is picked, and seeds 1, 2 .. at that rate are tested on the others.
The same seed gives the same numbers on the same machine.

Budget. Runs of a model: rates + seeds = 6 (toy), 7 (full). Later runs may try more rates.
    toy     2 cores: 6 models = 36 runs of 0.2M tokens, 5 to 30 s each: 6 minutes
    full    one H200: 23 models = 161 runs of 10M tokens (a quarter of the corpus), 39M parameters. A run may take 10
            minutes and takes 17 to 24 s of the GPU with three models at once (experiments/parallel.py), and a model
            60 s to compile beside others: an hour in all
Cells come in the order of `--models`: delta rules and what they are compared with, hybrids, then ablations.

Results go to experiments/results/language_model_DEVICE.json after each cell; what is stored there with the same options
and package versions isn't trained again. `python -m experiments.plot_language FILE` makes a table and a plot of it.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any, Literal

import jax
import tyro

import qdelta_jax as qd
from experiments.bench import RESULTS
from experiments.language_models import ABLATIONS, make_cell, make_config
from experiments.language_training import Plan, Runner, plan_of
from experiments.mqar_models import build
from experiments.outcomes import Cell
from experiments.plot_language import table
from experiments.store import CellStore, as_written, device_file, make_header, run_command
from experiments.sweeps import attempt, chosen_grid, complete, deterministic, finish
from experiments.texts import SHIPPED, Text, load_text
from experiments.training_models import TRANSFORMER
from qdelta_jax.models import ModelConfig
from qdelta_jax.training.data import Batch, batches, held_out_batches
from qdelta_jax.training.loop import evaluate
from qdelta_jax.training.train_step import TrainState

KEY = ("model", "rate", "seed", "options")
"""What tells one cell from another; a later run of the same replaces it."""

HYBRIDS = ("gated_delta_net+window", "kda+window", "gated_delta_net2+window", "q_delta+window")


@dataclass(frozen=True)
class Grid:
    """What is trained; base: the model whose weight all have; other fields as in `Language`."""

    models: tuple[str, ...]
    corpus: str
    rates: tuple[float, ...]
    seeds: int
    length: int
    tokens: int
    batch_tokens: int
    minutes: float
    run_minutes: float
    base: ModelConfig


TINY = ModelConfig(
    vocab_size=1,
    width=64,
    layers=2,
    mlp_hidden=168,
    heads=2,
    key_dim=32,
    value_dim=32,
    attention_heads=2,
    window=64,
    tie_embeddings=True,
    implementation="xla",
)
SMALL = ModelConfig(
    vocab_size=1,
    width=512,
    layers=10,
    mlp_hidden=1408,
    heads=4,
    key_dim=128,
    value_dim=128,
    attention_heads=8,
    window=512,
    tie_embeddings=True,
    embedding_gradient="product",
    dtype="bfloat16",
    remat="activations",
    unroll=10,
)
"""vocab_size is that of the text. A step of 32768 tokens took 44 ms with this remat, without a scan over layers 34."""

ORDER = (
    *("gated_delta_net", "q_delta", "kda", "gated_delta_net2", TRANSFORMER, "mamba2", "q_delta2"),
    *(name for name in qd.RULES if name in ("gla", "retnet", "delta_net", "linear_attention")),
)

GRIDS = {
    "toy": Grid(
        models=("gated_delta_net", "q_delta", "kda", "gated_delta_net2", TRANSFORMER, "q_delta+window"),
        corpus=SHIPPED,
        rates=(3e-3, 6e-3, 1.2e-2),
        seeds=3,
        length=128,
        tokens=204_800,
        batch_tokens=1024,
        minutes=15.0,
        run_minutes=10.0,
        base=TINY,
    ),
    "full": Grid(
        models=(*ORDER, *HYBRIDS, *ABLATIONS),
        corpus="runs/corpus",
        rates=(7.5e-4, 1.5e-3, 3e-3, 6e-3),
        seeds=3,
        length=1024,
        tokens=10_000_000,
        batch_tokens=16384,
        minutes=25.0,
        run_minutes=10.0,
        base=SMALL,
    ),
}


@dataclass(frozen=True)
class Language:
    """What is not given is the grid's.

    Args:
        grid: what is trained where nothing else is said.
        models: names, see experiments/language_models.py.
        corpus: a folder that experiments/corpus.py made ("runs/corpus" in the full grid), or "shipped": the text that
            ships with the library, as bytes (in the toy grid).
        rates: learning rates of the sweep.
        seeds: how many are reported.
        length: of a row, in tokens.
        tokens: of a run.
        batch_tokens: of a step.
        minutes: no cell is begun after that.
        run_minutes: a run that takes longer fails.
        again: train what is stored, too.
        out: folder of the results.
    """

    grid: Literal["toy", "full"] = "toy"
    models: tuple[str, ...] | None = None
    corpus: str | None = None
    rates: tuple[float, ...] | None = None
    seeds: int | None = None
    length: int | None = None
    tokens: int | None = None
    batch_tokens: int | None = None
    minutes: float | None = None
    run_minutes: float | None = None
    again: bool = False
    out: str = str(RESULTS)


def main(options: Language) -> dict[str, Any]:
    began = time.perf_counter()
    deterministic()
    grid = resolve(options)
    text = load_text(grid.corpus)
    device = jax.devices()[0].device_kind
    header = make_header("language_model", device, options.out)
    store = CellStore(KEY, device_file(options.out, "language_model", device), header, options.again)
    left = 0
    for model in grid.models:
        config = make_config(model, replace(grid.base, vocab_size=text.vocab_size))
        runner = Runner(partial(build, model, config), plan_of(grid))
        epochs = round(runner.plan.tokens / text.train.num_tokens, 3)
        base = {**make_cell(model, config, text.name, runner.plan, grid), "epochs": epochs}
        until = began + 60 * grid.minutes
        work = partial(measure, runner, text)
        left += complete(store, base, grid.rates, grid.seeds, work, until, name="validation", sign=-1)
    finish(store, table, left)
    return store.result


def resolve(options: Language) -> Grid:
    """The grid with what the options say instead.

    Raises:
        ValueError: a bad value.
    """
    grid = chosen_grid(options, GRIDS)
    plan_of(grid)
    for model in grid.models:
        make_config(model, grid.base)
    return grid


def measure(runner: Runner, text: Text, cells: list[Cell]) -> list[Cell]:
    """The cells with their numbers, or with the reason for none."""
    shape = (runner.plan.length, runner.plan.rows)

    def score(state: TrainState) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("validation", "test"):
            numbers = evaluate(runner.learner, state, held_out(text, name, *shape), getattr(text, name).num_bytes)
            found |= {name: numbers["held_out/loss"], f"{name}_bits_per_byte": numbers["held_out/bits_per_byte"]}
            if not math.isfinite(found[name]):
                raise FloatingPointError(f"the {name} loss is {found[name]}, want a finite number")
        return found

    def numbers(cells: list[Cell]) -> list[Cell]:
        (cell,) = cells
        return [runner.run(cell["rate"], cell["seed"], iter(training(text, cell["seed"], runner.plan)), score)]

    return attempt(numbers, cells, format_cell)


@lru_cache(maxsize=8)
def training(text: Text, seed: int, runs: Plan) -> list[Batch]:
    """The batches of that seed, the same for every model."""
    return list(islice(batches(text.train, length=runs.length, rows=runs.rows, seed=seed), runs.steps))


@cache
def held_out(text: Text, name: str, length: int, rows: int) -> list[Batch]:
    return list(held_out_batches(getattr(text, name), length=length, rows=rows))


def format_cell(cell: Cell) -> str:
    words = "{model:34s} rate {rate:<8.2g} seed {seed}".format(**cell)
    if "error" in cell:
        return f"{words}  {cell['error']}"
    return words + "  validation {validation:.4f}  test {test:.4f} nats  {seconds:.1f} s".format(**cell)


if __name__ == "__main__":
    run_command(main, tyro.cli(Language, description=as_written(__doc__)))
