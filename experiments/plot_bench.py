"""The tables of what experiments/bench.py stored.

    python -m experiments.plot_bench experiments/results/bench_cpu_benchmark.json

writes them as .md beside the file, from the file alone.
"""

from pathlib import Path
from typing import Any

from experiments.tables import header, in_cell, line, number, ratio, run_plot, write

PASSES = ("forward_ms", "forward_backward_ms")


def table(result: dict[str, Any]) -> str:
    """Every rule, then what ran beside it in torch, in markdown."""
    made = [name for name in ("xla", "scan") if any(name in row for row in result["rows"])]
    lengths = sorted({length for row in result["rows"] for length in row["temporary_bytes"]}, key=int)
    times = [f"{name} {direction}" for name in made for direction in ("forward ms", "forward+backward ms")]
    both = ("scan / xla, forward+backward",) if "scan" in made else ()
    memory = [f"MiB at T={length}" for length in lengths]
    sizes = "B={batch}, T={length}, H={heads}, HV={value_heads}, K={key_dim}, V={value_dim}".format(**result["shape"])
    lines = [
        f"{result['device']}, {sizes}, {result['dtype']}, chunks of {result['chunk_size']}; median ms of synchronised "
        "calls, MiB of temporary memory of the compiled gradient",
        "",
        *header(("rule", *times, *both, *memory, "MiB of inputs")),
    ]
    for row in result["rows"]:
        shown = [number(row.get(name, {}).get(x)) for name in made for x in PASSES]
        if both:
            shown.append(ratio(row.get("scan", {}).get(PASSES[1]), row["xla"][PASSES[1]]))
        shown += [mib(row["temporary_bytes"].get(length)) for length in lengths]
        lines.append(line((row["rule"], *shown, mib(row["input_bytes"]))))
    return "\n".join([*lines, "", *beside(result.get("torch", {}))])


def beside(torch: dict[str, Any]) -> list[str]:
    """Lines of what torch took for the same shape; none where it did not run."""
    if "error" in torch:
        return [f"torch failed: {in_cell(torch['error'])}", ""]
    rows = {name: times for name, times in torch.items() if isinstance(times, dict)}
    if not rows:
        return []
    lines = [f"torch {torch['torch']}, {torch['threads']} threads, in the same run", ""]
    lines += header(("implementation", "forward ms", "forward+backward ms", "remark"))
    for name, times in rows.items():
        lines.append(line((name, *(number(times.get(x)) for x in PASSES), in_cell(times.get("error", "")))))
    return [*lines, ""]


def versions(result: dict[str, Any]) -> dict[str, str]:
    """Of jax and, where it ran, torch."""
    torch = result.get("torch", {})
    return {"jax": result["jax"], **({"torch": torch["torch"]} if "torch" in torch else {})}


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"


def main(path: Path) -> None:
    write(path, "bench", table)


if __name__ == "__main__":
    run_plot(main)
