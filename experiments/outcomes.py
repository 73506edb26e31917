"""What tables of swept runs share: the picked rate and its seeds, rows, remarks, and verdicts on published orders."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from statistics import mean
from typing import Any, NamedTuple

Cell = dict[str, Any]
Row = dict[str, Any]
Ends = tuple[float, float] | None
"""Of an interval; None where there is none."""

Q_DELTA, GDN2 = "arXiv 2606.08804", "arXiv 2605.22791"


class Claim(NamedTuple):
    """better, worse: models, of which a paper reports that the first does better. source: of it."""

    better: str
    worse: str
    source: str


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


def picked(
    cells: Iterable[Cell], place: Callable[[Cell], Any], names: Iterable[str], sign: int = 1
) -> Iterator[tuple[Row, list[Cell]]]:
    """For each group of cells of one `place` that has a picked rate: what rows of all tables say, and its seeds' cells.

    names: of what the cells of a group have in common, and the row says.
    """
    for _, group in groupby(sorted(cells, key=place), key=place):
        members = list(group)
        sweep = [cell for cell in members if cell["sweep"]]
        rate = pick(sweep, sign=sign)
        if rate is None:
            continue
        some = next(cell for cell in sweep if "error" not in cell)
        tried = sorted({cell["rate"] for cell in sweep})
        row = {
            **{name: some[name] for name in names},
            "trials": len(sweep),
            "rate": rate,
            "edge": len(tried) > 1 and rate in (tried[0], tried[-1]),
            "failed": sum("error" in cell for cell in members),
        }
        yield row, [x for x in members if not x["sweep"] and x["rate"] == rate and "error" not in x]


def measured_alike(x: Cell | Row) -> str:
    """What cells and rows that may be compared have in common."""
    return json.dumps([x["options"], x["versions"]], sort_keys=True)


def sections(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows that may be compared with each other, which stand side by side."""
    return [list(group) for _, group in groupby(rows, key=measured_alike)]


def remark(row: Row, edge: str = "best rate at the edge of those tried") -> str:
    parts = [edge] if row["edge"] else []
    parts += [f"{row['failed']} runs failed"] if row["failed"] else []
    return "; ".join(parts)


def verdict(ends: Ends) -> str:
    """Whether a difference is above 0, from its interval.

    >>> verdict((0.1, 2.0)), verdict((-2.0, -0.1)), verdict((-1.0, 2.0)), verdict(None)
    ('yes', 'no: the other way round', 'the noise is too large to tell', 'too few seeds')
    """
    if ends is None:
        return "too few seeds"
    if ends[0] > 0:
        return "yes"
    return "no: the other way round" if ends[1] < 0 else "the noise is too large to tell"
