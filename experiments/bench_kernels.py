"""How fast are the GPU kernels? Every rule on every shape: "mosaic", "xla" and the peer's, side by side in one run.

    python -m experiments.bench_kernels                                             one NVIDIA GPU, bfloat16 inputs
    python -m experiments.bench_kernels --rules kda q_delta --shapes 1x32768x16 --implementations mosaic --again
    python -m experiments.bench_kernels --warm-peer                   first, where torch, triton and fla are installed

Device time is what the GPU's kernels take, without launches: for JAX the sum of their durations, for the peer the
replay of a CUDA graph. Whole calls are timed by the host's clock, each waited for. Both are medians, and nothing clears
the GPU's caches between two calls. Errors are relative RMS errors, of the first sequence and its first heads, against
the token-by-token definition in float64 on the same rounded inputs. The floor is the time of reading each input and
writing the output once. With --gradients xla (or kernels) forward and backward together are measured, too: see
experiments/bench_gradients.py.

Results go to experiments/results/kernels_DEVICE.json after each cell; what is stored there with the same versions and
sources isn't measured again. `python -m experiments.plot_kernels FILE` makes a table and a plot of it.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from typing import Any, Literal

# The peer needs memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import pallas_kernels
import qdelta_jax as qd
from experiments import bench_gradients, bench_peer
from experiments.bench import RESULTS, timed
from experiments.bench_peer import PEERS, find_shape
from experiments.device_time import device_time, repeats_for
from experiments.plot_kernels import summary, table
from experiments.store import (
    CellStore,
    as_written,
    check_alive,
    describe,
    device_file,
    fingerprint,
    make_header,
    run_command,
)
from tests.cases import KERNEL_SHAPES, SHAPES, Shape, gate_shape

HEADS = 2
"""Heads of q and k, of the first sequence, whose error is measured."""

KEY = ("rule", "shape", "dtype", "implementation", "chunk_size", "residuals")
"""What tells one cell from another; a later measurement of the same replaces it."""


@dataclass(frozen=True)
class Bench:
    """What is measured, and for how long.

    Args:
        rules: names in `qdelta_jax.RULES`.
        shapes: names in tests/cases.py.
        implementations: those of `delta_rule`, and "peer".
        dtype: of q, k and v.
        chunk_size: of "xla"; the kernels know 64.
        minutes: no cell is begun after that; the same command goes on with what is left.
        bandwidth: of the GPU's memory in TB/s, for the floor.
        gradients: measure forward and backward together, too; "kernels": "mosaic" with the gradient kernels.
        residuals: what "mosaic" saves for its gradient.
        peers: which variants of the peer.
        again: measure what is stored, too.
        threads: that compile.
        warm_peer: only fill Triton's cache.
        out: folder of the results.
    """

    rules: tuple[str, ...] = tuple(qd.RULES)
    shapes: tuple[str, ...] = tuple(KERNEL_SHAPES)
    implementations: tuple[str, ...] = ("mosaic", "xla", "peer")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    chunk_size: int = 64
    minutes: float = 5.5
    bandwidth: float = 4.8
    gradients: Literal["no", "xla", "kernels"] = "no"
    residuals: Literal["recompute", "keep"] = "recompute"
    peers: tuple[str, ...] = tuple(dict.fromkeys(peer.label for of in PEERS.values() for peer in of))
    again: bool = False
    threads: int = min(16, os.cpu_count() or 1)
    warm_peer: bool = False
    out: str = str(RESULTS)


Store = partial(CellStore, KEY)
"""Of this benchmark's cells."""


def main(bench: Bench) -> dict[str, Any]:
    began = time.perf_counter()
    check(bench)
    if bench.warm_peer:
        workers = os.cpu_count() or 1
        bench_peer.warm(bench.rules, bench.shapes, bench.dtype, workers, bench.gradients != "no", bench.peers)
        return {}
    device = jax.devices()[0].device_kind
    header = {**make_header("bench_kernels", device, bench.out), "bandwidth_tb_s": bench.bandwidth}
    store = Store(device_file(bench.out, "kernels", device), header, bench.again)
    left = 0
    for name in bench.shapes:
        cells = {rule: [c for c in make_cells(rule, name, bench) if not store.has(c)] for rule in bench.rules}
        programs: dict[str, dict[str, Any]] = {}
        for rule in (rule for rule in bench.rules if cells[rule]):
            if time.perf_counter() - began > 60 * bench.minutes:
                left += len(cells[rule])
                continue
            programs = programs or compile_all(cells, find_shape(name), bench)
            for cell in measure(rule, find_shape(name), cells[rule], programs[rule], bench):
                store.put(cell)
                print(format_cell(cell), flush=True)
                if "error" in cell:
                    check_alive()
    print(f"\n{table(store.result)}\n{summary(store.result)}\nstored in {store.path.name}")
    print(f"{left} cells are left: the same command goes on" if left else "nothing is left", flush=True)
    return store.result


def check(bench: Bench) -> None:
    """Before anything is measured.

    Raises:
        ValueError: a bad value.
    """
    labels = tuple(dict.fromkeys(peer.label for of in PEERS.values() for peer in of))
    shapes, implementations = (*KERNEL_SHAPES, *SHAPES), ("scan", "xla", "mosaic", "peer")
    known = {"rules": tuple(qd.RULES), "shapes": shapes, "implementations": implementations, "peers": labels}
    for name, names in known.items():
        strange = sorted(set(getattr(bench, name)) - set(names))
        if strange or not getattr(bench, name):
            raise ValueError(f"{name}: got {strange or 'none'}, want some of {names}")
    if not bench.minutes >= 0:
        raise ValueError(f"minutes: got {bench.minutes}, want 0 or more")
    for name in ("chunk_size", "bandwidth", "threads"):
        if not getattr(bench, name) > 0:
            raise ValueError(f"{name}: got {getattr(bench, name)}, want a number above 0")


def make_cells(rule: str, shape: str, bench: Bench) -> list[dict[str, Any]]:
    """The cells of one rule and shape, not yet measured; none for a peer that can't run here."""
    own: list[dict[str, Any]] = [
        {
            **{"implementation": name, "chunk_size": bench.chunk_size, "residuals": bench.residuals},
            "versions": jax_versions(name),
        }
        for name in bench.implementations
        if name != "peer"
    ]
    others: list[dict[str, Any]] = [
        {"implementation": peer.label, "chunk_size": None, "residuals": None, "versions": bench_peer.versions()}
        for peer in (PEERS.get(rule, ()) if "peer" in bench.implementations else ())
        if peer.label in bench.peers and bench_peer.can_run(peer.module)
    ]
    cell = {"rule": rule, "shape": shape, "dtype": bench.dtype, "date": time.strftime("%Y-%m-%d")}
    cells = [{**cell, **x} for x in (*own, *others)]
    with_gradients = {} if bench.gradients == "no" else {"gradients": f"{bench.gradients}, {bench.residuals}"}
    return [{**x, "versions": {**x["versions"], **with_gradients}} for x in cells]


@cache
def jax_versions(implementation: str) -> dict[str, str]:
    """Versions, and a fingerprint of the sources that an implementation runs."""
    packages = [qd, pallas_kernels] if implementation == "mosaic" else [qd]
    return {"jax": jax.__version__, "jaxlib": version("jaxlib"), "source": fingerprint(packages)}


def compile_all(cells: dict[str, list[dict]], shape: Shape, bench: Bench) -> dict[str, dict[str, Any]]:
    """By rule and name: JAX's programs and the reference, or the exceptions that came instead."""
    jobs = [(rule, c["implementation"]) for rule, todo in cells.items() for c in todo if c["chunk_size"]]
    jobs += [(rule, "reference") for rule, todo in cells.items() if todo]
    with ThreadPoolExecutor(bench.threads) as pool:
        made = list(pool.map(lambda job: build(job[0], job[1], shape, bench), jobs))
        if bench.gradients != "no":
            made += pool.map(lambda job: build_gradients(job[0], job[1], shape, bench), jobs)
            jobs += [(rule, f"{name} gradients") for rule, name in jobs]
    return {rule: {name: x for (r, name), x in zip(jobs, made, strict=True) if r == rule} for rule in cells}


def build_gradients(rule: str, name: str, shape: Shape, bench: Bench) -> Any:
    """The same for forward and backward; the reference is the chunked form in float64."""
    is_reference = name == "reference"
    options = {"implementation": "xla" if is_reference else name, "chunk_size": bench.chunk_size}
    options |= {"residuals": bench.residuals}
    arguments = jax.eval_shape(lambda: make_arguments(rule, shape, bench.dtype))
    cotangents = jax.eval_shape(lambda: bench_gradients.make_cotangents(shape, bench.dtype))
    with jax.enable_x64(is_reference):
        if is_reference:
            heads = HEADS * shape.value_heads // shape.heads
            arguments = jax.eval_shape(first_heads, arguments)
            cotangents = jax.eval_shape(lambda x: bench_gradients.first_heads(x, heads), cotangents)
        return bench_gradients.build(rule, arguments, cotangents, bench.gradients, **options)


def build(rule: str, name: str, shape: Shape, bench: Bench) -> Any:
    """The compiled call of one implementation, or of the definition in float64, or the exception."""
    is_reference = name == "reference"
    options: dict[str, Any] = {"implementation": "scan" if is_reference else name, "chunk_size": bench.chunk_size}
    call = jax.jit(lambda q, k, v, gates: qd.delta_rule(q, k, v, rule, gates, **options))
    try:
        arguments = jax.eval_shape(lambda: make_arguments(rule, shape, bench.dtype))
        with jax.enable_x64(is_reference):
            return call.lower(*(jax.eval_shape(first_heads, arguments) if is_reference else arguments)).compile()
    except Exception as error:  # Kept: it becomes the text of a cell.
        return error


def make_arguments(rule: str, shape: Shape, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """q, k, v and gates as tests/cases.py draws them, but on the device, in dtype; log_decay in float32."""
    batch, length, heads, value_heads, key_dim, value_dim = shape
    keys = iter(jax.random.split(jax.random.key(0), 8))
    q, k, v = (
        jax.random.normal(next(keys), (batch, length, n, d), jnp.float32)
        for n, d in ((heads, key_dim), (heads, key_dim), (value_heads, value_dim))
    )
    q, k = ((x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype) for x in (q, k))
    gates = {}
    for gate in qd.RULES[rule].gates:
        x = jax.random.uniform(next(keys), gate_shape(rule, gate, shape), jnp.float32)
        gates[gate] = -1.5 * x**3 if gate == "log_decay" else x.astype(dtype)
    return q, k, v.astype(dtype), gates


def first_heads(arguments: Any) -> Any:
    """The arguments of the first sequence and its first heads, in float64."""
    heads = arguments[0].shape[2]
    return jax.tree.map(lambda x: x[:1, :, : HEADS * x.shape[2] // heads].astype(jnp.float64), arguments)


def measure(
    rule: str, shape: Shape, cells: list[dict[str, Any]], programs: dict[str, Any], bench: Bench
) -> Iterator[dict[str, Any]]:
    """The cells of one rule and shape with their numbers; all see the same arrays."""
    least = floor(jax.eval_shape(lambda: make_arguments(rule, shape, bench.dtype)), bench.bandwidth)
    try:
        arguments = jax.block_until_ready(make_arguments(rule, shape, bench.dtype))
        want = reference(programs["reference"], arguments)
        wanted = reference_gradients(programs, arguments, shape, bench)
    except Exception as error:
        yield from ({**cell, **least, "error": f"reference: {describe(error)}"} for cell in cells)
        return
    for cell in cells:
        found = {**cell, **least, **numbers(cell, programs, arguments, want)}
        if wanted is not None and "call_ms" in found:
            found |= gradient_numbers(cell, programs, arguments, *wanted)
        yield found


def reference_gradients(programs: dict[str, Any], arguments: Any, shape: Shape, bench: Bench) -> Any:
    """Cotangents, and the gradients of the first heads by name; None if they are not measured."""
    if bench.gradients == "no":
        return None
    program = programs["reference gradients"]
    if isinstance(program, Exception):
        raise program
    cotangents = jax.block_until_ready(bench_gradients.make_cotangents(shape, bench.dtype))
    with jax.enable_x64(True):
        heads = HEADS * shape.value_heads // shape.heads
        made = program(first_heads(arguments), bench_gradients.first_heads(cotangents, heads))[1]
        return cotangents, bench_gradients.flat(made)


def gradient_numbers(
    cell: dict[str, Any], programs: dict[str, Any], arguments: Any, cotangents: Any, want: Any
) -> dict[str, Any]:
    """What is measured of forward and backward, or why nothing is."""
    try:
        for peer in PEERS.get(cell["rule"], ()):
            if peer.label == cell["implementation"]:
                return bench_peer.measure_gradients(peer, arguments, cotangents, want if peer.same else None)
        return bench_gradients.measure(programs[f"{cell['implementation']} gradients"], arguments, cotangents, want)
    except Exception as error:  # The forward pass has been measured.
        return {"both_error": describe(error)}


def numbers(cell: dict[str, Any], programs: dict[str, Any], arguments: Any, want: Any) -> dict[str, Any]:
    """Times and errors, or why there are none."""
    try:
        peers = [peer for peer in PEERS.get(cell["rule"], ()) if peer.label == cell["implementation"]]
        if peers:
            times, got = bench_peer.measure(peers[0], arguments, want[0].shape[1])
        else:
            times, got = run(programs[cell["implementation"]], arguments, want[0].shape[1])
        if peers and not peers[0].same:
            return {**times, "note": "computes another recurrence: no error"}
        return {
            **times,
            "output_error": relative_error(got[0], want[0]),
            "state_error": relative_error(got[1], want[1]),
        }
    except NotImplementedError as error:
        return {"reason": str(error)}
    except Exception as error:  # One cell fails, the others go on.
        return {"error": describe(error)}


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want| in the 2-norm."""
    if got.shape != want.shape:
        raise ValueError(f"got shape {got.shape}, want {want.shape}")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def reference(program: Any, arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output [T, heads, V] and state [heads, K, V] of the first heads."""
    if isinstance(program, Exception):
        raise program
    with jax.enable_x64(True):
        out, state = program(*first_heads(arguments))
        return np.asarray(out[0]), np.asarray(state[0])


def run(program: Any, arguments: Any, heads: int) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    """Times of a compiled call, and output and state of the first sequence's first heads."""
    if isinstance(program, Exception):
        raise program
    out, state = program(*arguments)
    got = np.asarray(out[0, :, :heads], np.float64), np.asarray(state[0, :heads], np.float64)
    del out, state
    repeats = repeats_for(timed(program, arguments, 1))
    device_ms, ruler = device_time(program, arguments, repeats)
    return {"call_ms": timed(program, arguments, repeats), "device_ms": device_ms, "ruler": ruler}, got


def floor(arguments: Any, bandwidth: float) -> dict[str, Any]:
    """Bytes of all inputs and the output (as large as v), each moved once, and their time; the state's bytes apart."""
    q, _, v, _ = arguments
    moved = sum(x.size * x.dtype.itemsize for x in (*jax.tree.leaves(arguments), v))
    state = 4 * v.shape[0] * v.shape[2] * q.shape[-1] * v.shape[-1]
    return {"floor_bytes": moved, "state_bytes": state, "floor_ms": moved / bandwidth / 1e9}


def format_cell(cell: dict[str, Any]) -> str:
    names: tuple[str, ...] = ("device_ms", "call_ms", "floor_ms", "output_error", "state_error", "both_ms", "both_mib")
    names += ("gradient_error", "decay_gradient_error", "note", "reason", "error", "both_error")
    parts = [f"{x} {cell[x]:.3g}" if isinstance(cell[x], float) else str(cell[x]) for x in names if cell.get(x)]
    return "  ".join(["{shape:12s} {rule:18s} {implementation:14s}".format(**cell), *parts])


if __name__ == "__main__":
    run_command(main, tyro.cli(Bench, description=as_written(__doc__)))
