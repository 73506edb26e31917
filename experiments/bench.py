"""How fast and how large is the chunked solver? Times, compiled memory and, where torch is at hand, its neighbours.

    python -m experiments.bench                                  two CPU cores: B=1, T=4096, H=4, K=V=64, float32
    python -m experiments.bench --shape long --dtype bfloat16 --chunk-size 128          a GPU: T=32768, H=16, K=V=128
    python -m experiments.bench --torch-python PATH              beside torch, in the same run, by another interpreter

Times are medians over repeats of host-synchronised calls, so they contain the launch. Temporary memory is what the
compiler reports for the jitted gradient. Results go to experiments/results/bench_DEVICE.json.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import qdelta_jax as qd
from experiments.store import as_written, run_command
from tests.cases import SHAPES, Shape, make_cotangents, make_inputs

RESULTS = Path(__file__).parent / "results"
RULES = ("gated_delta_net", "q_delta", "kda", "gated_delta_net2")


@dataclass(frozen=True)
class Bench:
    """What is measured.

    Args:
        rules: names in `qdelta_jax.RULES`.
        shape: a name in tests/cases.py.
        dtype: of q, k and v.
        chunk_size: tokens of a chunk.
        lengths: of the rows of the memory table.
        repeats: calls that are timed.
        scan: time the token-by-token form, too.
        torch_python: an interpreter that has torch (and transformers, fla) for the side-by-side run.
        out: name of the file in experiments/results.
    """

    rules: tuple[str, ...] = RULES
    shape: str = "benchmark"
    dtype: Literal["float32", "bfloat16"] = "float32"
    chunk_size: int = 64
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    repeats: int = 15
    scan: bool = True
    torch_python: str | None = None
    out: str | None = None


def main(bench: Bench) -> dict[str, Any]:
    check(bench)
    shape = SHAPES[bench.shape]
    device = jax.devices()[0].device_kind
    result: dict[str, Any] = {
        "device": device,
        "jax": jax.__version__,
        "shape": shape._asdict(),
        "dtype": bench.dtype,
        "chunk_size": bench.chunk_size,
        # Another reader has another interpreter: its path says nothing.
        "command": " ".join(
            ["python -m experiments.bench", *("PATH" if x == bench.torch_python else x for x in sys.argv[1:])]
        ),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    for rule in bench.rules:
        row = measure(rule, shape, bench)
        result["rows"].append(row)
        print(format_row(row), flush=True)
    if bench.torch_python:
        result["torch"] = beside_torch(bench.torch_python, shape, bench.repeats)
        print(json.dumps(result["torch"], indent=1))
    RESULTS.mkdir(exist_ok=True)
    name = bench.out or f"bench_{device.lower().replace(' ', '_')}_{bench.shape}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(f"stored in {RESULTS / name}")
    return result


def check(bench: Bench) -> None:
    """Before anything is measured.

    Raises:
        ValueError: a bad value.
    """
    for name, values, known in (("rules", bench.rules, tuple(qd.RULES)), ("shape", (bench.shape,), tuple(SHAPES))):
        strange = sorted(set(values) - set(known))
        if strange or not values:
            raise ValueError(f"{name}: got {strange or 'none'}, want some of {known}")
    for name in ("chunk_size", "lengths", "repeats"):
        value = getattr(bench, name)
        if not all(x > 0 for x in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{name}: got {value}, want numbers above 0")


def measure(rule: str, shape: Shape, bench: Bench) -> dict[str, Any]:
    arguments = prepare(rule, shape, bench.dtype)
    row: dict[str, Any] = {"rule": rule, "input_bytes": sum(x.nbytes for x in jax.tree.leaves(arguments[0]))}
    for implementation in ("xla", "scan") if bench.scan else ("xla",):
        forward, gradient = programs(rule, implementation, bench.chunk_size)
        row[implementation] = {
            "forward_ms": timed(forward, arguments[:1], bench.repeats),
            "forward_backward_ms": timed(gradient, arguments, bench.repeats),
        }
    row["temporary_bytes"] = {
        length: temporary_bytes(rule, shape._replace(length=length), bench) for length in bench.lengths
    }
    return row


def prepare(rule: str, shape: Shape, dtype: str) -> tuple[Any, Any]:
    """(q, k, v, gates) in dtype, log_decay in float32, and the cotangents of output and state."""
    inputs = make_inputs(rule, shape)

    def cast(name: str, x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.float32 if name == "log_decay" else dtype)

    gates = {name: cast(name, x) for name, x in inputs["gates"].items()}
    out, state = make_cotangents(shape)
    cotangents = jnp.asarray(out, dtype), jnp.asarray(state, jnp.float32)
    return (*(cast(name, inputs[name]) for name in "qkv"), gates), cotangents


def programs(rule: str, implementation: Any, chunk_size: int) -> tuple[Callable, Callable]:
    """The jitted call, and the jitted call with all its gradients."""

    def call(inputs: Any) -> Any:
        q, k, v, gates = inputs
        return qd.delta_rule(q, k, v, rule, gates, chunk_size=chunk_size, implementation=implementation)

    def with_gradient(inputs: Any, cotangents: Any) -> Any:
        result, pull_back = jax.vjp(call, inputs)
        return result, pull_back(cotangents)

    return jax.jit(call), jax.jit(with_gradient)


def timed(function: Callable, arguments: Any, repeats: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[2:])


def time_steps(step: Callable[[], Any], wait: Callable[[Any], Any], steps: int) -> tuple[float, Any]:
    """Milliseconds of a step after the first, on average over steps of which only the last is waited for, as training
    does; and what that one returned."""
    wait(step())
    start = time.perf_counter()
    for _ in range(steps):
        result = step()
    wait(result)
    return 1e3 * (time.perf_counter() - start) / steps, result


def temporary_bytes(rule: str, shape: Shape, bench: Bench) -> int:
    """What the compiled gradient needs besides its inputs and outputs."""
    gradient: Any = programs(rule, "xla", bench.chunk_size)[1]
    shapes = jax.eval_shape(lambda: prepare(rule, shape._replace(length=8), bench.dtype))
    stretch = lambda x: jax.ShapeDtypeStruct(  # noqa: E731
        tuple(shape.length if n == 8 and i == 1 else n for i, n in enumerate(x.shape)), x.dtype
    )
    inputs, (out, state) = shapes
    arguments = jax.tree.map(stretch, inputs), (stretch(out), state)
    return int(gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes)


def format_row(row: dict[str, Any]) -> str:
    parts = [f"{row['rule']:18s}"]
    for name in ("xla", "scan"):
        if name in row:
            parts.append("{} {:8.1f} / {:8.1f} ms".format(name, *row[name].values()))
    if "scan" in row:
        parts.append("{:5.1f}x".format(row["scan"]["forward_backward_ms"] / row["xla"]["forward_backward_ms"]))
    memory = {length: round(size / 2**20, 1) for length, size in row["temporary_bytes"].items()}
    return "  ".join([*parts, f"temporary MiB {memory}", f"inputs {row['input_bytes'] / 2**20:.1f} MiB"])


def beside_torch(python: str, shape: Shape, repeats: int) -> Any:
    script = Path(__file__).parent / "bench_torch.py"
    sizes = json.dumps({**shape._asdict(), "repeats": repeats})
    done = subprocess.run([python, str(script), sizes], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-500:]}


if __name__ == "__main__":
    run_command(main, tyro.cli(Bench, description=as_written(__doc__)))
