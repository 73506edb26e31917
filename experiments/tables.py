"""What the tables of all results share, and the files that are made of a stored result."""

import hashlib
import json
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Table = Callable[[dict[str, Any]], str]
Plot = Callable[[dict[str, Any], Path], None]

STAMP = b"tEXtResult\0"
"""How the piece of a PNG begins that says from which result it was drawn."""


def header(titles: tuple[str, ...]) -> list[str]:
    return [line(titles), "|" + "---|" * len(titles)]


def line(values: tuple[str, ...]) -> str:
    """
    >>> line(("a", "b"))
    '| a | b |'
    """
    return f"| {' | '.join(values)} |"


def number(x: float | None) -> str:
    """
    >>> number(0.12345), number(None)
    ('0.123', '')
    """
    return "" if x is None else f"{x:.3g}"


def ratio(x: float | None, y: float | None) -> str:
    return f"{x / y:.2f}" if x and y else ""


def in_cell(text: str) -> str:
    """Text that stays inside its cell of a table.

    >>> in_cell("no | kernel")
    'no / kernel'
    """
    return text.replace("\n", " ").replace("|", "/")


def read(path: Path) -> dict[str, Any]:
    """A stored result.

    Raises:
        ValueError: with the file's name, if it can't be read or is no JSON object.
    """
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: got {error.strerror!r}, want a file that can be read") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: got {error}, want JSON") from error
    if not isinstance(result, dict):
        raise ValueError(f"{path}: got a {type(result).__name__}, want a JSON object")
    return result


@contextmanager
def naming(path: Path, result: dict[str, Any], module: str) -> Iterator[None]:
    """What is made inside of a stored result needs what experiments/MODULE.py stores.

    Raises:
        ValueError: with the file's name, if another experiment stored it, or something is missing or broken in it.
    """
    wanted = f"want what `python -m experiments.{module}` stores"
    found = re.match(r"python -m experiments\.(\w+)", str(result.get("command")))
    if found and found[1] != module:
        raise ValueError(f"{path}: got what `{found[0]}` stores, {wanted}")
    for name in ("cells", "rows"):
        if result.get(name) == []:
            raise ValueError(f"{path}: got no {name}, {wanted}")
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: got {got}, {wanted}") from error


def write(path: Path, module: str, table: Table, plot: Plot | None = None) -> list[Path]:
    """The table as .md and, where there is one, the plot as .png beside what experiments/MODULE.py stored; prints the
    table.

    Raises:
        ValueError: with the file's name, if it holds something else.
    """
    result = read(path)
    made = [path.with_suffix(".md")]
    with naming(path, result, module):
        text = table(result)
        if plot is not None:
            made.append(path.with_suffix(".png"))
            draw(result, plot, made[1])
    made[0].write_text(text)
    print(f"{text}\n{', '.join(map(str, made))}")
    return made


def run_plot(main: Callable[[Path], Any]) -> None:
    """The command line of a module that shows one stored result."""
    files = sys.argv[1:]
    if {"-h", "--help"} & set(files):
        usage = f"usage: python -m experiments.{Path(sys.argv[0]).stem} FILE.json"
        print(f"{usage}\n\n{(sys.modules[main.__module__].__doc__ or '').strip()}")
        return
    if len(files) != 1 or files[0].startswith("-"):
        print(f"got {' '.join(files) or 'nothing'}, want one FILE.json of experiments/results", file=sys.stderr)
        raise SystemExit(2)
    in_one_line(main, Path(files[0]))


def in_one_line(main: Callable[[Any], Any], argument: Any) -> None:
    """main(argument); a ValueError becomes one line and exit status 2."""
    try:
        main(argument)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def draw(result: dict[str, Any], plot: Plot, path: Path) -> None:
    """The plot, stamped with the result that it shows."""
    plot(result, path)
    stamp(path, digest(result))


def save(figure: Any, path: Path, **options: Any) -> None:
    """Without matplotlib's version: the same figure is the same file."""
    figure.savefig(path, metadata={"Software": None}, **options)


def digest(result: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:16]


def stamp(path: Path, text: str) -> None:
    """Puts text into a PNG, after its signature and header, which are 33 bytes."""
    data, piece = path.read_bytes(), STAMP + text.encode()
    packed = struct.pack(">I", len(piece) - 4) + piece + struct.pack(">I", zlib.crc32(piece))
    path.write_bytes(data[:33] + packed + data[33:])


def stamp_of(path: Path) -> str | None:
    """The text that `stamp` put there; None without file or stamp."""
    data = path.read_bytes() if path.exists() else b""
    begin = data.find(STAMP)
    if begin < 0:
        return None
    length = struct.unpack(">I", data[begin - 4 : begin])[0]
    return data[begin + len(STAMP) : begin + 4 + length].decode()
