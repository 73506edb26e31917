"""The table and the plot of what experiments/bench_kernels.py stored.

    python -m experiments.plot_kernels experiments/results/kernels_nvidia_h200.json

writes the table as .md and the plot as .png beside the file, from the file alone.
"""

from pathlib import Path
from typing import Any

from experiments import style
from experiments.tables import header, in_cell, line, number, ratio, run_plot, save, write

COLORS = dict(zip(("mosaic", "xla", "peer"), style.COLORS, strict=False))

COLUMNS = (
    "shape (BxTxH)",
    "rule",
    "inputs",
    "implementation",
    "device ms",
    "whole call ms",
    "floor ms",
    "device / floor",
    "output error",
    "state error",
    "remark",
)


def sides(result: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, dict[str, Any]]]:
    """By shape, rule and dtype: the cells "mosaic", "xla" and "peer", the latter its fastest variant."""
    found: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for cell in result["cells"]:
        if cell["residuals"] == "keep":
            continue  # It saves more for gradients, and is the same otherwise.
        row = found.setdefault((cell["shape"], cell["rule"], cell["dtype"]), {})
        side = cell["implementation"] if cell["implementation"] in COLORS else "peer"
        if side not in row or (cell.get("device_ms") or 1e9) < (row[side].get("device_ms") or 1e9):
            row[side] = cell
    return found


def summary(result: dict[str, Any]) -> str:
    """Device times side by side, in markdown; of several chunk sizes and variants the fastest."""
    titles = ("shape (BxTxH)", "rule", "inputs", "floor ms", *(f"{side} ms" for side in COLORS))
    lines = [f"{result['device']}, time in GPU kernels", "", *header((*titles, "mosaic / floor", "peer / mosaic"))]
    for names, row in sides(result).items():
        times = {side: row.get(side, {}).get("device_ms") for side in COLORS}
        floor = next(iter(row.values()))["floor_ms"]
        ratios = ratio(times["mosaic"], floor), ratio(times["peer"], times["mosaic"])
        shown = [number(times[side]) + star(row.get(side, {})) for side in COLORS]
        lines.append(line((*names, number(floor), *shown, *ratios)))
    if any(map(star, result["cells"])):
        lines += ["", "\\* computes another recurrence"]
    return "\n".join([*lines, ""])


def star(cell: dict[str, Any]) -> str:
    """The mark of what computes another recurrence."""
    return "*" if "another recurrence" in cell.get("note", "") else ""


def table(result: dict[str, Any]) -> str:
    """Every cell, in markdown."""
    lines = header(COLUMNS)
    # What is saved for gradients changes nothing here.
    cells = [c for c in result["cells"] if c["residuals"] != "keep"]
    for c in sorted(cells, key=lambda c: (c["shape"], c["rule"], c["dtype"])):
        chunk = f" (chunks of {c['chunk_size']})" if c["chunk_size"] else ""
        times = [number(c.get(name)) for name in ("device_ms", "call_ms", "floor_ms")]
        errors = [f"{c[name]:.1e}" if name in c else "" for name in ("output_error", "state_error")]
        values = (*times, ratio(c.get("device_ms"), c["floor_ms"]), *errors, remark(c))
        lines.append(line((c["shape"], c["rule"], c["dtype"], c["implementation"] + chunk, *values)))
    return "\n".join([*lines, ""])


def both_table(result: dict[str, Any]) -> str:
    """Forward and backward together of the cells where they were measured, in markdown; empty without any."""
    cells = [c for c in result["cells"] if "both_call_ms" in c or "both_error" in c]
    titles = ("shape (BxTxH)", "rule", "inputs", "implementation", "device ms", "whole call ms", "MiB")
    lines = ["Forward and backward", "", *header((*titles, "gradient error", "of log_decay", "remark"))]
    for c in sorted(cells, key=lambda c: (c["shape"], c["rule"], c["dtype"])):
        by = f" ({c['versions']['gradients']})" if c["implementation"] == "mosaic" else ""
        values = [number(c.get(name)) for name in ("both_ms", "both_call_ms", "both_mib")]
        errors = [f"{c[name]:.1e}" if name in c else "" for name in ("gradient_error", "decay_gradient_error")]
        why = in_cell("; ".join(c[name] for name in ("note", "both_error") if name in c))
        lines.append(line((c["shape"], c["rule"], c["dtype"], c["implementation"] + by, *values, *errors, why)))
    return "\n".join([*lines, ""]) if cells else ""


def remark(cell: dict[str, Any]) -> str:
    parts = [str(cell[name]) for name in ("note", "reason", "error") if name in cell]
    if "do_bench_ms" in cell:
        parts.append(f"Triton's do_bench {number(cell['do_bench_ms'])} ms")
    return in_cell("; ".join(parts))


def text(result: dict[str, Any]) -> str:
    """All tables."""
    return "\n".join(filter(None, (summary(result), both_table(result), table(result))))


def plot(result: dict[str, Any], path: Path) -> None:
    """One row of grouped bars for each shape and input type; a black line marks the floor."""
    plt = style.pyplot()
    rows = sides(result)
    panels = list(dict.fromkeys((shape, dtype) for shape, _, dtype in rows))
    rules = list(dict.fromkeys(rule for _, rule, _ in rows))
    seen = [side for side in COLORS if any(row.get(side, {}).get("device_ms") for row in rows.values())]
    width = 0.8 / max(1, len(seen))
    figure, axes = plt.subplots(
        len(panels), figsize=(11, 1 + 2.2 * len(panels)), sharex=True, squeeze=False, layout="constrained"
    )
    for ax, (shape, dtype) in zip(axes[:, 0], panels, strict=True):
        floors = []
        for place, rule in enumerate(rules):
            row = rows.get((shape, rule, dtype), {})
            for order, side in enumerate(seen):
                ms = row.get(side, {}).get("device_ms")
                if ms:
                    x = place + width * (order - (len(seen) - 1) / 2)
                    bars = ax.bar(x, ms, 0.95 * width, color=COLORS[side])
                    ax.bar_label(bars, [number(ms) + star(row[side])], fontsize=8, padding=1)
            if row:
                floors.append(next(iter(row.values()))["floor_ms"])
                ax.hlines(floors[-1], place - 0.42, place + 0.42, color="black")
        ax.set(yscale="log", ylabel="ms", title=f"{shape} (batch x tokens x heads), {dtype}")
        ax.set_ylim(0.5 * min(floors), 1.6 * ax.get_ylim()[1])
        ax.grid(axis="x", visible=False)
    axes[-1, 0].set_xticks(range(len(rules)), rules)
    starred = any(map(star, result["cells"]))
    names = {"peer": f"peer (its fastest variant{'; * computes another recurrence' if starred else ''})"}
    handles = {names.get(side, side): plt.Rectangle((0, 0), 1, 1, color=COLORS[side]) for side in seen}
    handles["floor: inputs and output moved once"] = plt.Line2D([], [], color="black")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    figure.suptitle(f"Forward, time in GPU kernels (ms), {result['device']}")
    save(figure, path)
    plt.close(figure)


def main(path: Path) -> None:
    write(path, "bench_kernels", text, plot)


if __name__ == "__main__":
    run_plot(main)
