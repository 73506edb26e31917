"""One setting for every test: CPU with eight simulated devices, strict promotion, annotations checked.

QDELTA_TEST_PLATFORM=gpu runs the same tests on an accelerator; QDELTA_TEST_OPTIMIZED=1 compiles with all of LLVM's
optimisations, which takes two to three times as long. This file must be loaded before jax is.
"""

import gc
import os
import shutil
import tempfile
from pathlib import Path

PLATFORM = os.environ.get("QDELTA_TEST_PLATFORM", "cpu")
DEVICES = 8

if PLATFORM == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = [x for x in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in x]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={DEVICES}"])
    # The interpreter of GPU kernels waits for ever where their threads outnumber XLA's.
    os.environ.setdefault("NPROC", "16")
else:
    # The whole memory of a GPU is not ours to take: the workers of xdist share it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Processes of one session (the workers of xdist, programs that a test starts) share their compilations; a later
# session starts afresh, so that a stale entry can never decide a test. All of them: most are single operations that a
# call outside of jit compiles, which take little each and much together.
OWNS_CACHE = "QDELTA_TEST_CACHE" not in os.environ
CACHE = os.environ.setdefault("QDELTA_TEST_CACHE", tempfile.mkdtemp(prefix="qdelta_jax_tests_"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if PLATFORM != "cpu":
    # float32 tolerances are meant for float32 products; an accelerator's default would round operands to 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
if PLATFORM == "cpu" and os.environ.get("QDELTA_TEST_OPTIMIZED") != "1":
    # XLA's own passes stay; LLVM's expensive ones are most of the time of a suite that compiles much and runs little.
    jax.config.update("jax_disable_most_optimizations", True)

SELF_CHECKED = {"checks", "delta_rule", "implementations", "rules", "segments"}
"""Modules that say themselves, in a ValueError, what is wrong with an argument: beartype would raise first."""


def checked_modules() -> list[str]:
    package = Path(__file__).parents[1] / "qdelta_jax"
    names = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    return [f"qdelta_jax.{name}" for name in sorted(names - SELF_CHECKED - {"__init__"})]


install_import_hook(checked_modules(), "beartype.beartype")


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish(session):
    """Tracing allocates much that lives on: the collector would look at all modules and caches again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_unconfigure(config):
    if OWNS_CACHE:
        shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture
def x64():
    """float64 inside one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def cpu_devices():
    """The eight simulated devices."""
    devices = jax.devices("cpu")
    if len(devices) < DEVICES:
        pytest.skip(f"needs {DEVICES} CPU devices, found {len(devices)}")
    return devices[:DEVICES]
