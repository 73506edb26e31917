"""Does a model find what it read, beyond the length it was trained at? RULER's needles at 1, 2, 4 and 8 times that.

    python -m experiments.niah                              tiny models on the shipped text, minutes on two CPU cores
    python -m experiments.niah --grid full --minutes 25     one GPU, the text of experiments/corpus.py; the same
                                                            command goes on

A batch is half needle documents of the four tasks (S-NIAH-1, 2, 3, MK-NIAH-1, arXiv 2404.06654) as long as a row or
shorter (`halvings`), with the training text as their haystack, half rows of that text; the tokens of an answer weigh
`answer_weight` each, all others 1. Values and haystacks of the test are others: another seed, and held-out text. An
answer counts as found if every token of it is the model's most likely one after the prompt and the answer so far,
which is what greedy decoding writes first (RULER also counts answers that come later in what it writes).
Models weigh the same and see the same batches in the same order for a seed. The learning rate is picked for each by
the share of right tokens of answers at the training length, mean over the tasks, with a seed (0) and samples of its
own; seeds 1, 2 .. are reported.

Budget. Runs of a model: rates + seeds = 2 (toy), 5 (full).
    toy     2 cores: 3 models = 6 runs of 1.2M tokens, one to two minutes each: it shows that all of it works, and
            few answers are found yet
    full    one H200: 11 models = 55 runs of 16M tokens, 39M parameters, each scored on 4 tasks x 4 lengths x 200
            samples (12M tokens). A run may take 10 minutes; expected are 30 s, and a minute for a model to compile
Cells come in the order of `--models`.

Results go to experiments/results/niah_DEVICE.json after each cell; what is stored there with the same options and
package versions isn't trained again. `python -m experiments.plot_niah FILE` makes a table and a plot of it.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any, Literal

import jax
import tyro

from experiments.bench import RESULTS
from experiments.language_model import HYBRIDS, SMALL, TINY
from experiments.language_models import make_cell, make_config
from experiments.language_training import Runner, plan_of
from experiments.mqar_models import CONVOLVED, build
from experiments.niah_data import TEST, VALIDATION, accuracy, answered, needle_rows, prepare, questions, training
from experiments.outcomes import Cell
from experiments.plot_niah import table
from experiments.store import CellStore, as_written, device_file, make_header, run_command
from experiments.sweeps import attempt, check_counts, chosen_grid, complete, deterministic, finish
from experiments.texts import SHIPPED, Text, load_text
from experiments.training_models import TRANSFORMER
from qdelta_jax.models import ModelConfig
from qdelta_jax.tasks import NEEDLE_TASKS
from qdelta_jax.training.train_step import TrainState

KEY = ("model", "rate", "seed", "options")
"""What tells one cell from another; a later run of the same replaces it."""

OPTIONS = ("documents", "halvings", "samples", "answer_weight")
"""Of a grid: those that a cell stores beside those of every language model."""

TIMES = (1, 2, 4, 8)
"""Lengths of the test, in those of training."""


@dataclass(frozen=True)
class Grid:
    """What is trained; base: the model whose weight all have; other fields as in `Niah`."""

    models: tuple[str, ...]
    corpus: str
    bpe_size: int
    rates: tuple[float, ...]
    seeds: int
    length: int
    tokens: int
    batch_tokens: int
    documents: int
    halvings: int
    samples: int
    answer_weight: float
    minutes: float
    run_minutes: float
    base: ModelConfig


GRIDS = {
    "toy": Grid(
        models=("gated_delta_net", CONVOLVED, "linear_attention"),
        corpus=SHIPPED,
        bpe_size=2048,
        rates=(6e-3,),
        seeds=1,
        length=384,
        tokens=1_228_800,
        batch_tokens=3072,
        documents=400,
        halvings=0,
        samples=20,
        answer_weight=10.0,
        minutes=15.0,
        run_minutes=10.0,
        base=TINY,
    ),
    "full": Grid(
        models=(
            *("gated_delta_net", "q_delta", "kda", "gated_delta_net2", TRANSFORMER, "mamba2", "q_delta2", "delta_net"),
            *(HYBRIDS[0], HYBRIDS[2], HYBRIDS[3]),
        ),
        corpus="runs/corpus",
        bpe_size=0,
        rates=(1e-3, 2e-3),
        seeds=3,
        length=1024,
        tokens=16_000_000,
        batch_tokens=8192,
        documents=2000,
        halvings=2,
        samples=200,
        answer_weight=10.0,
        minutes=25.0,
        run_minutes=10.0,
        base=SMALL,
    ),
}


@dataclass(frozen=True)
class Niah:
    """What is not given is the grid's.

    Args:
        grid: what is trained where nothing else is said.
        models: names, see experiments/language_models.py.
        corpus: a folder that experiments/corpus.py made ("runs/corpus" in the full grid), or "shipped": the text that
            ships with the library (in the toy grid).
        bpe_size: entries of a tokenizer that is made for the shipped text; 0: bytes. A corpus has its own: 0.
        rates: learning rates of the sweep.
        seeds: how many are reported.
        length: of a row, in tokens.
        tokens: of a run.
        batch_tokens: of a step.
        documents: rows of needle documents, for each task.
        halvings: of the length of these documents T: with 2, a third each of the rows has one of T tokens, two of T / 2
            and four of T / 4. Tests begin at T.
        samples: of the test, for each task and length.
        answer_weight: of a token of an answer.
        minutes: no cell is begun after that.
        run_minutes: a run that takes longer fails.
        again: train what is stored, too.
        out: folder of the results.
    """

    grid: Literal["toy", "full"] = "toy"
    models: tuple[str, ...] | None = None
    corpus: str | None = None
    bpe_size: int | None = None
    rates: tuple[float, ...] | None = None
    seeds: int | None = None
    length: int | None = None
    tokens: int | None = None
    batch_tokens: int | None = None
    documents: int | None = None
    halvings: int | None = None
    samples: int | None = None
    answer_weight: float | None = None
    minutes: float | None = None
    run_minutes: float | None = None
    again: bool = False
    out: str = str(RESULTS)


def main(options: Niah) -> dict[str, Any]:
    began = time.perf_counter()
    deterministic()
    grid = resolve(options)
    text = load_text(grid.corpus, grid.bpe_size)
    device = jax.devices()[0].device_kind
    header = make_header("niah", device, options.out)
    store = CellStore(KEY, device_file(options.out, "niah", device), header, options.again)
    left = 0
    for model in grid.models:
        config = make_config(model, replace(grid.base, vocab_size=text.vocab_size))
        runner = Runner(partial(build, model, config), plan_of(grid))
        own = {name: getattr(grid, name) for name in OPTIONS}
        base = make_cell(model, config, text.name, runner.plan, grid, **own)
        until = began + 60 * grid.minutes
        work = partial(measure, runner, Scorer(runner, text, grid))
        left += complete(store, base, grid.rates, grid.seeds, work, until)
    finish(store, table, left)
    return store.result


def resolve(options: Niah) -> Grid:
    """The grid with what the options say instead.

    Raises:
        ValueError: a bad value.
    """
    grid = chosen_grid(options, GRIDS)
    check_counts(grid, "documents", "samples")
    if not 0 <= grid.halvings < grid.length.bit_length():
        raise ValueError(f"halvings: got {grid.halvings}, want 0 or more, of a length of {grid.length}")
    if not 0 < grid.answer_weight < math.inf:
        raise ValueError(f"answer_weight: got {grid.answer_weight}, want a finite number above 0")
    if plan_of(grid).rows % 2:
        raise ValueError(f"batch_tokens: got {grid.batch_tokens}, want an even number of rows of {grid.length}")
    for model in grid.models:
        make_config(model, grid.base)
    return grid


class Scorer:
    """Accuracy of a model on each task and length.

    Args:
        runner: whose models.
        text, grid: of the questions.
    """

    def __init__(self, runner: Runner, text: Text, grid: Grid):
        self.runner, self.text, self.grid = runner, text, grid
        self.answered = jax.jit(lambda state, asked: answered(runner.learner.model(state), asked))

    def __call__(
        self, state: TrainState, seed: int, times: tuple[int, ...] = TIMES
    ) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """By task, and by length in lengths of training: answers found, and the share of right tokens in them."""
        grid = self.grid
        found = {
            task: {
                str(n): accuracy(
                    partial(self.answered, state),
                    questions(self.text, task, n * grid.length, grid.samples, seed),
                    max(1, grid.batch_tokens // (n * grid.length)),
                )
                for n in times
            }
            for task in NEEDLE_TASKS
        }
        whole, share = ({t: {n: x[i] for n, x in by.items()} for t, by in found.items()} for i in range(2))
        return whole, share


def measure(runner: Runner, scorer: Scorer, cells: list[Cell]) -> list[Cell]:
    """The cells with their numbers, or with the reason for none."""
    (cell,) = cells
    grid, runs, text = scorer.grid, runner.plan, scorer.text
    # Here, where an error ends everything: with lengths too short for a needle no cell could be measured.
    prepare(text, grid.length, TIMES, grid.samples)
    needle_rows(text, grid.length, grid.documents, grid.halvings)

    def score(state: TrainState) -> dict[str, Any]:
        whole, share = scorer(state, VALIDATION, TIMES[:1])
        own: dict[str, Any] = {}
        if not cell["sweep"]:
            own["test"], own["test_tokens"] = scorer(state, TEST)
        return {
            "validation": mean(share[task]["1"] for task in NEEDLE_TASKS),
            "validation_found": mean(whole[task]["1"] for task in NEEDLE_TASKS),
            **own,
        }

    def numbers(cells: list[Cell]) -> list[Cell]:
        shape = {"length": runs.length, "rows": runs.rows, "steps": runs.steps}
        of_rows = {"documents": grid.documents, "halvings": grid.halvings}
        data = training(text, **shape, **of_rows, weight=grid.answer_weight, seed=cell["seed"])
        return [runner.run(cell["rate"], cell["seed"], data, score)]

    return attempt(numbers, cells, format_cell)


def format_cell(cell: Cell) -> str:
    words = "{model:26s} rate {rate:<8.2g} seed {seed}".format(**cell)
    if "error" in cell:
        return f"{words}  {cell['error']}"
    words += "  validation {validation:.3f}  {seconds:.1f} s".format(**cell)
    for task, found in cell.get("test", {}).items():
        words += f"\n    {task:10s} " + "  ".join(f"{n}x {x:.3f}" for n, x in found.items())
    return words


if __name__ == "__main__":
    run_command(main, tyro.cli(Niah, description=as_written(__doc__)))
