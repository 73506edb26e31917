"""Where the numbers of a stored result come from: versions, seeds, configs and commands, in words."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any


def stored_versions(cell: dict[str, Any]) -> dict[str, Any]:
    """What a cell was measured with: packages, and a fingerprint of the sources."""
    source = {"source": cell["source"]} if "source" in cell else {}
    return {**cell.get("versions", {}), **source}


def versions(of: Callable[[dict[str, Any]], dict[str, Any]], cells: list[dict[str, Any]]) -> list[str]:
    """Lines with all sets of versions; where there are several, with how much was measured with each."""
    sets = Counter("; ".join(f"{k} {v}" for k, v in of(cell).items()) or "not stored" for cell in cells)
    if len(sets) < 2:
        return [f"- versions: {next(iter(sets), 'not stored')}"]
    return [f"- versions: {len(sets)} sets", *(f"  - {n} of {len(cells)}: {words}" for words, n in sets.items())]


def seeds(cells: list[dict[str, Any]]) -> str:
    """How many, and which; those that picked a learning rate apart from those that are reported.

    >>> seeds([{"seed": 0, "sweep": True}, {"seed": 1, "sweep": False}, {"seed": 2, "sweep": False}])
    '2 (1, 2), and 1 (0) for the sweep'
    """

    def count(sweep: bool) -> str:
        found = sorted({cell["seed"] for cell in cells if "seed" in cell and cell.get("sweep", False) == sweep})
        return f"{len(found)} ({', '.join(map(str, found))})" if found else ""

    parts = [count(False), f"{count(True)} for the sweep" if count(True) else ""]
    return ", and ".join(filter(None, parts)) or "not stored"


def config(names: tuple[str, ...], cells: list[dict[str, Any]], by: str = "model") -> list[str]:
    """Lines with the settings of all cells: those that are the same in all, the values that each group of cells takes,
    and what one group has and another has not.

    Args:
        names: fields of a cell; of dicts, all that they hold. Of two settings of one name the later counts.
        cells: that were measured.
        by: the field that tells the groups apart.

    >>> config(("model", "rate", "layers"), [{"model": m, "rate": r, "layers": 2} for m in "ab" for r in (1, 2)])
    ['- config: layers 2', '  - each model: rate 1 / 2', '  - model: a / b']
    >>> cells = [{"model": "a", "heads": 4}, {"model": "b", "heads": 2}, {"model": "b", "heads": 1}]
    >>> config(("model", "heads"), cells)
    ['- config: by model', '  - a: heads 4', '  - b: heads 1 / 2']
    """
    flat = [dict(leaves({name: cell[name] for name in names if name in cell})) for cell in cells]
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in flat:
        groups.setdefault(show(cell[by]) if by in cell else "not stored", []).append(cell)
    every = list(dict.fromkeys(name for cell in flat for name in cell if len(groups) < 2 or name != by))
    if len(groups) < 2:
        return [f"- config: {listed(every, flat) or 'not stored'}"]
    found = {name: [taken(name, group) for group in groups.values()] for name in every}
    shared = [name for name in every if all(set(values) == set(found[name][0]) for values in found[name])]
    same = [name for name in shared if len(found[name][0]) == 1]
    ranges = [name for name in shared if name not in same]
    own = [name for name in every if name not in shared]
    lines = [f"- config: {listed(same, flat) or f'by {by}'}"]
    lines += [f"  - each {by}: {listed(ranges, flat)}"] if ranges else []
    if not own:
        return [*lines, f"  - {by}: {' / '.join(groups)}"]
    return [*lines, *(f"  - {group}: {listed(own, inside) or 'as above'}" for group, inside in groups.items())]


def listed(names: list[str], cells: list[dict[str, Any]]) -> str:
    """Names with the values that they take; those that no cell has are left out."""
    values = {name: taken(name, cells) for name in names if any(name in cell for cell in cells)}
    return "; ".join(f"{name} {' / '.join(found)}" for name, found in values.items())


def taken(name: str, cells: list[dict[str, Any]]) -> list[str]:
    """The values of a setting, numbers by size, others as they come; many numbers as their range.

    >>> taken("x", [{"x": 10}, {"x": 9}, {}]), taken("x", [{"x": n} for n in (5, 3, 1, 2, 4)])
    (['9', '10', 'not stored'], ['1 to 5'])
    """
    values = [cell[name] for cell in cells if name in cell]
    missing = ["not stored"] if len(values) < len(cells) else []
    numbers = [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) < len(values):
        return [*dict.fromkeys(map(show, values)), *missing]
    found = list(map(show, sorted(set(numbers))))
    return [*(found if len(found) < 5 else [f"{found[0]} to {found[-1]}"]), *missing]


def leaves(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those of dicts inside, too."""
    for name, value in config.items():
        yield from leaves(value) if isinstance(value, dict) else [(name, value)]


def show(value: Any) -> str:
    """
    >>> show(0.004), show(["rule", "window"]), show(None)
    ('0.004', '[rule window]', 'none')
    """
    if isinstance(value, list):
        return f"[{' '.join(map(show, value))}]"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def commands(result: dict[str, Any]) -> list[str]:
    """Lines with every command that measured something of it.

    >>> commands({"command": "a", "cells": [{"command": "a"}, {"command": "b"}, {}]})
    ['- command: `a`', '- command: `b`', '- command: of 1 measurement not stored (the last run: `a`)']
    """
    last = f"`{result['command']}`" if result.get("command") else "not stored"
    cells = result.get("cells")
    if cells is None:
        return [f"- command: {last}"]
    found = [f"- command: `{x}`" for x in dict.fromkeys(cell["command"] for cell in cells if "command" in cell)]
    missing = sum("command" not in cell for cell in cells)
    some = f"{missing} measurement{'s' * (missing > 1)}"
    return [*found, f"- command: of {some} not stored (the last run: {last})"] if missing else found
