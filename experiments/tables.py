"""What the tables of all results share, and the files that are made of a stored result."""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
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
        ValueError: with the file's name, if it is no JSON object.
    """
    try:
        result = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: got {error}, want JSON") from error
    if not isinstance(result, dict):
        raise ValueError(f"{path.name}: got a {type(result).__name__}, want a JSON object")
    return result


def write(path: Path, table: Table, plot: Plot | None = None) -> list[Path]:
    """The table as .md and, where there is one, the plot as .png beside a stored result; prints the table."""
    result = read(path)
    made = [path.with_suffix(".md")]
    made[0].write_text(table(result))
    if plot is not None:
        made.append(path.with_suffix(".png"))
        draw(result, plot, made[1])
    print(f"{table(result)}\n{', '.join(map(str, made))}")
    return made


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
