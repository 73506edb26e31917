"""The tables and the plot of what experiments/niah.py stored.

    python -m experiments.plot_niah experiments/results/niah_cpu.json

writes the tables as .md and the plot as .png beside the file, from the file alone.
"""

from pathlib import Path
from statistics import mean
from typing import Any

from experiments.outcomes import GDN2, Q_DELTA, Claim, measured_alike, picked, remark, sections, verdict
from experiments.style import COLORS, MARKERS, pyplot
from experiments.tables import header, line, run_plot, save, write
from experiments.uncertainty import interval, paired

TITLES = {"s_niah_1": "S-NIAH-1", "s_niah_2": "S-NIAH-2", "s_niah_3": "S-NIAH-3", "mk_niah_1": "MK-NIAH-1"}


CLAIMS = (
    Claim("q_delta", "gated_delta_net", Q_DELTA),
    Claim("gated_delta_net", "delta_net", Q_DELTA),
    Claim("gated_delta_net", "mamba2", f"{Q_DELTA}, {GDN2}"),
    Claim("gated_delta_net2", "gated_delta_net", GDN2),
    Claim("gated_delta_net2", "kda", GDN2),
    Claim("kda", "gated_delta_net", GDN2),
    Claim("gated_delta_net2+window", "gated_delta_net+window", GDN2),
)
"""Means over S-NIAH (Q-Delta 90.02, Gated DeltaNet 83.51, DeltaNet 81.29, Mamba-2 76.58), and for Gated DeltaNet-2
S-NIAH-2 at 4K, S-NIAH-3 at 2K and MK-NIAH-1 at 4K: 93.0, 89.8, 37.8 (KDA 89.0, 63.2, 28.0; Gated DeltaNet 87.2, 54.2,
27.8; Mamba-2 62.6, 38.6, 21.4)."""


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each model and options that has a picked rate: by task and length the accuracies of the seeds."""
    found = []
    names = ("model", "options", "versions", "state", "block_parameters")
    for row, done in picked(result["cells"], lambda x: (measured_alike(x), x["model"]), names):
        tests = {cell["seed"]: cell["test"] for cell in done}
        found.append(row | {"tests": tests, "mean": mean(overall(test) for test in tests.values()) if tests else None})
    return sorted(found, key=lambda row: (measured_alike(row), -(row["mean"] or 0), row["model"]))


def overall(test: dict[str, dict[str, float]]) -> float:
    """The mean over all tasks and lengths."""
    return mean(x for by_length in test.values() for x in by_length.values())


def scored(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of each set of options, without those that have no seed yet."""
    return sections(row for row in rows(result) if row["tests"])


def table(result: dict[str, Any]) -> str:
    """For each set of options the accuracies of all models, then which of the papers' orders are reproduced."""
    lines: list[str] = []
    for found in scored(result):
        options = found[0]["options"]
        tokens = options["length"] * options["rows"] * options["steps"]
        lines += [
            f"{result['device']}, {options['text']}: {tokens / 1e6:.3g}M tokens in rows of {options['length']}; "
            f"{options['samples']} samples of each task and length; accuracy in %, mean over seeds "
            "(95% interval)",
            "",
        ]
        times = list(next(iter(found[0]["tests"].values()))["s_niah_1"])
        lengths = [f"{int(n) * options['length']} tokens" for n in times]
        lines += header(("task", "model", "state", "rates tried", "rate", "seeds", *lengths, "remark"))
        for task, title in TITLES.items():
            for row in found:
                shown = [_shown([test[task][n] for test in row["tests"].values()]) for n in times]
                what = str(row["state"]), str(row["trials"]), f"{row['rate']:g}", str(len(row["tests"]))
                lines.append(line((title, row["model"], *what, *shown, remark(row))))
        lines += ["", *_claims(found), ""]
    return "\n".join(lines)


def _claims(found: list[dict[str, Any]]) -> list[str]:
    by_name = {row["model"]: row["tests"] for row in found}
    titles = (
        "here: mean over tasks and lengths of",
        "single tasks and lengths reported in",
        "difference, paired by seed",
        "95% interval",
        "here",
    )
    lines = header(titles)
    for better, worse, source in CLAIMS:
        seeds = sorted(set(by_name.get(better, {})) & set(by_name.get(worse, {})))
        if seeds:
            mine, others = ([100 * overall(by_name[name][s]) for s in seeds] for name in (better, worse))
            gap, ends = paired(mine, others)
            between = "" if ends is None else f"{ends[0]:+.1f} to {ends[1]:+.1f}"
            lines.append(line((f"{better} above {worse}", source, f"{gap:+.1f}", between, verdict(ends))))
    return lines if len(lines) > 2 else []


def _shown(values: list[float]) -> str:
    ends = interval(values, low=0.0, high=1.0)
    between = "" if ends is None else f" ({100 * ends[0]:.0f} to {100 * ends[1]:.0f})"
    return f"{100 * mean(values):.1f}{between}"


def plot(result: dict[str, Any], path: Path) -> None:
    """A row for each set of options, a panel for each task: accuracy over length, a line for each model."""
    plt = pyplot()
    found = scored(result)
    down = max(1, len(found))
    figure, axes = plt.subplots(
        down, len(TITLES), figsize=(14, 1.5 + 3 * down), squeeze=False, sharey=True, layout="constrained"
    )
    models = sorted({row["model"] for section in found for row in section})
    handles: dict[str, Any] = {}
    for line_of_axes, section in zip(axes, found, strict=False):
        for ax, (task, title) in zip(line_of_axes, TITLES.items(), strict=True):
            for row in section:
                number = models.index(row["model"])
                times = list(next(iter(row["tests"].values()))[task])
                x = [int(n) * row["options"]["length"] for n in times]
                each = [[100 * test[task][n] for test in row["tests"].values()] for n in times]
                look = {
                    "color": "black" if row["model"].startswith("transformer") else COLORS[number % 6],
                    "marker": MARKERS[number // 2 % 7],
                    "linestyle": "--" if "+window" in row["model"] else "-",
                }
                (handles[row["model"]],) = ax.plot(x, [mean(y) for y in each], **look)
                for place, values in zip(x, each, strict=True):
                    ax.scatter([place] * len(values), values, s=6, color=look["color"], alpha=0.5)
            ax.set_xscale("log", base=2)
            ax.set_xticks(x, map(str, x))
            ax.axvline(section[0]["options"]["length"], color="grey", linewidth=0.8, linestyle=":")
            ax.set(xlabel="tokens (dotted: length of training)", title=title, ylim=(-3, 103))
        line_of_axes[0].set_ylabel("answers found (%)")
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=6)
    figure.suptitle(f"Needles at and beyond the length of training: mean and seeds (points)\n{result['device']}")
    save(figure, path)
    plt.close(figure)


def main(path: Path) -> None:
    write(path, "niah", table, plot)


if __name__ == "__main__":
    run_plot(main)
