"""A sweep of learning rates, then seeds at the picked one: what the training experiments do for each model."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from statistics import mean
from typing import Any

import jax

import experiments
import pallas_kernels
import qdelta_jax as qd
from experiments.store import CellStore, check_alive, describe, fingerprint

SWEEP_SEED = 0

SOURCE = fingerprint([qd, pallas_kernels, experiments], "**/*.py")
"""Of the code that runs, not of what it has become when a run ends."""

Cell = dict[str, Any]


@cache
def versions() -> dict[str, str]:
    """Of what a trained model's numbers depend on."""
    return {"jax": jax.__version__, **{name: version(name) for name in ("jaxlib", "flax", "optax", "numpy")}}


def pick(sweep: Iterable[Cell], name: str = "validation", sign: int = 1) -> float | None:
    """The learning rate whose mean `name` is largest (smallest for sign -1), the lower of equals; None without any.

    >>> pick([{"rate": 0.1, "validation": 0.5}, {"rate": 0.01, "validation": 0.5}, {"rate": 1.0, "error": "NaN"}])
    0.01
    """
    found: dict[float, list[float]] = {}
    for cell in sweep:
        if "error" not in cell:
            found.setdefault(cell["rate"], []).append(sign * cell[name])
    return max(sorted(found), key=lambda rate: mean(found[rate])) if found else None


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


def attempt(numbers: Callable[[list[Cell]], list[Cell]], cells: list[Cell]) -> list[Cell]:
    """The cells with their numbers, date and source, or with the reason for none."""
    try:
        found = numbers(cells)
    except Exception as error:  # Some cells fail, the others go on.
        found = [{"error": describe(error)}] * len(cells)
    when = {"date": time.strftime("%Y-%m-%d"), "source": SOURCE}
    made = [{**cell, **when, **own} for cell, own in zip(cells, found, strict=True)]
    if "error" in found[0]:
        check_alive()
    return made


def check_lists(models: Sequence[str], rates: Sequence[float]) -> None:
    """
    Raises:
        ValueError: none, one twice, or a rate that is none.
    """
    for name, values in (("models", models), ("rates", rates)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}: got {values}, want one or more, each once")
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates: got {rates}, want finite numbers above 0")


def run_command(main: Callable[[Any], Any], options: Any) -> None:
    """Of the command line: bad options end in one line."""
    try:
        main(options)
    except ValueError as error:
        raise SystemExit(str(error)) from error


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
