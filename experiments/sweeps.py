"""A sweep of learning rates, then seeds at the picked one: what the training experiments do for each model."""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib.metadata import version
from typing import Any

import jax

import experiments
import pallas_kernels
import qdelta_jax as qd
from experiments.outcomes import Cell, pick
from experiments.store import CellStore, check_alive, describe, fingerprint

SWEEP_SEED = 0

SOURCE = fingerprint([qd, pallas_kernels, experiments], "**/*.py")
"""Of the code that runs, not of what it has become when a run ends."""


DETERMINISTIC = {"xla_gpu_deterministic_ops": "true", "xla_gpu_enable_triton_gemm": "false"}
"""Options of XLA. A GPU's atomics sum in another order in every run, and a compiler that tries its kernels picks
others. Without trying, its own matrix products have the smallest tiles there are; cuBLAS picks by rule."""


def deterministic() -> None:
    """The same numbers in every run on the same machine. To be called before JAX has made its first program."""
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in DETERMINISTIC.items() if f"--{name}=" not in given]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *added])


@cache
def versions() -> dict[str, str]:
    """Of what a trained model's numbers depend on."""
    return {"jax": jax.__version__, **{name: version(name) for name in ("jaxlib", "flax", "optax", "numpy")}}


def complete(
    store: CellStore,
    base: Cell,
    rates: Iterable[float],
    seeds: int,
    measure: Callable[[list[Cell]], list[Cell]],
    until: float,
    *,
    together: int = 1,
    name: str = "validation",
    sign: int = 1,
) -> int:
    """Measures and stores what is missing of one model, as long as there is time; how many runs are left, those that
    failed among them: a later run tries them again.

    Args:
        base: what all its cells have in common.
        rates: of the sweep, with a seed of its own. The best by `name` and `sign` (see `pick`) is used afterwards.
        seeds: that are reported.
        measure: cells to cells with their numbers, or with an "error".
        until: no cell is begun after that (`time.perf_counter`).
        together: cells that are measured at once.
    """
    sweep = [{**base, "rate": rate, "seed": SWEEP_SEED, "sweep": True} for rate in rates]
    missing = _run(store, sweep, measure, until, together)
    chosen = pick(_stored(store, sweep), name, sign)
    # Without the whole sweep no rate is picked; one that failed is as good as measured.
    if missing or chosen is None:
        return max(missing, _left(store, sweep)) + seeds
    numbers = range(SWEEP_SEED + 1, SWEEP_SEED + 1 + seeds)
    reported = [{**base, "rate": chosen, "seed": seed, "sweep": False} for seed in numbers]
    _run(store, reported, measure, until, together)
    return _left(store, [*sweep, *reported])


def attempt(
    numbers: Callable[[list[Cell]], list[Cell]], cells: list[Cell], describe_cell: Callable[[Cell], str]
) -> list[Cell]:
    """The cells with their numbers, date and source, or with the reason for none; prints a description of each."""
    try:
        found = numbers(cells)
    except Exception as error:  # Some cells fail, the others go on.
        found = [{"error": describe(error)}] * len(cells)
    when = {"date": time.strftime("%Y-%m-%d"), "source": SOURCE}
    made = [{**cell, **when, **own} for cell, own in zip(cells, found, strict=True)]
    for cell in made:
        print(describe_cell(cell), flush=True)
    if "error" in found[0]:
        check_alive()
    return made


def chosen_grid[G](options: Any, grids: Mapping[str, G]) -> G:
    """The grid that the options name, with what they say instead of its fields.

    Raises:
        ValueError: models, rates, seeds or minutes that no run can have.
    """
    grid: Any = grids[options.grid]
    names = {field.name for field in fields(grid)} & {field.name for field in fields(options)}
    grid = replace(grid, **{name: getattr(options, name) for name in names if getattr(options, name) is not None})
    check_once(models=grid.models, rates=grid.rates)
    if not all(0 < rate < math.inf for rate in grid.rates):
        raise ValueError(f"rates: got {grid.rates}, want finite numbers above 0")
    check_counts(grid, "seeds")
    for name in ("minutes", "run_minutes"):
        if not getattr(grid, name) >= 0:
            raise ValueError(f"{name}: got {getattr(grid, name)}, want 0 or more")
    return grid


def check_once(**lists: Sequence[Any]) -> None:
    """
    Raises:
        ValueError: none of something, or one twice.
    """
    for name, values in lists.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}: got {values}, want one or more, each once")


def check_counts(grid: Any, *names: str) -> None:
    """
    Raises:
        ValueError: one of these fields is below 1.
    """
    for name in names:
        if getattr(grid, name) < 1:
            raise ValueError(f"{name}: got {getattr(grid, name)}, want at least 1")


def finish(store: CellStore, table: Callable[[dict[str, Any]], str], left: int) -> None:
    """The last lines of an experiment."""
    print(f"\n{table(store.result)}\nstored in {store.path}")
    print(f"{left} runs are left: the same command goes on" if left else "nothing is left", flush=True)


def _run(
    store: CellStore, cells: list[Cell], measure: Callable[[list[Cell]], list[Cell]], until: float, together: int
) -> int:
    missing = [cell for cell in cells if not store.has(cell)]
    while missing and time.perf_counter() < until:
        now, missing = missing[:together], missing[together:]
        for cell in measure(now):
            store.put(cell)
    return len(missing)


def _left(store: CellStore, cells: list[Cell]) -> int:
    return sum(not store.has(cell) for cell in cells)


def _stored(store: CellStore, cells: list[Cell]) -> list[Cell]:
    """What the store has of these."""
    return [x for x in store.result["cells"] if any(all(x[n] == cell[n] for n in store.key) for cell in cells)]
