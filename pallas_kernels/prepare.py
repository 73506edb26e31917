"""Everything about a chunk that needs neither the state before it nor its values, all chunks at once.

    L, P                scores between its tokens (scores.py), with the scale of the output in P
    A = (I + L)^-1      (triangular.py)

and where q, k and e reach the state by more than a number per row (`Problem.direct` says where they do not)

    Q = scale Gamma q     K = tail k     Y = Gamma E     gamma

so that the scan over chunks (states.py) is left with U = A (Z - Y S), O = Q S + P U and S' = gamma S + K^T U.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunk import STEPS, Barriers, Chunk, vector_names
from pallas_kernels.layout import Layout, channel_gates
from pallas_kernels.pages import Pages, memory
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.scores import selections, store_parts
from pallas_kernels.tiles import PROCESSORS, TILE, C, smem, sync, vector


def _run(
    chunk: Chunk, following: Chunk, more: Any, select: Callable[[Any], Any], outputs: Mapping[str, Any]
) -> dict[str, Array]:
    """One chunk from device memory to device memory; starts copies of the following one where pages are free."""
    problem, layout = chunk.problem, chunk.layout
    scored = "p" in outputs  # otherwise P and A are there already
    pieces = range(problem.key_pieces)
    place = (chunk.batch, chunk.head, chunk.tokens)

    def store(*copies: tuple[Any, str, int]) -> None:
        """Starts the copies of operands, as one group."""
        refs = [(ref, name, part, piece) for x, name, piece in copies for part, ref in enumerate(x)]
        for ref, name, part, piece in refs:
            plgpu.copy_smem_to_gmem(ref, outputs[name].at[part, *place, pl.ds(piece * C, C)], commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    ahead = following.load_vectors()
    chunk.vectors = chunk.vectors | chunk.load_vectors(again=True)
    if not problem.numbers.interpret:
        pl.when(more)(following.prefetch)
    plgpu.barrier_wait(chunk.barriers.keys)
    for piece in pieces:
        chunk.keys(piece)
    chunk.forget_addresses(1)
    # What the last chunk stored has left its pages.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    log_decays = []
    if problem.decay == "key":
        if layout.decay:
            plgpu.barrier_wait(chunk.barriers.decay)
        log_decays = chunk.log_decays()
    else:
        sync()
    lower: list[Array] = []
    if scored:
        scores, *lower = chunk.channel_scores(log_decays, select) if log_decays else chunk.head_scores()
        sync()

    def fetch() -> None:
        """The pages in which q, k and the gates of e land are free."""
        following.forget_addresses(3)
        if not problem.direct:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(more)(lambda: following.fetch_keys(tuple(layout.keys)))

    if problem.direct:
        fetch()
    if scored:
        chunk.store_scores(scores)
    chunk.forget_addresses(2)
    if problem.direct:
        sync()
        store((chunk.operand(layout.p), "p", 0))
    else:
        if problem.decay == "key":
            chunk.store_ones()
            sync()
        for piece in pieces:
            if problem.decay == "key":
                gamma = outputs["gamma"].at[chunk.batch, chunk.head, chunk.index, pl.ds(piece * C, C)]
                chunk.scale_by_channel(piece, log_decays[piece], select, gamma)
            else:
                chunk.scale_by_head(piece)
        sync()
        made = [
            (x, name, piece)
            for piece in pieces
            for x, name in zip(chunk.operands(piece), ("q", "k", "y"), strict=True)
            if x is not None
        ]
        store(*([(chunk.operand(layout.p), "p", 0)] if scored else []), *made)
    if lower:
        inverse = chunk.invert(lower[0], None if problem.direct else fetch)
    elif not problem.direct:
        fetch()
    chunk.forget_addresses(4)
    sync()
    if problem.decay == "key":
        pl.when(more)(following.fetch_decay)
    if lower:
        a = chunk.pages.operand(layout.a, chunk.numbers)
        store_parts(a, inverse)
        sync()
        store((a, "a", 0))
    return ahead


def prepare(
    problem: Problem,
    rule: TiledRule,
    inputs: Mapping[str, Array],
    workers: int | None = None,
    interpret: Any = None,
    processors: int = PROCESSORS,
    known: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """The arrays that the scan over chunks reads, [parts, B, HV, T', .] with T' = chunks * C; gamma [B, HV, chunks, K].

    inputs: q, k [B, T, H, K]; gates per channel [B, T, heads, .]; gates per head [B, heads, T'];
        with a decay per head: prefix, prefix_again, into, out_of [B, heads, T'] (log2 of the decay since the start of
        the chunk; decay from the state before the chunk, and to the state after it); where some tokens are not valid:
        valid [B, T']; where some clear the state: runs, runs_again [B, T'], and with a decay per channel into, out_of
        [B, T'] and through [B, chunks], zeros where the state is cleared on the way.
    known: P and A of the same inputs, if they are there, or all: then they are not computed.
    """
    out = {name: x for name, x in _outputs(problem).items() if name not in (known or {})}
    if not out:
        return dict(known or {})
    gates = ("k", "e", "log_decay") if problem.decay == "key" else ("k", "e")
    used = ["q", "k", *channel_gates(rule, *gates), *vector_names(problem, rule)]
    used += ["through"] if problem.segmented and problem.decay == "key" else []
    inputs = {
        **{name: inputs[name] for name in dict.fromkeys(used)},
        "nothing": jnp.zeros(STEPS, jnp.int32),
        "numbers": jnp.arange(C, dtype=jnp.int32),
    }
    layout = Layout(problem, rule, {n: x.dtype for n, x in inputs.items()})
    workers = layout.workers if workers is None else workers
    if problem.decay == "key":
        inputs["select"] = jnp.asarray(selections(problem.numbers.parts))
    names = list(inputs)
    dtypes = [jnp.dtype(x) for x in (jnp.float16, jnp.bfloat16, *((jnp.float32,) if layout.wide else ()))]
    tasks = problem.batch * problem.value_heads * problem.chunks
    blocks = min(processors, -(-tasks // workers))

    def body(*refs: Any) -> None:
        given = dict(zip(names, refs, strict=False))
        results = dict(zip(out, refs[len(names) :], strict=False))
        views, extra, matrices, selected, keys, decay = refs[len(names) + len(out) :]
        worker = lax.axis_index("worker") if workers > 1 else jnp.int32(0)

        def shared(nothing: Any) -> tuple[Pages, Barriers]:
            mine = worker + nothing
            return Pages(views, mine, dtypes, extra), Barriers(keys.at[mine], decay.at[mine])

        counts = vector(given["numbers"])

        def chunk(task: Any, vectors: dict[str, Array] | None = None) -> Chunk:
            """Tasks are numbered head first: what runs at the same time lies side by side in memory."""
            rest, head = lax.div(task, problem.value_heads), lax.rem(task, problem.value_heads)
            place = (lax.div(rest, problem.chunks), head, lax.rem(rest, problem.chunks))
            return Chunk(problem, rule, layout, given, shared, place, counts, vectors)

        first = worker * blocks + lax.axis_index("block")
        stride = blocks * workers

        def start() -> None:
            chunk(first).fetch_keys(tuple(layout.keys))
            if problem.decay == "key":
                chunk(first).fetch_decay()

        pl.when(first < tasks)(start)
        if layout.selections:

            @pl.when(worker == 0)
            def _() -> None:
                for index in range(layout.selections):
                    plgpu.copy_gmem_to_smem(given["select"].at[index], matrices.at[index], selected)

            plgpu.barrier_wait(selected)

        def step(i: Any, vectors: dict[str, Array]) -> dict[str, Array]:
            task = first + i * stride

            def select(index: Any) -> Any:
                if layout.selections:
                    return matrices.at[index + vectors["nothing1"]]
                return plgpu.load(given["select"].at[index], layout=TILE, optimized=False)

            more = task + stride < tasks
            following = chunk(jnp.where(more, task + stride, task), vectors)
            return _run(chunk(task, vectors), following, more, select, results)

        count = lax.div(jnp.maximum(tasks - first + stride - 1, 0), jnp.int32(stride))
        lax.fori_loop(0, count, step, chunk(jnp.minimum(first, tasks - 1)).load_vectors())
        plgpu.wait_smem_to_gmem(0)

    copies = problem.key_pieces * len(layout.keys)
    barrier = partial(plgpu.Barrier, num_barriers=workers)
    threads: Any = {"num_threads": workers, "thread_name": "worker"} if workers > 1 else {}
    made = plgpu.kernel(
        body,
        out_type=list(out.values()),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            memory(workers, layout.pages, dtypes, problem.numbers.interpret),
            smem((workers * layout.extra, C, C) if layout.extra else (1, 8, C), problem.numbers.dtype),
            smem((layout.selections, C, C) if layout.selections else (1, 8, C), jnp.float16),
            plgpu.Barrier(num_arrivals=max(1, layout.selections)),
            barrier(num_arrivals=copies),
            barrier(num_arrivals=max(1, len(layout.decay) * problem.key_pieces)),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=problem.numbers.parts == 1,
            reduction_scratch_bytes=1024,
            unsafe_no_auto_barriers=True,  # see `tiles.sync`
        ),
        interpret=interpret,
        **threads,
    )(*inputs.values())
    return {**dict(zip(out, made, strict=True)), **(known or {})}


def _outputs(problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (problem.numbers.parts, problem.batch, problem.value_heads, problem.chunks * C)
    widths = {"p": C} | ({"a": C} if problem.erases else {})
    if not problem.direct:
        widths |= dict.fromkeys(("q", "k", *(("y",) if problem.erases else ())), problem.key_dim)
    out = {n: jax.ShapeDtypeStruct((*shape, width), problem.numbers.dtype) for n, width in widths.items()}
    if problem.decay == "key":
        gamma = (problem.batch, problem.value_heads, problem.chunks, problem.key_dim)
        out["gamma"] = jax.ShapeDtypeStruct(gamma, jnp.float32)
    return out
