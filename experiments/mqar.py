"""How much does a memory of a given size recall? Multi-query associative recall, every rule beside a Transformer.

    python -m experiments.mqar                                             a toy grid, ten minutes on two CPU cores
    python -m experiments.mqar --grid full --minutes 25                    one GPU; the same command goes on
    python -m experiments.mqar --grid full --models q_delta transformer+conv --widths 128 --settings 256 16

Two layers, the embedding tied to the output. Blocks of one width weigh the same (`training_models.weigh`) and their
memories hold as many numbers: heads of one size for every rule, and in hybrids a sliding window of as many tokens as a
rule's memory has numbers for. Full attention keeps all that it reads; it has to recall nearly everything, or the
harness is wrong. In the full grid some rows of the training have fewer pairs (`--halvings`): with 64 pairs alone most
rules that decay recall little. "transformer+conv" has the short convolutions that the layers of rules have; the plain
one must learn which token stands before another from its rotations, and is often stuck at 1/pairs: it picks any value
of the row.
For each setting, width and model the same learning rates are tried with a seed of their own (0), the best on validation
examples is picked, and seeds 1, 2 .. at that rate are tested on others. Training is `make_optimizer` (AdamW, warm-up,
cosine) on the mean loss of the queries; a seed draws initial parameters and the order of the examples, and the same
seed gives the same numbers on the same machine.

Budget. Runs of a setting, width and model: rates + seeds = 5 (toy), 6 (full).
    toy     2 cores: 1 setting x 2 widths x 6 models = 60 runs of 0.77M tokens (1,500 steps), 4 to 12 s each
    full    one H200: 5 settings x 4 widths x 15 models = 1,800 runs of 50M tokens (6,100 steps), three at once. A run
            may take 10 minutes; at (512, 64) and a width of 64 three at once took 17 s, and a model 16 to 63 s to
            compile beside others. Expected: 30 s (128), 60 s (256), 180 s (512)
Cells come in this order, all models of a setting and width before the next: settings (512, 64), (256, 64), (256, 16),
(128, 8), (64, 4), in each the widths 64, 128, 256, 512. Expected for a setting, compilation included: 25 minutes at
widths of 64 and 128, 40 at 256, 100 at 512. With less time, the first setting and `--widths 64 128` are what to run.

Results go to experiments/results/mqar_DEVICE.json after each cell; what is stored there with the same options and
package versions isn't trained again. `python -m experiments.plot_mqar FILE` makes a table and a plot of it.
"""

import time
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, Literal

import jax
import tyro

import qdelta_jax as qd
from experiments.bench import RESULTS
from experiments.mqar_models import CONVOLVED, make_config, state_size, weight
from experiments.mqar_training import PARTS, Plan, Trainer, training_pairs
from experiments.plot_mqar import rows, table
from experiments.store import CellStore, as_written, device_file, make_header, run_command
from experiments.sweeps import (
    attempt,
    check_counts,
    check_once,
    chosen_grid,
    complete,
    deterministic,
    finish,
    versions,
)
from experiments.training_models import TRANSFORMER, differing
from qdelta_jax import tasks
from qdelta_jax.models import ModelConfig

KEY = ("model", "width", "length", "pairs", "rate", "seed", "options")
"""What tells one cell from another; a later run of the same replaces it."""

OPTIONS = ("vocab", "examples", "halvings", "held_out", "tokens", "batch_tokens", "dtype", "implementation")
"""Of a grid: those that a cell stores."""

NEAR = 0.97
"""Of the Transformer's accuracy, somewhere in the easiest setting."""


@dataclass(frozen=True)
class Grid:
    """What is trained; embedding_gradient: as in `ModelConfig`; other fields as in `Mqar`."""

    models: tuple[str, ...]
    widths: tuple[int, ...]
    settings: tuple[tuple[int, int], ...]
    rates: tuple[float, ...]
    seeds: int
    vocab: int
    examples: int
    halvings: int
    held_out: int
    tokens: int
    batch_tokens: int
    dtype: str
    implementation: str | None
    embedding_gradient: str
    together: int
    minutes: float
    run_minutes: float


HYBRIDS = ("gated_delta_net+window", "gated_delta_net2+window", "q_delta+window")

GRIDS = {
    "toy": Grid(
        models=(CONVOLVED, "q_delta", "gated_delta_net2", "linear_attention", "q_delta+window", TRANSFORMER),
        widths=(32, 24),
        settings=((32, 4),),
        rates=(4e-3, 8e-3),
        seeds=3,
        vocab=64,
        examples=16000,
        halvings=0,
        held_out=500,
        tokens=768_000,
        batch_tokens=512,
        dtype="float32",
        implementation="xla",
        embedding_gradient="scatter",
        together=1,
        minutes=15.0,
        run_minutes=10.0,
    ),
    "full": Grid(
        models=(CONVOLVED, TRANSFORMER, *qd.RULES, *HYBRIDS),
        widths=(64, 128, 256, 512),
        settings=((512, 64), (256, 64), (256, 16), (128, 8), (64, 4)),
        rates=(1e-3, 3e-3, 1e-2),
        seeds=3,
        vocab=8192,
        examples=100_000,
        halvings=3,
        held_out=3000,
        tokens=50_000_000,
        batch_tokens=8192,
        dtype="float32",
        implementation=None,
        embedding_gradient="product",
        together=3,
        minutes=25.0,
        run_minutes=10.0,
    ),
}


@dataclass(frozen=True)
class Mqar:
    """What is not given is the grid's.

    Args:
        grid: what is trained where nothing else is said.
        models: names of rules, with "+window" hybrids, "transformer" and "transformer+conv".
        widths: of the hidden state.
        settings: LENGTH PAIRS, once or more.
        rates: learning rates of the sweep.
        seeds: how many are reported.
        vocab: keys and values.
        examples: to train on.
        halvings: of their pairs N: with 2, a third each has N, N/2 and N/4. More than N allows (4 pairs: 2) change
            nothing. Tests have N.
        held_out: examples for validation, and as many for the test.
        tokens: of a run.
        batch_tokens: of a step.
        dtype: of the computation.
        implementation: of the rules.
        together: runs that are trained at once by `jax.vmap`.
        minutes: no cell is begun after that.
        run_minutes: a run that takes longer fails.
        again: train what is stored, too.
        out: folder of the results.
    """

    grid: Literal["toy", "full"] = "toy"
    models: tuple[str, ...] | None = None
    widths: tuple[int, ...] | None = None
    settings: tuple[tuple[int, int], ...] | None = None
    rates: tuple[float, ...] | None = None
    seeds: int | None = None
    vocab: int | None = None
    examples: int | None = None
    halvings: int | None = None
    held_out: int | None = None
    tokens: int | None = None
    batch_tokens: int | None = None
    dtype: str | None = None
    implementation: str | None = None
    together: int | None = None
    minutes: float | None = None
    run_minutes: float | None = None
    again: bool = False
    out: str = str(RESULTS)


def main(options: Mqar) -> dict[str, Any]:
    began = time.perf_counter()
    deterministic()
    grid = resolve(options)
    device = jax.devices()[0].device_kind
    header = make_header("mqar", device, options.out)
    store = CellStore(KEY, device_file(options.out, "mqar", device), header, options.again)
    groups = [(s, w, m) for s in grid.settings for w in grid.widths for m in grid.models]
    left = 0
    for setting, width, model in groups:
        config = configure(model, width, grid)
        trainer = Trainer(model, config, plan_of(grid, setting))
        base = make_cell(model, config, setting, grid)
        until = began + 60 * grid.minutes
        left += complete(store, base, grid.rates, grid.seeds, partial(measure, trainer), until, together=grid.together)
    finish(store, table, left)
    # Of a run that compares: `experiments.parallel` trains each model in a process of its own, and compares in the end.
    if CONVOLVED in grid.models and len(grid.models) > 1:
        check_transformer(store.result, grid)
    return store.result


def resolve(options: Mqar) -> Grid:
    """The grid with what the options say instead.

    Raises:
        ValueError: a bad value.
    """
    grid = chosen_grid(options, GRIDS)
    check_counts(grid, "together", "examples", "held_out")
    check_once(widths=grid.widths, settings=grid.settings)
    if grid.halvings < 0:
        raise ValueError(f"halvings: got {grid.halvings}, want 0 or more")
    for length, pairs in grid.settings:
        # One row, which says what the task cannot be; otherwise every run would.
        tasks.mqar(1, seed=0, length=length, pairs=pairs, vocab_size=grid.vocab)
        if grid.batch_tokens % length or grid.examples < grid.batch_tokens // length:
            raise ValueError(
                f"batch_tokens: got {grid.batch_tokens}, want a multiple of the length {length}, "
                f"and no more rows than examples = {grid.examples}"
            )
        kinds = training_pairs(pairs, grid.halvings)
        if grid.examples < len(kinds):
            raise ValueError(
                f"examples: got {grid.examples}, want at least {len(kinds)}, rows of {kinds} pairs (halvings)"
            )
    if grid.tokens < PARTS * grid.batch_tokens:
        raise ValueError(
            f"tokens: got {grid.tokens}, want at least {PARTS} * batch_tokens = {PARTS * grid.batch_tokens}"
        )
    for width in grid.widths:
        for model in grid.models:
            configure(model, width, grid)
    return grid


@cache
def configure(model: str, width: int, grid: Grid) -> ModelConfig:
    computed = {name: getattr(grid, name) for name in ("dtype", "implementation", "embedding_gradient")}
    return make_config(model, width, vocab=grid.vocab, **computed)


def plan_of(grid: Grid, setting: tuple[int, int]) -> Plan:
    own = {field.name for field in fields(Plan)} & {field.name for field in fields(Grid)}
    return Plan(*setting, **{name: getattr(grid, name) for name in own})


def make_cell(model: str, config: ModelConfig, setting: tuple[int, int], grid: Grid) -> dict[str, Any]:
    """What the cells of a setting, width and model have in common."""
    length, pairs = setting
    options = {name: getattr(grid, name) for name in OPTIONS}
    # Those that there are: with more the training rows, and the numbers, are the same.
    options["halvings"] = len(training_pairs(pairs, grid.halvings)) - 1
    parameters, block_parameters = weight(model, config)
    return {
        "model": model,
        "width": config.width,
        "length": length,
        "pairs": pairs,
        "options": options,
        "config": differing(config),
        "state": state_size(config, length),
        "parameters": parameters,
        "block_parameters": block_parameters,
        "versions": versions(),
    }


def measure(trainer: Trainer, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells with their numbers, or with the reason for none."""

    def numbers(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return trainer.run([cell["rate"] for cell in cells], [cell["seed"] for cell in cells])

    return attempt(numbers, cells, format_cell)


def format_cell(cell: dict[str, Any]) -> str:
    text = "{length:4d} {pairs:3d} {width:4d} {model:24s} rate {rate:<8.2g} seed {seed}".format(**cell)
    if "error" in cell:
        return f"{text}  {cell['error']}"
    scores = "validation {validation:.4f}  test {test:.4f}  {seconds:.1f} s (compiled in {compile_s:.1f} s)"
    return f"{text}  {scores.format(**cell)}  loss {cell['losses'][-1]}"


def check_transformer(result: dict[str, Any], grid: Grid) -> None:
    """Attention sees every pair. The plain Transformer is often stuck and proves nothing.

    Raises:
        SystemExit: "transformer+conv" does not recall them even in the easiest setting, at any of its widths.
    """
    found = [x for x in rows(result) if x["model"] == CONVOLVED and x["options"]["vocab"] == grid.vocab and x["tests"]]
    if not found:
        return
    easiest = min(x["pairs"] for x in found)
    best = max(x["mean"] for x in found if x["pairs"] == easiest)
    if best < NEAR:
        raise SystemExit(
            f"the Transformer recalls {100 * best:.1f}% of {easiest} pairs, want at least {100 * NEAR:.0f}%: "
            "too few tokens or bad rates, or something is wrong with the task, the model or the training"
        )


if __name__ == "__main__":
    run_command(main, tyro.cli(Mqar, description=as_written(__doc__)))
