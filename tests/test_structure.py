"""The house: modules import downward only, kernels know nothing of the library, files stay short."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qdelta_jax

ROOT = Path(__file__).parents[1]
LIBRARY = Path(qdelta_jax.__file__).parent

FLOORS = [
    {"pallas_kernels"},
    {"rules", "recurrence", "checks", "segments", "normalize", "tasks", "kept"},
    {"chunked"},
    {"delta_rule"},
    {"layers"},
    {"models"},
    {"dynamics"},
    {"training", "interop", "data"},
    {"experiments"},
]
"""From the ground up; a module imports from its own floor and those below. Other modules are parts of `chunked`."""

LONGEST = 400
"""Lines of a file."""


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py") if "results" not in p.parts)


def room(name: str) -> str | None:
    """The part of the house that a dotted name belongs to; a public name of the package counts as `delta_rule`."""
    parts = name.split(".")
    if parts[0] != "qdelta_jax":
        return parts[0] if parts[0] in ("pallas_kernels", "experiments") else None
    known = len(parts) > 1 and any(parts[1] in rooms for rooms in FLOORS)
    module = len(parts) > 1 and ((LIBRARY / parts[1]).is_dir() or (LIBRARY / f"{parts[1]}.py").exists())
    return parts[1] if known or module else "delta_rule"


def floor(name: str) -> int:
    found = [number for number, rooms in enumerate(FLOORS) if name in rooms]
    return found[0] if found else floor("chunked")


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    "path", sources("qdelta_jax", "pallas_kernels", "experiments"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_go_down(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts == ("qdelta_jax", "__init__"):
        return  # the front door: it may name everything
    own = room(".".join(parts))
    for name in imports(path):
        other = room(name)
        assert other is None or floor(other) <= floor(own), f"{path} imports {name}, which lives above it"


@pytest.mark.parametrize("path", sources("pallas_kernels"), ids=lambda p: p.name)
def test_kernels_know_nothing_of_the_library(path):
    assert not [name for name in imports(path) if name.split(".")[0] in ("qdelta_jax", "flax", "experiments")]


@pytest.mark.parametrize(
    "path",
    sources("qdelta_jax", "pallas_kernels", "experiments", "tests", "notebooks"),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.core
def test_importing_the_library_is_cheap():
    """The core needs jax alone, and starts no backend: whoever imports it may still choose one."""
    program = (
        "import sys, qdelta_jax, jax\n"
        "heavy = {'flax', 'optax', 'orbax', 'grain', 'tyro', 'tokenizers', 'matplotlib', 'experiments'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.core
def test_public_names():
    assert set(qdelta_jax.__all__) <= set(dir(qdelta_jax))
    assert len(qdelta_jax.__all__) <= 25
    for name in qdelta_jax.__all__:
        x = getattr(qdelta_jax, name)
        assert name == "RULES" or x.__doc__, f"{name} has no docstring"


def test_data_is_small():
    for path in (ROOT / "tests" / "data").iterdir():
        assert path.stat().st_size < 1e6, path
