"""The peer's kernels: chunked ops of flash-linear-attention (torch and Triton) and the official Q-Delta's.

    python -m experiments.bench_peer kda "fla safe_gate" bfloat16 both 8x4096x16 4x4096x16

runs one op once on each shape, so that Triton's compiled kernels are on disk; `bench_kernels --warm-peer` does this for
all of them at once. Nothing here is needed where torch isn't installed.
"""

import functools
import importlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import bench_gradients
from experiments.bench import timed
from experiments.device_time import repeats_for
from tests.cases import KERNEL_SHAPES, SHAPES, Shape, gate_shape

ENVIRONMENT = {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0", "FLA_CACHE_RESULTS": "0"}
"""fla's own Triton kernels, tuned anew in each process: never by numbers from processes that shared the GPU."""

TUNING = {"warmup": 10, "rep": 40}
"""Milliseconds that Triton's tuner spends on each candidate (its default is 25 and 100): a median of 40 runs of a
kernel of 1 ms, in a third of the time, since every op is tuned again for every number of heads."""


class Peer(NamedTuple):
    """One op: called as function(q, k, v, *gates, scale=, output_final_state=True, **options).

    same: whether it computes our recurrence, so that its error means something.
    """

    label: str
    module: str
    function: str
    gates: tuple[str, ...]
    options: dict[str, Any]
    same: bool = True


DELTA = {"use_qk_l2norm_in_kernel": False}
SAFE = {**DELTA, "safe_gate": True}
BETA = ("log_decay", "beta")
WRITE = ("log_decay", "erase", "write")

PEERS: dict[str, tuple[Peer, ...]] = {
    "linear_attention": (Peer("fla", "fla.ops.simple_gla", "chunk_simple_gla", (), {}),),
    "retnet": (Peer("fla", "fla.ops.simple_gla", "chunk_simple_gla", ("log_decay",), {}),),
    "mamba2": (Peer("fla", "fla.ops.simple_gla", "chunk_simple_gla", ("log_decay",), {}),),
    "gla": (Peer("fla", "fla.ops.gla", "chunk_gla", ("log_decay",), {}),),
    "delta_net": (Peer("fla", "fla.ops.delta_rule", "chunk_delta_rule", ("beta",), DELTA),),
    "gated_delta_net": (Peer("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", BETA, DELTA),),
    "kda": (
        Peer("fla", "fla.ops.kda", "chunk_kda", BETA, DELTA),
        Peer("fla safe_gate", "fla.ops.kda", "chunk_kda", BETA, SAFE),
    ),
    "gated_delta_net2": (
        Peer("fla", "fla.ops.gdn2", "chunk_gdn2", WRITE, DELTA),
        Peer("fla safe_gate", "fla.ops.gdn2", "chunk_gdn2", WRITE, SAFE),
    ),
    "q_delta": (Peer("official", "qdelta.qdelta_rule", "chunk_qdelta_rule", (*BETA, "feedback"), DELTA, same=False),),
}
"""By rule. safe_gate wants log_decay >= -5: the benchmark's lies between -1.5 and 0."""


@functools.cache
def versions() -> dict[str, str]:
    """Of torch, triton and fla.

    Raises:
        ImportError: one of them is missing.
    """
    os.environ.update(ENVIRONMENT)
    import fla
    import torch
    import triton
    import triton.testing

    if not torch.cuda.is_available():
        raise ImportError("torch sees no GPU")
    triton.testing.do_bench = functools.partial(triton.testing.do_bench, **TUNING)
    return {"torch": torch.__version__, "triton": triton.__version__, "fla": fla.__version__}


@functools.cache
def can_run(module: str) -> bool:
    """Whether the peer's module can be imported and finds a GPU; says once why not."""
    try:
        versions()
        importlib.import_module(module)
    except Exception as error:  # It may fail to import in many ways.
        print(f"without {module}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


Arguments = tuple[Any, Any, Any, dict[str, Any]]
"""q, k, v and gates."""


def prepare(peer: Peer, arguments: Arguments) -> Callable[[], tuple[Any, Any]]:
    """The call without arguments, on torch tensors."""
    import torch

    function = getattr(importlib.import_module(peer.module), peer.function)
    q, k, v, gates = arguments
    options = {"scale": q.shape[-1] ** -0.5, "output_final_state": True, **peer.options}

    def call() -> tuple[Any, Any]:
        with torch.no_grad():
            return function(q, k, v, *(gates[name] for name in peer.gates), **options)

    return call


def measure(peer: Peer, arguments: Arguments, heads: int) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    """Times in ms on JAX's arrays, and output and state of the first sequence's first heads."""
    import torch
    import triton.testing

    call = prepare(peer, jax.tree.map(to_torch, arguments))
    out, state = call()  # Tunes, too.
    got = out[0, :, :heads].double().cpu().numpy(), state[0, :heads].double().cpu().numpy()
    del out, state

    def blocked() -> None:
        call()
        torch.cuda.synchronize()

    repeats = repeats_for(timed(blocked, (), 1))
    times = {
        "call_ms": timed(blocked, (), repeats),
        "do_bench_ms": triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median"),
    }
    try:
        times |= {"device_ms": graph_time(call, repeats), "ruler": "graph"}
    except Exception as error:  # Not everything can be captured.
        print(f"no CUDA graph of {peer.label} ({type(error).__name__}: {error}), the profiler is used", flush=True)
        times |= {"device_ms": profiler_time(call, repeats), "ruler": "profiler"}
    torch.cuda.empty_cache()
    return times, got


def with_gradients(peer: Peer, arguments: Arguments) -> tuple[Callable[[], tuple[Any, Any]], list[Any]]:
    """The call on torch tensors, for gradients of all of them, and these tensors."""
    q, k, v, gates = arguments
    inputs = [x.detach().requires_grad_() for x in (q, k, v, *(gates[name] for name in peer.gates))]
    function = getattr(importlib.import_module(peer.module), peer.function)
    options = {"scale": q.shape[-1] ** -0.5, "output_final_state": True, **peer.options}
    return lambda: function(*inputs, **options), inputs


def measure_gradients(peer: Peer, arguments: Arguments, cotangents: Any, want: Any) -> dict[str, Any]:
    """Forward and backward on JAX's arrays: see experiments/bench_gradients.py. want: gradients by name, or None."""
    import torch

    call, inputs = with_gradients(peer, jax.tree.map(to_torch, arguments))
    names = ["q", "k", "v", *peer.gates]

    def clock(call: Callable, repeats: int) -> float:
        try:
            return graph_time(call, repeats)
        except Exception as error:  # Not everything can be captured.
            print(f"no CUDA graph of {peer.label} ({type(error).__name__}: {error}), the profiler is used", flush=True)
            return profiler_time(call, repeats)

    d_out, d_end = (to_torch(x) for x in cotangents)
    found = bench_gradients.measure_peer(call, inputs, names, (d_out, d_end), want, clock)
    torch.cuda.empty_cache()
    return found


def to_torch(x: Any) -> Any:
    """The same numbers as a torch tensor on the GPU, without a copy if the two libraries agree how."""
    import torch

    try:
        return torch.from_dlpack(x)
    except Exception:  # Each of the two has its own errors.
        return torch.from_numpy(np.asarray(x, np.float32)).cuda().to(getattr(torch, str(x.dtype)))


def graph_time(call: Callable, repeats: int) -> float:
    """Milliseconds of a replay: the kernels and the short gaps between them, without Python or launches."""
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Other threads of this process (JAX's) may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # Keeps the GPU busy while the others are sent.
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return median(times)


def profiler_time(call: Callable, repeats: int) -> float:
    """Milliseconds in kernels, the mean over repeats, from torch's profiler."""
    # Without this it stays subscribed to CUPTI, which takes one subscriber: JAX's measurements would fail.
    os.environ["TEARDOWN_CUPTI"] = "1"
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in trace.key_averages() if not e.key.lower().startswith(("memcpy", "memset"))]
    return sum(e.self_device_time_total for e in kernels) / 1e3 / repeats


def warm(
    rules: Iterable[str], shapes: Iterable[str], dtype: str, workers: int, gradients: bool, labels: Iterable[str]
) -> None:
    """Runs each op once on each shape, in parallel processes: one process alone would compile for many minutes."""
    by_heads: dict[int, list[str]] = defaultdict(list)
    for name in shapes:
        by_heads[find_shape(name).heads].append(name)  # Triton compiles for each number of heads.
    jobs = [
        [rule, peer.label, dtype, "both" if gradients else "forward", *names]
        for names in by_heads.values()
        for rule in rules
        for peer in PEERS.get(rule, ())
        if peer.label in labels
    ]

    def run(job: list[str]) -> None:
        start = time.perf_counter()
        command = [sys.executable, "-m", "experiments.bench_peer", *job]
        root = Path(__file__).parents[1]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        reason = (done.stderr.strip().splitlines() or ["?"])[-1] if done.returncode else "compiled"
        print(f"{' '.join(job)}: {reason}, {time.perf_counter() - start:.0f} s", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, jobs))


def find_shape(name: str) -> Shape:
    return KERNEL_SHAPES[name] if name in KERNEL_SHAPES else SHAPES[name]


def run_once(rule: str, label: str, dtype: str, passes: str, *shapes: str) -> None:
    import torch
    import triton.testing

    versions()
    # Nothing is chosen here: one run of each candidate compiles it.
    triton.testing.do_bench = functools.partial(triton.testing.do_bench, warmup=1, rep=1)
    (peer,) = (peer for peer in PEERS[rule] if peer.label == label)

    def make(size: tuple[int, ...], kind: str = dtype) -> Any:
        return torch.rand(size, device="cuda", dtype=getattr(torch, kind))

    for name in shapes:
        # Triton compiles for a number of sequences and heads, not of tokens: fewer leave room for more processes.
        shape = find_shape(name)
        shape = shape._replace(length=min(shape.length, 4096))
        batch, length, heads, value_heads, key_dim, value_dim = shape
        q, k = (make((batch, length, heads, key_dim)) / key_dim**0.5 for _ in range(2))
        gates = {gate: make(gate_shape(rule, gate, shape)) for gate in peer.gates if gate != "log_decay"}
        if "log_decay" in peer.gates:
            gates["log_decay"] = -make(gate_shape(rule, "log_decay", shape), "float32")
        arguments = q, k, make((batch, length, value_heads, value_dim)), gates
        prepare(peer, arguments)()
        if passes == "both":
            call, inputs = with_gradients(peer, arguments)
            out, state = call()
            torch.autograd.grad((out, state), inputs, grad_outputs=(torch.ones_like(out), torch.ones_like(state)))
    torch.cuda.synchronize()


if __name__ == "__main__":
    run_once(*sys.argv[1:])
