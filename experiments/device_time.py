"""Time that a call spends in GPU kernels: the sum of their durations, without the launches and gaps between them."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax


def device_time(program: Callable, arguments: Any, repeats: int) -> tuple[float | None, str | None]:
    """Milliseconds in kernels of program(*arguments), and what counted them; None on other devices than GPUs.

    CUPTI gives the median over repeats; a trace of JAX's profiler, which is used where CUPTI can't be, the mean.
    """
    if jax.default_backend() != "gpu":
        return None, None
    try:
        return cupti_time(program, arguments, repeats), "cupti"
    except Exception as error:  # Another subscriber, no library, kernels of changing number: many reasons, one remedy.
        print(f"CUPTI failed ({type(error).__name__}: {error}), a trace is used", flush=True)
    return trace_time(program, arguments, repeats), "trace"


def repeats_for(call_ms: float) -> int:
    """How often to repeat a call of that many milliseconds: about 0.3 s, 20 times at most."""
    return int(min(20, max(3, 300 / call_ms)))


def cheap_repeats(call_ms: float) -> int:
    """How often to repeat a long call: 3 times, or not at all (0) where that would last more than 5 s."""
    return 3 if 3 * call_ms <= 5000 else 0


def cupti_time(program: Callable, arguments: Any, repeats: int) -> float:
    from jax.experimental.mosaic.gpu import profiler

    _, times = profiler.measure(program, iterations=repeats)(*arguments)
    if not times:
        raise RuntimeError("no kernels were seen")
    return float(median(times if isinstance(times, list) else [times]))


def trace_time(program: Callable, arguments: Any, repeats: int) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(program(*arguments))
        (path,) = Path(folder).rglob("*.xplane.pb")
        total = kernel_time(jax.profiler.ProfileData.from_file(str(path)))
    return total / repeats or None


def kernel_time(profile: Any) -> float:
    """Milliseconds of all kernels in a trace. Its other lines (modules, operations) show the same time again."""
    return sum(
        event.duration_ns / 1e6
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if not event.name.lower().startswith(("memcpy", "memset"))
    )
