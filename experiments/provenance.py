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


def config(names: tuple[str, ...], cells: list[dict[str, Any]]) -> str:
    """Every field with the values that it has in some cell, in the order in which they come."""
    found: dict[str, dict[str, None]] = {}
    for cell in cells:
        for name, value in leaves({name: cell[name] for name in names if name in cell}):
            found.setdefault(name, {})[show(value)] = None
    return "; ".join(f"{name} {' / '.join(values)}" for name, values in found.items())


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
