"""The tables and the plot of what experiments/language_model.py stored.

    python -m experiments.plot_language experiments/results/language_model_cpu.json

writes the tables as .md and the plot as .png beside the file, from the file alone.
"""

from pathlib import Path
from statistics import mean
from typing import Any

from experiments.outcomes import GDN2, Q_DELTA, Claim, Ends, measured_alike, picked, remark, sections, verdict
from experiments.style import COLORS, pyplot
from experiments.tables import header, line, run_plot, save, write
from experiments.uncertainty import interval, paired

REFERENCE = "gated_delta_net"
"""The model that all others are compared with."""

COLUMNS = (
    "model",
    "state",
    "block parameters",
    "rates tried",
    "rate",
    "seeds",
    "test loss (nats a token)",
    "95% interval",
    "bits a byte",
    f"minus {REFERENCE}",
    "95% interval",
    "remark",
)


CLAIMS = (
    Claim("gated_delta_net2", "kda", GDN2),
    Claim("gated_delta_net2", "gated_delta_net", GDN2),
    Claim("gated_delta_net", "kda", GDN2),
    Claim("gated_delta_net", "mamba2", GDN2),
    Claim("gated_delta_net2", "mamba2", GDN2),
    Claim("gated_delta_net2+window", "gated_delta_net+window", GDN2),
    Claim("gated_delta_net2+window", "kda+window", GDN2),
    Claim("gated_delta_net2+window", "gated_delta_net2", GDN2),
    Claim("gated_delta_net2+window", "transformer", GDN2),
    Claim("q_delta:feedback=0.8", "q_delta", Q_DELTA),
    Claim("q_delta:no_decay", "q_delta", Q_DELTA),
    Claim("q_delta:feedback=1", "q_delta", Q_DELTA),
    Claim("q_delta:feedback=0.5", "q_delta", Q_DELTA),
    Claim("q_delta", "q_delta:feedback=0.2", Q_DELTA),
)
"""Of perplexities on WikiText: 15.90 (Gated DeltaNet-2), 16.40 (Gated DeltaNet), 16.81 (KDA), 16.79 (Mamba-2), hybrids
15.62, 16.00, 16.01 and the Transformer 19.22; Q-Delta 26.89, with its feedback fixed at 0.2, 0.5, 0.8 and 1 26.96,
26.86, 26.61 and 26.55, without decay 26.52."""

QUESTIONS = (
    ("q_delta", REFERENCE, f"{Q_DELTA} (mean accuracy, not loss)"),
    ("q_delta2", "q_delta", "this library's"),
    ("q_delta2", "gated_delta_net2", "this library's"),
    ("gated_delta_net2", "gated_delta_net2:channel_erase", f"{GDN2} (needles, not loss)"),
    ("gated_delta_net2", "gated_delta_net2:channel_write", f"{GDN2} (needles, not loss)"),
    ("gated_delta_net2", "gated_delta_net2:erase_to_2", f"{GDN2} (needles, not loss)"),
)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each model and options that has a picked rate: what the table says of it, lowest loss first."""
    found = []
    names = ("model", "options", "versions", "state", "block_parameters", "epochs")
    for row, done in picked(result["cells"], lambda x: (measured_alike(x), x["model"]), names, sign=-1):
        tests = {cell["seed"]: cell["test"] for cell in done}
        scores = {
            "tests": tests,
            "mean": mean(tests.values()) if tests else None,
            "interval": interval(list(tests.values())),
            "bits": mean(cell["test_bits_per_byte"] for cell in done) if done else None,
        }
        found.append(row | scores)
    return sorted(found, key=lambda row: (measured_alike(row), row["mean"] or 1e9, row["model"]))


def difference(mine: dict[str, Any], other: dict[str, Any]) -> tuple[float, Ends] | None:
    """Of the test losses, paired by seed; None without a seed that both have."""
    seeds = sorted(set(mine["tests"]) & set(other["tests"]))
    return paired([mine["tests"][s] for s in seeds], [other["tests"][s] for s in seeds]) if seeds else None


def lower(found: tuple[float, Ends] | None) -> str:
    """Whether the first of two has the lower loss, from `difference`.

    >>> lower((-0.1, (-0.2, -0.01))), lower((0.1, (0.01, 0.2))), lower((0.1, (-0.1, 0.3))), lower((0.1, None))
    ('yes', 'no: the other way round', 'the noise is too large to tell', 'too few seeds')
    """
    ends = None if found is None else found[1]
    return verdict(None if ends is None else (-ends[1], -ends[0]))


def table(result: dict[str, Any]) -> str:
    """For each set of options all models, then which of the papers' orders are reproduced, in markdown."""
    parts: list[str] = []
    for found in sections(rows(result)):
        parts += [*_section(found, result["device"]), ""]
    return "\n".join(parts)


def _tokens(options: dict[str, Any]) -> str:
    return f"{options['length'] * options['rows'] * options['steps'] / 1e6:.3g}M tokens"


def _section(found: list[dict[str, Any]], device: str) -> list[str]:
    options = found[0]["options"]
    by_name = {row["model"]: row for row in found}
    lines = [
        f"{device}, {options['text']}: {_tokens(options)} ({found[0]['epochs']:.3g} epochs) in rows of "
        f"{options['length']}, {options['rows']} rows a step",
        "",
        *header(COLUMNS),
    ]
    for row in found:
        other = by_name.get(REFERENCE)
        gap = difference(row, other) if other is not None and other is not row else None
        numbers = [str(row[name]) for name in ("state", "block_parameters", "trials")]
        losses = [_number(row["mean"]), _between(row["interval"]), _number(row["bits"])]
        gaps = ["", ""] if gap is None else [f"{gap[0]:+.4f}", _between(gap[1], "+")]
        seeds = str(len(row["tests"]))
        lines.append(line((row["model"], *numbers, f"{row['rate']:g}", seeds, *losses, *gaps, remark(row))))
    pairs = [
        (f"{a} below {b}", source, difference(by_name[a], by_name[b]))
        for a, b, source in (*CLAIMS, *QUESTIONS)
        if a in by_name and b in by_name
    ]
    if pairs:
        titles = ("loss of", "reported in", "difference, paired by seed", "95% interval", "here")
        lines += ["", *header(titles)]
        for words, source, gap in pairs:
            shown = ["", ""] if gap is None else [f"{gap[0]:+.4f}", _between(gap[1], "+")]
            lines.append(line((words, source, *shown, lower(gap))))
    return lines


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4f}"


def _between(ends: Ends, sign: str = "") -> str:
    return "" if ends is None else f"{ends[0]:{sign}.4f} to {ends[1]:{sign}.4f}"


def plot(result: dict[str, Any], path: Path) -> None:
    """For each set of options every model's test loss: a point for each seed, the mean and its interval."""
    plt = pyplot()
    panels = sections(row for row in rows(result) if row["tests"])
    height = sum(0.3 * len(panel) + 1.2 for panel in panels)
    sizes = {"height_ratios": [len(panel) for panel in panels]} if panels else {}
    figure, axes = plt.subplots(
        max(1, len(panels)), figsize=(9, max(2.5, height)), squeeze=False, gridspec_kw=sizes, layout="constrained"
    )
    for ax, panel in zip(axes[:, 0], panels, strict=False):
        for place, row in enumerate(reversed(panel)):
            color = COLORS[1] if ":" in row["model"] else COLORS[2] if "+" in row["model"] else COLORS[0]
            color = COLORS[-1] if row["model"].startswith("transformer") else color
            ax.scatter(row["tests"].values(), [place] * len(row["tests"]), s=10, color=color, alpha=0.5)
            low, high = row["interval"] or (row["mean"], row["mean"])
            ax.errorbar(
                row["mean"], place, xerr=[[row["mean"] - low], [high - row["mean"]]], fmt="o", color=color, capsize=3
            )
        ax.set_yticks(range(len(panel)), [row["model"] for row in reversed(panel)])
        options = panel[0]["options"]
        ax.set(xlabel="held-out loss (nats a token)", title=f"{options['text']}, {_tokens(options)}")
    figure.suptitle(f"Mean and 95% interval over seeds (points)\n{result['device']}")
    save(figure, path)
    plt.close(figure)


def main(path: Path) -> None:
    write(path, "language_model", table, plot)


if __name__ == "__main__":
    run_plot(main)
