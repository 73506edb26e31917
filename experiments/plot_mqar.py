"""The table and the plot of what experiments/mqar.py stored.

    python -m experiments.plot_mqar experiments/results/mqar_cpu.json

writes the table as .md and the plot as .png beside the file, from the file alone.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.mqar_training import training_pairs
from experiments.outcomes import picked, remark
from experiments.style import COLORS, MARKERS, pyplot
from experiments.tables import header, line, run_plot, save, write
from experiments.uncertainty import interval

COLUMNS = (
    "length x pairs",
    "pairs trained on",
    "tokens",
    "width",
    "model",
    "state",
    "block parameters",
    "rates tried",
    "rate",
    "seeds",
    "test accuracy %",
    "95% interval",
    "validation %",
    "remark",
)

EDGE = "rate at the edge of the sweep"

GROUP = ("length", "pairs", "width", "model", "options")
"""What the cells of a row of the table share."""


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each setting, width, model and options that has a picked rate: what the table says of it."""
    found = []
    for row, reported in picked(result["cells"], _place, (*GROUP, "state", "block_parameters")):
        tests = [cell["test"] for cell in reported]
        scores = {
            "tests": tests,
            "mean": mean(tests) if tests else None,
            "interval": interval(tests, low=0.0, high=1.0),
            "validation": mean(cell["validation"] for cell in reported) if reported else None,
        }
        found.append(row | scores)
    return found


def _place(cell: dict[str, Any]) -> tuple:
    """Where a row stands: longer and wider below; models of one width by name."""
    return (*(cell[name] for name in GROUP[:-1]), json.dumps(cell["options"], sort_keys=True))


def table(result: dict[str, Any]) -> str:
    """Every model with its interval, in markdown."""
    lines = [f"{result['device']}, multi-query associative recall", "", *header(COLUMNS)]
    for row in rows(result):
        between = "" if row["interval"] is None else " to ".join(percent(x) for x in row["interval"])
        numbers = [str(row[name]) for name in ("state", "block_parameters", "trials")]
        trained = f"{row['options']['tokens'] / 1e6:.3g}M"
        names = f"{row['length']} x {row['pairs']}", trained_on(row), trained, str(row["width"]), row["model"]
        scores = percent(row["mean"]), between, percent(row["validation"])
        lines.append(line((*names, *numbers, f"{row['rate']:.2g}", str(len(row["tests"])), *scores, remark(row, EDGE))))
    notes = (
        "pairs trained on: in equal parts; tests have as many as the setting says. tokens: of a training run. state: "
        "numbers that a layer keeps of what it has read, on average over layers, convolutions included; of full "
        "attention those of a whole row. block parameters: without the embedding, which is tied to the output. rates "
        "tried: runs of the sweep, which picks a rate by validation accuracy with a seed that is not reported. The "
        "interval is Student's over seeds, which draw initial parameters and the order of the examples.",
    )
    return "\n".join([*lines, "", *notes, ""])


def trained_on(row: dict[str, Any]) -> str:
    """Pairs of the training rows."""
    return ", ".join(map(str, training_pairs(row["pairs"], row["options"].get("halvings", 0))))


def percent(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.1f}"


def plot(result: dict[str, Any], path: Path) -> None:
    """A panel for each setting and number of tokens: test accuracy over state size, a line for each model, bars for the
    intervals. Of one width alone the models stand side by side, the best first."""
    plt = pyplot()
    found = [row for row in rows(result) if row["tests"]]
    panels = list(dict.fromkeys(_panel(row) for row in found))
    models = sorted({row["model"] for row in found})
    across = min(2, max(1, len(panels)))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(
        max(1, down), across, figsize=(2 + 4.5 * across, 1.7 + 3.6 * max(1, down)), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for ax, panel in zip(axes.flat, panels, strict=False):
        here = [row for row in found if _panel(row) == panel]
        alone = len({row["width"] for row in here}) == 1
        placed = _by_rank(here) if alone else _side_by_side(here)
        for number, model in enumerate(models):
            mine = [(x, row) for x, row in placed if row["model"] == model]
            if mine:
                handles[model] = _curve(ax, mine, model, number)
        ax.set(ylim=(-3, 103), ylabel="test accuracy (%)")
        if alone:
            names = [f"{row['model']} ({row['state']})" for _, row in placed]
            ax.set_xticks([x for x, _ in placed], names, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
            ax.set_xlabel(f"model of width {here[0]['width']} (state: numbers a layer)")
        else:
            ax.set_xscale("log", base=2)
            ax.set_xlabel("state: numbers a layer (memories of about one size side by side)")
        words = "{} tokens, {} pairs, vocabulary {}\n{:.3g}M tokens of training with {} pairs"
        ax.set_title(words.format(*panel), fontsize=10)
        ax.grid(alpha=0.3)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_axis_off()
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"Multi-query associative recall, mean and 95% interval over seeds (points)\n{result['device']}")
    save(figure, path)
    plt.close(figure)


def _panel(row: dict[str, Any]) -> tuple[int, int, int, float, str]:
    options = row["options"]
    return row["length"], row["pairs"], options["vocab"], options["tokens"] / 1e6, trained_on(row)


def _side_by_side(rows: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Where each row stands, from left to right: memories within 10% of each other would hide each other.

    >>> [round(x) for x, _ in _side_by_side([{"state": x, "model": ""} for x in (100, 100, 400)])]
    [99, 101, 400]
    """
    groups: list[list[dict[str, Any]]] = []
    for row in sorted(rows, key=lambda row: (row["state"], row["model"])):
        if not groups or row["state"] > 1.1 * groups[-1][0]["state"]:
            groups.append([])
        groups[-1].append(row)
    placed = []
    for group in groups:
        middle = (group[0]["state"] * group[-1]["state"]) ** 0.5
        placed += [(middle * 1.025 ** (i - (len(group) - 1) / 2), row) for i, row in enumerate(group)]
    return placed


def _by_rank(rows: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    return [(float(i), row) for i, row in enumerate(sorted(rows, key=lambda row: (-row["mean"], row["model"])))]


def _curve(ax: Any, mine: list[tuple[float, dict[str, Any]]], model: str, number: int) -> Any:
    """Accuracy over state with bars, and each seed as a point; of one seed there is no interval and no bar."""
    y = [100 * row["mean"] for _, row in mine]
    ends = [row["interval"] or (row["mean"], row["mean"]) for _, row in mine]
    bars = [[100 * (row["mean"] - low) for (_, row), (low, _) in zip(mine, ends, strict=True)]]
    bars += [[100 * (high - row["mean"]) for (_, row), (_, high) in zip(mine, ends, strict=True)]]
    own = model.startswith("transformer")
    color = "black" if own else COLORS[number % (len(COLORS) - 1)]
    style = {
        "linestyle": "--" if "+window" in model else ":" if model == "transformer" else "-",
        "marker": "*" if own else MARKERS[number // 2 % 7],
    }
    for x, row in mine:
        ax.scatter([x] * len(row["tests"]), [100 * test for test in row["tests"]], s=6, color=color, alpha=0.5)
    places = [x for x, _ in mine]
    return ax.errorbar(places, y, bars, color=color, capsize=3, linewidth=1.4, markersize=5, **style)


def main(path: Path) -> None:
    write(path, "mqar", table, plot)


if __name__ == "__main__":
    run_plot(main)
