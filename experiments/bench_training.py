"""How fast does a whole model train? Steps of every rule beside a Transformer and the peer's models, on one GPU.

    python -m experiments.bench_training                                         one NVIDIA GPU, 340m and 1.3b
    python -m experiments.bench_training --models kda transformer --sizes 340m --lengths 4096 32768 --sides ours
    python -m experiments.bench_training --sizes tiny --tokens 128 --lengths 32 128 --steps 2          a CPU, seconds

A step is `Learner.update`: loss of a batch, gradient, AdamW, the state donated; float32 parameters, products in
bfloat16. Each batch has the same number of tokens (random ones), in few long rows or many short ones. The time is the
mean of steps by the host's clock after one to warm up; they are sent one after another and the last is waited for. The
flags of XLA (XLA_FLAGS) are a part of our cells. `training_models.step_flops` says what is counted for the model FLOP
utilisation, `training_models.make_config` what the models are; the peer's are of the same sizes, and their FLOPs are
taken to be ours. Memory is what the compiled step holds at once: its arguments, its results and its temporaries (of the
peer: what torch's allocator had given out at most). A step that does not fit is tried with the next policy of
`--remat`; longer rows begin there, since a batch of them has no fewer tokens. Compile times are those of a process that
has tuned nothing yet only in its first cells; a cache (JAX_COMPILATION_CACHE_DIR) hides them. Losses say that numbers
are finite and no more: every step sees the same batch, at learning rates that differ between the sides.

Results go to experiments/results/training_DEVICE.json after each cell; what is stored there with the same versions and
sources isn't measured again. `python -m experiments.plot_training FILE` makes a table and a plot of it. The peer is
measured first, for half of the minutes, in a process of its own: memory that JAX has taken it does not give back.
"""

import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

# Nearly all of the memory in one piece: a pool that grows is cut into pieces too small for the next program.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import numpy as np
import tyro

import pallas_kernels
import qdelta_jax as qd
from experiments import bench_training_peer
from experiments.bench import RESULTS, time_steps
from experiments.bench import RULES as MAIN_RULES
from experiments.device_time import cheap_repeats, trace_time
from experiments.plot_training import summary, table
from experiments.store import (
    OUT_OF_MEMORY,
    CellStore,
    arguments,
    as_written,
    check_alive,
    describe,
    device_file,
    fingerprint,
    make_header,
    run_command,
)
from experiments.training_models import SIZES, TRANSFORMER, default_family, make_config, step_flops
from qdelta_jax.models import LanguageModel, ModelConfig
from qdelta_jax.training.config import MeshConfig, OptimizerConfig
from qdelta_jax.training.data import Batch
from qdelta_jax.training.optimizer import make_optimizer
from qdelta_jax.training.train_step import Learner, make_mesh, shard_batch

COMPUTED = ("implementation", "conv_implementation", "unroll", "residuals")
"""Of `ModelConfig`: how a model is computed."""

OURS = (*COMPUTED, "loss_chunk", "packed")
"""Options that change nothing on the peer's side."""

KEY = (
    *("model", "side", "size", "family", "length", "tokens", "policies", "packed", "steps", *COMPUTED),
    *("loss_chunk", "xla_flags"),
)
"""What tells one cell from another; a later measurement of the same replaces it."""


@dataclass(frozen=True)
class Bench:
    """What is measured, and for how long.

    Args:
        models: names of rules, and "transformer".
        sizes: names in experiments/training_models.py.
        lengths: of a row, in tokens.
        tokens: of a batch.
        sides: "ours" and "peer".
        remat: policies of `ModelConfig`, in this order until one fits (the peer: only "none" and "full").
        family: of the preset, for all models; by default each model's own.
        implementation: of the rules.
        conv_implementation: of the short convolutions.
        residuals: what the rules save for their gradients.
        unroll: as in `ModelConfig`.
        loss_chunk: tokens whose logits exist at once, as in `OptimizerConfig`; those of a batch at most.
        packed: give the model segment ids (a single segment), as training on packed text does.
        steps: that are timed.
        minutes: no cell is begun after that; the same command goes on with what is left.
        peak: of the device in FLOP/s.
        again: measure what is stored, too.
        out: folder of the results.
    """

    models: tuple[str, ...] = (*MAIN_RULES, TRANSFORMER)
    sizes: tuple[str, ...] = ("340m", "1.3b")
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    tokens: int = 65536
    sides: tuple[str, ...] = ("ours", "peer")
    remat: tuple[str, ...] = ("none", "activations", "dots", "delta_rule_states", "full")
    family: str | None = None
    implementation: str | None = None
    conv_implementation: str | None = None
    residuals: Literal["recompute", "keep"] = "recompute"
    unroll: int = 1
    loss_chunk: int | None = None
    packed: bool = False
    steps: int = 8
    minutes: float = 8.0
    peak: float = 989e12
    again: bool = False
    out: str = str(RESULTS)


class Unpacked(LanguageModel):
    """Each row is one segment without padding, whatever its segment ids say."""

    def features(self, tokens: Any, *, segment_ids: Any = None, **options: Any) -> Any:
        return super().features(tokens, **options)


def main(bench: Bench) -> dict[str, Any]:
    began = time.perf_counter()
    check(bench)
    if "peer" in bench.sides and len(bench.sides) > 1:
        bench_training_peer.in_own_process(arguments(replace(bench, sides=("peer",), minutes=bench.minutes / 2)))
        bench = replace(bench, sides=tuple(side for side in bench.sides if side != "peer"))
    if bench.sides == ("peer",):
        # JAX is asked for the device's name alone, and must leave the memory to torch.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        ignored = [name for name in OURS if getattr(bench, name) != getattr(Bench, name)]
        if ignored:
            print(f"no effect on the peer: {', '.join(ignored)}", flush=True)
    device = jax.devices()[0].device_kind
    header = {**make_header("bench_training", device, bench.out), "peak_flops": bench.peak}
    store = CellStore(KEY, device_file(bench.out, "training", device), header, bench.again)
    left = 0
    for side, size, model in [(s, z, m) for s in bench.sides for z in bench.sizes for m in bench.models]:
        begin: str | None = None
        for cell in make_cells(side, size, model, bench):
            if store.has(cell):
                continue
            if time.perf_counter() - began > 60 * bench.minutes:
                left += 1
                continue
            cell = measure(cell, begin, bench)
            begin = cell["remat"]
            store.put(cell)
            print(format_cell(cell), flush=True)
            if "error" in cell and side == "ours":
                check_alive()
    print(f"\n{summary(store.result)}\n{table(store.result)}\nstored in {store.path}")
    rest = f"{left} cells are left: the same command goes on" if left else "nothing is left"
    if "peer" in bench.sides:
        rest = without_peer(bench) or rest
    print(f"{' and '.join(bench.sides)}: {rest}", flush=True)
    return store.result


def check(bench: Bench) -> None:
    """Before anything is measured.

    Raises:
        ValueError: a bad value.
    """
    for name, values, known in (("sides", bench.sides, ("ours", "peer")), ("remat", bench.remat, Bench.remat)):
        if not values or set(values) - set(known):
            raise ValueError(f"{name}: got {values}, want some of {known}")
    for name in ("models", "sizes", "lengths"):
        if not getattr(bench, name):
            raise ValueError(f"{name}: got none, want one or more")
    for model in bench.models:
        if model != TRANSFORMER and model not in qd.RULES:
            raise ValueError(f"models: got {model!r}, want {TRANSFORMER!r} or one of {tuple(qd.RULES)}")
    if not bench.minutes >= 0:
        raise ValueError(f"minutes: got {bench.minutes}, want 0 or more")
    for name, x in (("tokens", bench.tokens), ("steps", bench.steps), ("peak", bench.peak)):
        if not x > 0:
            raise ValueError(f"{name}: got {x}, want a number above 0")
    if bench.loss_chunk is not None and bench.loss_chunk > bench.tokens:
        raise ValueError(f"loss_chunk: got {bench.loss_chunk}, want at most tokens = {bench.tokens}")
    if TRANSFORMER in bench.models and set(bench.remat) == {"delta_rule_states"}:
        raise ValueError(f"remat: got {bench.remat}, want one that a {TRANSFORMER} has, too")
    for length in bench.lengths:
        if length < 1 or bench.tokens % length:
            raise ValueError(f"lengths: got {length}, want a divisor of tokens = {bench.tokens}")
    for size in bench.sizes:
        if size not in SIZES:
            raise ValueError(f"sizes: got {size!r}, want some of {SIZES}")
        OptimizerConfig(loss_chunk=bench.loss_chunk)
        for model in bench.models:
            config = make_config(model, size, bench.family)
            replace(config, **{name: getattr(bench, name) for name in COMPUTED})


def without_peer(bench: Bench) -> str:
    """Why none of these models is measured on the peer's side; empty if some are."""
    models, policies = tuple(bench_training_peer.PEERS), bench_training_peer.POLICIES
    if not set(models) & set(bench.models):
        return f"skipped, the peer has none of these models, only {models}"
    if not set(policies) & set(bench.remat):
        return f"skipped, the peer has none of these policies of remat, only {policies}"
    return "" if bench_training_peer.can_run() else "skipped, the peer cannot run here"


def make_cells(side: str, size: str, model: str, bench: Bench) -> list[dict[str, Any]]:
    """The cells of one model, not yet measured; none for a peer that doesn't have it or can't run here."""
    policies = [x for x in bench.remat if model != TRANSFORMER or x != "delta_rule_states"]
    if side == "peer":
        policies = [x for x in bench.remat if x in bench_training_peer.POLICIES]
        if without_peer(replace(bench, models=(model,))):
            return []
    own = () if side == "peer" else ("unroll",) if model == TRANSFORMER else COMPUTED
    cell = {
        "model": model,
        "side": "fla" if side == "peer" else "qdelta_jax",
        "size": size,
        "family": bench.family or default_family(model),
        "tokens": bench.tokens,
        "policies": policies,
        "packed": bench.packed and side == "ours",
        "loss_chunk": None if side == "peer" else bench.loss_chunk,
        "xla_flags": None if side == "peer" else os.environ.get("XLA_FLAGS") or None,
        "steps": bench.steps,
        **{name: getattr(bench, name) if name in own else None for name in COMPUTED},
        "date": time.strftime("%Y-%m-%d"),
        "versions": bench_training_peer.versions() if side == "peer" else jax_versions(),
    }
    return [{**cell, "length": length} for length in sorted(bench.lengths)]


@cache
def jax_versions() -> dict[str, str]:
    """Versions, and a fingerprint of the library's sources."""
    packages = {name: version(name) for name in ("jaxlib", "flax", "optax")}
    return {"jax": jax.__version__, **packages, "source": fingerprint([qd, pallas_kernels], "**/*.py")}


def measure(cell: dict[str, Any], begin: str | None, bench: Bench) -> dict[str, Any]:
    """The cell with its numbers, by the first policy from `begin` on that fits, or with the reason for none."""
    config = make_config(cell["model"], cell["size"], bench.family)
    flops = step_flops(config, cell["length"], cell["tokens"])
    cell = {**cell, "remat": None, "too_large": [], "flops": flops}
    attempt = bench_training_peer.run if cell["side"] == "fla" else run
    policies = cell["policies"]
    for policy in policies[policies.index(begin) if begin else 0 :]:
        try:
            own = {name: cell[name] for name in COMPUTED if cell[name] is not None}
            changed = replace(config, remat=policy, **own)
            numbers = attempt(changed, cell, bench.steps)
        except Exception as error:  # One cell fails, the others go on.
            failure, large = describe(error), is_out_of_memory(error)
        else:
            rates = {"tokens_per_s": 1e3 * cell["tokens"] / numbers["step_ms"]}
            rates["utilisation"] = 1e3 * flops["total"] / numbers["step_ms"] / bench.peak
            return {**cell, "remat": policy, **numbers, **rates}
        finally:  # An exception holds the frames that hold the arrays; it is gone here.
            gc.collect()
        if not large:
            return {**cell, "remat": policy, "error": failure}
        cell["too_large"].append(policy)
    # At the next length only the last policy is tried.
    return {**cell, "remat": policies[-1], "error": OUT_OF_MEMORY}


def is_out_of_memory(error: Exception) -> bool:
    """Of the device: a kernel that wants more shared memory than there is gets no more by any policy."""
    text = f"{type(error).__name__}: {error}".lower()
    return ("resource_exhausted" in text or "out of memory" in text) and "shared memory" not in text


def run(config: ModelConfig, cell: dict[str, Any], steps: int) -> dict[str, Any]:
    """Times and memory of one step, compiled ahead, which `cell` describes."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=1))
    model = LanguageModel if cell["packed"] else Unpacked
    before = allocator_peak()
    with jax.set_mesh(mesh):
        # The schedule's length changes no time.
        options = OptimizerConfig(loss_chunk=cell["loss_chunk"])
        build, optimizer = lambda rngs: model(config, rngs=rngs), make_optimizer(options, 1000)
        learner = Learner(build, optimizer, mesh, loss_chunk=options.loss_chunk)
        batch = shard_batch(make_batch(config.vocab_size, cell["length"], cell["tokens"]), mesh)
        start = time.perf_counter()
        lowered = learner.update.lower(learner.abstract(), batch)
        traced = time.perf_counter()
        program = lowered.compile()
        compiled = time.perf_counter()
        state = learner.init(0)

        def step() -> Any:
            nonlocal state
            state, metrics = program(state, batch)
            return metrics

        step_ms, metrics = time_steps(step, jax.block_until_ready, steps)
        loss = float(metrics.loss)
        if int(metrics.skipped) or not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}, {int(metrics.skipped)} updates were left out")
        peak = allocator_peak()
        return {
            "step_ms": step_ms,
            "device_ms": device_ms(step, step_ms),
            "memory_bytes": memory(program),
            # The allocator's high water says something about this cell only if it rose.
            "allocator_peak_bytes": peak if peak and peak > (before or 0) else None,
            "lower_s": traced - start,
            "compile_s": compiled - traced,
            "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
            "loss": loss,
        }


def make_batch(vocab: int, length: int, tokens: int) -> Batch:
    """Random tokens, each row one segment: each token predicts the next, which is random, too."""
    ids = np.random.default_rng(0).integers(0, vocab, (tokens // length, length + 1), np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.ones((tokens // length, length), np.int32))


def memory(program: Any) -> int:
    """Bytes that a compiled program holds at once; donated arguments are its results."""
    sizes = program.memory_analysis()
    arguments = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return int(arguments + sizes.temp_size_in_bytes)


def allocator_peak() -> int | None:
    """The most bytes that this process has had in use; None where the device doesn't count."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def device_ms(step: Callable[[], Any], step_ms: float) -> float | None:
    """Milliseconds in kernels, by a trace: CUPTI's own measurement wants a program that keeps its arguments."""
    repeats = cheap_repeats(step_ms)
    if jax.default_backend() != "gpu" or not repeats:
        return None
    try:
        return trace_time(step, (), repeats)
    except Exception as error:  # The step's time is there, and worth keeping.
        print(f"no time in kernels: {describe(error)}", flush=True)
        return None


def format_cell(cell: dict[str, Any]) -> str:
    names = ("tokens_per_s", "utilisation", "step_ms", "device_ms", "compile_s", "remat", "error")
    parts = [f"{x} {cell[x]:.4g}" if isinstance(cell[x], float) else str(cell[x]) for x in names if cell.get(x)]
    parts += [f"{cell['memory_bytes'] / 2**30:.1f} GiB"] if cell.get("memory_bytes") else []
    return "  ".join(["{size:5s} {model:18s} {side:10s} {length:6d}".format(**cell), *parts])


if __name__ == "__main__":
    run_command(main, tyro.cli(Bench, description=as_written(__doc__)))
