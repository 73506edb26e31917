"""Every table and figure of docs/results.md, made again from what is stored in experiments/results.

    python -m experiments.report             writes the page, and a table and a figure beside each stored result
    python -m experiments.report --check     changes nothing; fails with the names of the files that are stale

A stored result belongs to the kind whose prefix its name begins with; a new kind is one entry of KINDS.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from experiments import (
    plot_bench,
    plot_dynamics,
    plot_kernels,
    plot_language,
    plot_mqar,
    plot_niah,
    plot_training,
)
from experiments.provenance import commands, config, seeds, stored_versions, versions
from experiments.tables import Plot, Table, digest, draw, in_one_line, naming, read, stamp_of

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kind:
    """module: of experiments/, that stores it. prefixes: of the names of its files. title, question: of its sections.
    table, plot: made of a stored result. config: fields of a cell that say what was measured. by: the one of them that
    groups cells. versions: of a cell. A result without cells is its own cell."""

    module: str
    prefixes: tuple[str, ...]
    title: str
    question: str
    table: Table
    plot: Plot | None
    config: tuple[str, ...] = ("model", "rate", "options", "config")
    by: str = "model"
    versions: Callable[[dict[str, Any]], dict[str, Any]] = stored_versions


KINDS = (
    Kind(
        "bench_kernels",
        ("kernels_",),
        "GPU kernels",
        "How fast are the kernels beside XLA, the peer's kernels and the time that moving inputs and output takes? That"
        " is the floor; ruler: device time by the profiler (cupti) or a replayed graph; fla, fla safe_gate and official"
        " are kernels of flash-linear-attention, the same with bounded decays, and those of Q-Delta's authors, which"
        " compute another recurrence; recompute: little is saved for the gradient.",
        plot_kernels.text,
        plot_kernels.plot,
        ("rule", "shape", "dtype", "implementation", "chunk_size", "ruler"),
        "implementation",
    ),
    Kind(
        "bench_training",
        ("training_",),
        "Training steps",
        "How fast does a whole model train, beside a Transformer and the peer's models?",
        plot_training.text,
        plot_training.plot,
        (
            *("model", "side", "size", "family", "length", "tokens", "policies", "packed", "implementation"),
            *("conv_implementation", "unroll", "residuals", "loss_chunk", "xla_flags", "steps"),
        ),
        "side",
    ),
    Kind(
        "bench",
        ("bench_", "h200_long_"),
        "Chunked solver",
        "How fast is the chunked solver in plain JAX, and how much memory does its gradient take?",
        plot_bench.table,
        None,
        ("shape", "dtype", "chunk_size"),
        versions=plot_bench.versions,
    ),
    Kind(
        "mqar",
        ("mqar_",),
        "Associative recall",
        "How much does a memory of a given size recall, beside Transformers and hybrids of as many parameters?",
        plot_mqar.table,
        plot_mqar.plot,
        ("length", "pairs", "model", "rate", "options", "config"),
    ),
    Kind(
        "niah",
        ("niah_",),
        "Needles",
        "Does a model find what it read, at the length it was trained at and beyond?",
        plot_niah.table,
        plot_niah.plot,
    ),
    Kind(
        "language_model",
        ("language_model_",),
        "Language models",
        "Which memory models real text best, and which orders of the papers are reproduced at this scale?",
        plot_language.table,
        plot_language.plot,
    ),
    Kind(
        "dynamics",
        ("dynamics_",),
        "Dynamics of a memory",
        "What does the memory of a layer do while it reads held-out text?",
        plot_dynamics.table,
        plot_dynamics.plot,
        ("rule", "layer", "model", "options", "batch"),
    ),
)
"""In the order of the page."""


@dataclass(frozen=True)
class Report:
    """results: folder of the stored results. out: the page. check: only say what is stale."""

    results: str = str(ROOT / "experiments" / "results")
    out: str = str(ROOT / "docs" / "results.md")
    check: bool = False


def main(options: Report) -> None:
    folder, out = Path(options.results), Path(options.out)
    texts = make_texts(folder, out)
    if options.check:
        stale = find_stale(folder, texts)
        if stale:
            names = ", ".join(os.path.relpath(path) for path in stale)
            raise ValueError(f"stale: {names}; the same command without --check makes them again")
        print("nothing is stale")
        return
    for path, kind, result in collect(folder):
        if kind.plot is not None:
            with naming(path, result, kind.module):
                draw(result, kind.plot, path.with_suffix(".png"))
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text)
    print(f"{len(texts) - 1} results in {out}")


def collect(folder: Path) -> list[tuple[Path, Kind, dict[str, Any]]]:
    """Stored results in the order of the page.

    Raises:
        ValueError: with the name of a file that is no result, or nothing that is made of one.
    """
    if not folder.is_dir():
        raise ValueError(f"results: got {folder}, want a folder")
    found: list[tuple[Path, Kind, dict[str, Any]]] = []
    # CellStore writes to .tmp while it measures.
    paths = [path for path in sorted(folder.iterdir()) if path.suffix != ".tmp"]
    known: set[Path] = set()
    for kind in KINDS:
        for path in paths:
            if path.suffix == ".json" and path.name.startswith(kind.prefixes):
                found.append((path, kind, read(path)))
                known |= {path, path.with_suffix(".md")} | ({path.with_suffix(".png")} if kind.plot else set())
    for path in paths:
        if path not in known:
            prefixes = ", ".join(prefix for kind in KINDS for prefix in kind.prefixes)
            raise ValueError(
                f"{path.name}: got a file of no known kind, want PREFIX*.json, or a table or figure made of one, with "
                f"PREFIX of {prefixes}"
            )
    return found


def make_texts(folder: Path, out: Path) -> dict[Path, str]:
    """By path, what the page and the table beside each result should say."""
    texts = {}
    contents, sections = [], []
    for path, kind, result in collect(folder):
        with naming(path, result, kind.module):
            table = kind.table(result)
            sections += [*section(path, kind, result, out), "", table]
        texts[path.with_suffix(".md")] = table
        contents.append(f"- [{kind.title}: {path.stem}](#{anchor(f'{kind.title}: {path.stem}')})")
    intro = [
        "<!-- Made by `python -m experiments.report` from experiments/results/*.json. Change those, not this. -->",
        "",
        "# Results",
        "",
        "Everything here is made from stored results by `python -m experiments.report`. What a result does not hold is",
        "said to be not stored. `experiments/LOG.md` says what was expected and what came out.",
        "",
    ]
    return {out: "\n".join([*intro, *contents, "", *sections]).rstrip("\n") + "\n", **texts}


def anchor(heading: str) -> str:
    """Of a heading, as GitHub makes it.

    >>> anchor("GPU kernels: kernels_x")
    'gpu-kernels-kernels_x'
    """
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def section(path: Path, kind: Kind, result: dict[str, Any], out: Path) -> list[str]:
    """Lines from the heading to the table: where the numbers come from, and the figure."""
    cells = result.get("cells", [result])
    dates = sorted({cell["date"] for cell in cells if "date" in cell} or {result.get("date", "not stored")})
    lines = [f"## {kind.title}: {path.stem}", "", kind.question, ""]
    lines += [
        f"- device: {result.get('device', 'not stored')}",
        f"- measured: {' to '.join(dict.fromkeys((dates[0], dates[-1])))}",
        *versions(kind.versions, cells),
        f"- seeds: {seeds(cells)}",
        *config(kind.config, cells, kind.by),
    ]
    if "cells" in result:
        failed = sum("error" in cell or "both_error" in cell for cell in cells)
        lines.append(f"- measurements: {len(cells)}, {failed} failed")
    lines += commands(result)
    lines.append(f"- stored in [{path.name}]({link(path, out)})")
    if kind.plot is not None:
        lines += ["", f"![{kind.title}: {path.stem}]({link(path.with_suffix('.png'), out)})"]
    return lines


def link(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out.resolve().parent)).as_posix()


def find_stale(folder: Path, texts: dict[Path, str]) -> list[Path]:
    """Texts that differ from what they should say, and figures that were not drawn from the result beside them."""
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path, kind, result in collect(folder):
        figure = path.with_suffix(".png")
        if kind.plot is not None and stamp_of(figure) != digest(result):
            stale.append(figure)
    return stale


if __name__ == "__main__":
    in_one_line(main, tyro.cli(Report, description=__doc__))
