"""Results that are stored cell by cell: a benchmark that ends early loses nothing and goes on where it ended."""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

OUT_OF_MEMORY = "out of memory"
"""The one error that is a result: the same command would end in it again."""


class CellStore:
    """Cells in one JSON file, which is replaced as a whole after each of them.

    key: what tells one cell from another; a later measurement of the same replaces it.

    Raises:
        ValueError: its folder cannot be made.
    """

    def __init__(self, key: tuple[str, ...], path: Path, header: dict[str, Any], again: bool) -> None:
        make_folder("out", path.parent)
        stored = json.loads(path.read_text())["cells"] if path.exists() else []
        self.key, self.path, self.result, self.again = key, path, {**header, "cells": stored}, again

    def has(self, cell: dict[str, Any]) -> bool:
        """Whether this cell is there, measured with the same versions; one that failed is not."""
        wanted = (*self.key, "versions")
        done = [x for x in self.result["cells"] if x.get("error") in (None, OUT_OF_MEMORY) and "both_error" not in x]
        return not self.again and any(all(x.get(n) == cell[n] for n in wanted) for x in done)

    def put(self, cell: dict[str, Any]) -> None:
        """Stores a cell with the command that measured it: those of one file may come from several runs."""
        cell = {**cell, **({"command": self.result["command"]} if "command" in self.result else {})}
        with _locked(self.path.parent):
            # Another process may have stored cells of its own since.
            stored = json.loads(self.path.read_text())["cells"] if self.path.exists() else []
            self.result["cells"] = [*(x for x in stored if any(x[name] != cell[name] for name in self.key)), cell]
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self.result, indent=1) + "\n")
            os.replace(temporary, self.path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """For one process at a time; the lock goes with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_header(module: str, device: str, out: str) -> dict[str, Any]:
    """Device, date and command of a run. Another reader has another folder: its path says nothing. Nor do the minutes
    that were left, which change no cell."""
    pairs = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    kept = [(last, x) for last, x in pairs if "--minutes" not in (last, x.split("=")[0])]
    words = ["DIR" if last == "--out" else "--out=DIR" if x == f"--out={out}" else x for last, x in kept]
    return {
        "device": device,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join([f"python -m experiments.{module}", *words]),
    }


def arguments(options: Any) -> list[str]:
    """The command line of these options, without those that have their defaults."""
    words: list[str] = []
    for field in fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name}")
        else:
            words += [f"--{name}", *map(str, jax.tree.leaves(value))]
    return words


def make_folder(name: str, path: Path) -> None:
    """The folder that an option names, if it isn't there.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name}: got {path}, want a folder ({error.strerror})") from error


def as_written(text: str | None) -> str:
    """A docstring as `tyro.cli` shows it line by line: of lines that begin with a letter it would make one."""
    return indent((text or "").strip(), " ")


def run_command(main: Callable[[Any], Any], options: Any) -> None:
    """Of the command line: bad options end in one line."""
    try:
        main(options)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def device_file(out: str, kind: str, device: str) -> Path:
    return Path(out) / f"{kind}_{device.lower().replace(' ', '_')}.json"


def fingerprint(packages: Iterable[ModuleType], pattern: str = "*.py") -> str:
    """Of the sources of packages."""
    paths = [path for package in packages for path in sorted(Path(str(package.__file__)).parent.glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def check_alive() -> None:
    """A kernel that reads where it must not takes the whole process with it: what follows would fail for no reason."""
    try:
        jax.block_until_ready(jnp.ones(2) + jnp.ones(2))
    except Exception as error:
        raise SystemExit("the device answers no more; start again for the cells that are left") from error
