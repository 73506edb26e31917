"""The table and the plot of what experiments/bench_training.py stored.

    python -m experiments.plot_training experiments/results/training_nvidia_h200.json

writes the table as .md and the plot as .png beside the file, from the file alone.
"""

from pathlib import Path
from typing import Any

from experiments.style import COLORS, pyplot
from experiments.tables import header, in_cell, line, number, run_plot, save, write

COLUMNS = (
    "size",
    "model",
    "side",
    "batch x length",
    "tokens/s",
    "utilisation",
    "step ms",
    "kernels ms",
    "memory GiB",
    "compile s",
    "remat",
    "parameters",
    "remark",
)


def rows(result: dict[str, Any]) -> dict[tuple[str, int, str, str], dict[int, dict[str, Any]]]:
    """By size, tokens of a batch, model and side, then by length: of several cells (families, policies) the fastest."""
    found: dict[tuple[str, int, str, str], dict[int, dict[str, Any]]] = {}
    for cell in sorted(result["cells"], key=lambda cell: (cell["size"], cell["tokens"])):
        row = found.setdefault((cell["size"], cell["tokens"], cell["model"], cell["side"]), {})
        known = row.get(cell["length"])
        if known is None or cell.get("tokens_per_s", 0) > known.get("tokens_per_s", 0):
            row[cell["length"]] = cell
    return found


def summary(result: dict[str, Any]) -> str:
    """Thousands of tokens a second and the utilisation, a column for each length, in markdown."""
    lengths = sorted({cell["length"] for cell in result["cells"]})
    peak = f"{result['peak_flops'] / 1e12:.0f} TFLOP/s"
    which = "whatever was kept for the gradient, the fastest"
    lines = [f"{result['device']}, thousands of tokens a second (model FLOPs in % of {peak}); {which}", ""]
    lines += header(("size", "batch", "model", "side", *map(str, lengths)))
    for (size, tokens, *names), row in rows(result).items():
        lines.append(line((size, str(tokens), *names, *(short(row.get(length)) for length in lengths))))
    return "\n".join([*lines, ""])


def short(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if "tokens_per_s" not in cell:
        return "out of memory" if cell["error"] == "out of memory" else "failed"
    return f"{cell['tokens_per_s'] / 1e3:.1f} ({100 * cell['utilisation']:.0f}%)"


def table(result: dict[str, Any]) -> str:
    """Every cell, in markdown."""
    lines = header(COLUMNS)
    for c in sorted(result["cells"], key=lambda c: (c["size"], c["model"], c["side"], c["tokens"], c["length"])):
        names = c["size"], c["model"], c["side"], f"{c['tokens'] // c['length']} x {c['length']}"
        rates = f"{c['tokens_per_s']:.0f}" if "tokens_per_s" in c else "", number(c.get("utilisation"))
        memory = c["memory_bytes"] / 2**30 if c.get("memory_bytes") else None
        numbers = [number(x) for x in (c.get("step_ms"), c.get("device_ms"), memory, c.get("compile_s"))]
        remat = c["remat"] if "tokens_per_s" in c else ""
        lines.append(line((*names, *rates, *numbers, remat, str(c.get("parameters", "")), remark(c))))
    return "\n".join([*lines, ""])


def remark(cell: dict[str, Any]) -> str:
    parts = [f"preset {cell['family']}"]
    parts += [f"implementation {cell['implementation']}"] if cell["implementation"] else []
    parts += [f"convolution {cell['conv_implementation']}"] if cell["conv_implementation"] else []
    parts += [f"unroll {cell['unroll']}"] if cell["unroll"] not in (None, 1) else []
    parts += ["residuals keep"] if cell["residuals"] == "keep" else []
    parts += [f"loss_chunk {cell['loss_chunk']}"] if cell["loss_chunk"] else []
    parts += ["packed"] if cell["packed"] else []
    parts += [cell["xla_flags"]] if cell["xla_flags"] else []
    parts += [cell["note"]] if "note" in cell else []
    parts += [f"too large: {', '.join(cell['too_large'])}"] if cell["too_large"] else []
    parts += [cell["error"]] if "error" in cell else []
    return in_cell("; ".join(parts))


def text(result: dict[str, Any]) -> str:
    """Both tables."""
    return f"{summary(result)}\n{table(result)}"


def plot(result: dict[str, Any], path: Path) -> None:
    """A column for each size and batch: tokens a second above, utilisation below, over the length of a row."""
    plt = pyplot()
    found = rows(result)
    columns = list(dict.fromkeys(names[:2] for names in found))
    models = list(dict.fromkeys(model for _, _, model, _ in found))
    figure, axes = plt.subplots(
        2,
        len(columns),
        figsize=(1 + 5 * len(columns), 7),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    for column, (size, tokens) in enumerate(columns):
        for (*own, model, side), row in found.items():
            if tuple(own) != (size, tokens):
                continue
            cells = [row[length] for length in sorted(row) if "tokens_per_s" in row[length]]
            style: dict[str, Any] = {
                "color": COLORS[models.index(model) % len(COLORS)],
                "linestyle": "--" if side == "fla" else "-",
                "marker": "x" if side == "fla" else "o",
            }
            for ax, name in zip(axes[:, column], ("tokens_per_s", "utilisation"), strict=True):
                (drawn,) = ax.plot([c["length"] for c in cells], [c[name] for c in cells], **style)
                handles.setdefault(f"{model} ({side})", drawn)
        for ax, name in zip(axes[:, column], ("tokens/s", "model FLOP utilisation"), strict=True):
            ax.set_xscale("log", base=2)
            ax.set(ylabel=name, title=f"{size}, batches of {tokens} tokens")
            ax.set_ylim(bottom=0)
            ax.grid(alpha=0.3)
        axes[1, column].set_xlabel("tokens of a row")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4 if len(columns) > 1 else 2, fontsize=8)
    figure.suptitle(f"Training steps, {result['device']}")
    save(figure, path)
    plt.close(figure)


def main(path: Path) -> None:
    write(path, "bench_training", text, plot)


if __name__ == "__main__":
    run_plot(main)
