"""Numbers of a run: metrics.jsonl, TensorBoard and a progress bar; and what held-out loss means."""

import json
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tensorboardX import SummaryWriter

__all__ = ["MetricsWriter", "ProgressBar", "held_out_metrics", "read_metrics"]


def held_out_metrics(nats: float, tokens: float, num_bytes: int) -> dict[str, float]:
    """loss = nats / tokens;  perplexity = exp(loss);  bits_per_byte = nats / ln 2 / bytes (unless 0 bytes).

    >>> numbers = held_out_metrics(nats=100 * math.log(4), tokens=100.0, num_bytes=200)
    >>> {name: round(x, 6) for name, x in numbers.items()}
    {'held_out/loss': 1.386294, 'held_out/perplexity': 4.0, 'held_out/bits_per_byte': 1.0}
    """
    loss = nats / max(tokens, 1)
    # exp overflows where a model has diverged; infinity is the honest word for it.
    perplexity = math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
    numbers = {"held_out/loss": loss, "held_out/perplexity": perplexity}
    if num_bytes:
        numbers["held_out/bits_per_byte"] = nats / math.log(2) / num_bytes
    return numbers


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a line that a crash cut short is left out."""
    path = Path(directory) / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


class MetricsWriter:
    """Appends records {"step": .., name: number} to metrics.jsonl and, if wanted, to TensorBoard.

    A run that continues from step `after` drops the records past it first: those steps will be made again,
    and no step appears twice. Numbers that are not finite are written as null, which every JSON reader
    takes.
    """

    def __init__(self, directory: str | Path, after: int = 0, tensorboard: bool = True):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [r for r in read_metrics(directory) if r["step"] <= after]
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=after + 1) if tensorboard else None

    def write(self, step: int, numbers: dict[str, float]) -> None:
        record = {"step": step, **{k: v if math.isfinite(v) else None for k, v in numbers.items()}}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()


class ProgressBar:
    """Steps done, loss, tokens a second and the time left, on a terminal; nothing with `shown=False`."""

    def __init__(self, total: int, done: int, shown: bool):
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._progress.add_task("training", total=total, completed=done, text="")

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def update(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, text=text)

    def say(self, text: str) -> None:
        """A line that stays above the bar."""
        self._progress.console.print(text, highlight=False)
