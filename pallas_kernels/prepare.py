"""Everything about a chunk that does not need the state before it, all chunks at once.

    L, P                scores between its tokens (scores.py), with the scale of the output in P
    A = (I + L)^-1      (triangular.py)
    W = A (Gamma E)     U0 = A Z     Q = scale Gamma q     K = tail k     gamma

so that the scan over chunks (states.py) is left with U = U0 - W S, O = Q S + P U and S' = gamma S + K^T U.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pages import PAGE, Pages, memory, pages_of
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.scores import SCALE, channel_scores, selections, store_log_decay, summed
from pallas_kernels.tiles import (
    COL,
    SMEM_LIMIT,
    TILE,
    C,
    Numbers,
    cols,
    iotas,
    product,
    put,
    rows,
    split,
    take,
    transposed,
    vector,
    zeros,
)
from pallas_kernels.triangular import invert

RESERVED = 4096
"""Bytes of shared memory left to barriers and to the compiler's reductions."""


class Layout:
    """Which pages of shared memory hold what, for one worker.

    q, k, e: one operand for each piece of 64 key channels. Then the scratch pages: log_decay while there are scores to
    compute, then the two operands of the inverse, then values and their gates. The scaled keys of a level, later P,
    have an operand of their own.
    """

    def __init__(self, problem: Problem, rule: TiledRule, gates: Mapping[str, Any]) -> None:
        parts, pieces = problem.numbers.parts, problem.key_pieces
        taken = 0

        def take_pages(count: int) -> int:
            nonlocal taken
            start = -(-taken // 2) * 2 if count > 1 else taken
            taken = start + count
            return start

        def run(each: int) -> list[int]:
            return [take_pages(each) for _ in range(pieces)]

        self.q, self.k = run(parts), run(parts)
        self.e = run(parts) if problem.erases else []
        self.key_gates = [n for n in _channel(rule, "k") + _channel(rule, "e") if n in gates]
        self.key_gates = list(dict.fromkeys(self.key_gates))
        self.landing: dict[str, list[int]] = {"q": self.q, "k": self.k}
        for name in self.key_gates:
            each = pages_of(gates[name])
            free = problem.erases and each <= parts and self.e not in self.landing.values()
            self.landing[name] = self.e if free else run(each)
        scratch = take_pages(2)
        taken = scratch
        self.log_decay = scratch
        self.decay_gates = {}
        if problem.decay == "key":
            taken = scratch + 2
            for index, name in enumerate(_channel(rule, "log_decay")):
                self.decay_gates[name] = scratch if index == 0 else take_pages(pages_of(gates[name]))
        most = taken
        self.x, self.l = scratch, scratch + parts
        most = max(most, scratch + 2 * parts if problem.erases else taken)
        taken = scratch + parts
        self.z = scratch
        self.value_gates = {n: take_pages(pages_of(gates[n])) for n in _channel(rule, "z") if n in gates}
        self.pages = -(-max(most, taken) // 2) * 2
        self.parts = parts

    @property
    def bytes(self) -> int:
        return (self.pages + self.parts) * PAGE


def _channel(rule: TiledRule, output: str) -> list[str]:
    """The gates with one number per channel that an output reads."""
    return [n for n in rule.arguments.get(output, ()) if n not in ("q", "k", "v") and rule.axis[n] != "head"]


def _head_gates(rule: TiledRule, *outputs: str) -> list[str]:
    return [n for o in outputs for n in rule.arguments.get(o, ()) if rule.axis[n] == "head"]


class Chunk:
    """One chunk of one head, in the pages of one worker."""

    def __init__(
        self,
        problem: Problem,
        rule: TiledRule,
        layout: Layout,
        inputs: Mapping[str, Any],
        pages: Pages,
        scaled: Pages,
        barriers: tuple[Any, Any, Any],
        place: tuple[Any, Any, Any],
    ) -> None:
        self.problem, self.rule, self.layout, self.inputs, self.pages = problem, rule, layout, inputs, pages
        self.scaled = scaled
        self.bar_keys, self.bar_decay, self.bar_values = barriers
        self.batch, self.head, self.index = place
        self.numbers = problem.numbers
        self.tokens = pl.ds(self.index * C, C)

    def head_of(self, heads: int) -> Any:
        """The head of an array with fewer heads: each serves several."""
        share = self.problem.value_heads // heads
        return self.head if share == 1 else lax.div(self.head, jnp.int32(share))

    def tile(self, name: str, piece: int) -> Any:
        ref = self.inputs[name]
        return ref.at[self.batch, self.tokens, self.head_of(ref.shape[2]), pl.ds(piece * C, C)]

    def per_token(self, name: str, layout: Any = None) -> Array:
        """C numbers of a [B, T] or [B, H, T] array."""
        ref = self.inputs[name]
        index = (self.batch, self.tokens) if len(ref.shape) == 2 else (self.batch, self.head_of(ref.shape[1]), self.tokens)
        return vector(ref.at[index], *(() if layout is None else (layout,)))

    def per_chunk(self, name: str) -> Array:
        ref = self.inputs[name]
        index = (self.batch, self.index) if len(ref.shape) == 2 else (self.batch, self.head_of(ref.shape[1]), self.index)
        return ref[index]

    def fetch(self, name: str, page: int, piece: int, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(self.tile(name, piece), self.pages.tile(page, self.inputs[name].dtype), barrier)

    def landed(self, name: str, page: int) -> Array:
        """A tile as it came, in float32, zeros for tokens that are not valid."""
        ref = self.pages.tile(page, self.inputs[name].dtype)
        return self.valid(plgpu.load(ref, layout=TILE, optimized=False).astype(jnp.float32))

    def valid(self, x: Array) -> Array:
        if not self.problem.masked:
            return x
        keep = self.per_token("valid")
        return jnp.where((rows(keep, x.shape[1]) if x.ndim == 2 else keep) > 0, x, 0.0)

    def gates(self, *outputs: str) -> dict[str, Array]:
        """Gates with one number per head, vectors."""
        return {n: self.valid(self.per_token(n)) for n in _head_gates(self.rule, *outputs)}

    def output(self, output: str, tiles: Mapping[str, Array]) -> Array:
        """One of the rule's outputs, zeros for tokens that are not valid."""
        return self.valid(self.rule(output, tiles))

    def fetch_keys(self) -> None:
        for name, pages in self.layout.landing.items():
            for piece, page in enumerate(pages):
                self.fetch(name, page, piece, self.bar_keys)

    def fetch_decay(self, piece: int) -> None:
        for name, page in self.layout.decay_gates.items():
            self.fetch(name, page, piece, self.bar_decay)

    def fetch_values(self, piece: int) -> None:
        for name, page in {"v": self.layout.z, **self.layout.value_gates}.items():
            self.fetch(name, page, piece, self.bar_values)

    def keys(self, piece: int) -> None:
        """q, k and e of 64 channels as operands, in the place of what landed there."""
        layout, pages = self.layout, self.pages
        outputs = ("k", "e") if self.problem.erases else ("k",)
        tiles = {n: self.landed(n, at[piece]) for n, at in layout.landing.items()} | self.gates(*outputs)
        made = {o: self.output(o, tiles) for o in outputs}
        put(pages.operand(layout.q[piece], self.numbers), tiles["q"], self.numbers)
        put(pages.operand(layout.k[piece], self.numbers), made["k"], self.numbers)
        if self.problem.erases:
            put(pages.operand(layout.e[piece], self.numbers), made["e"], self.numbers)

    def operands(self, piece: int) -> tuple[Any, Any, Any]:
        at, pages = self.layout, self.pages
        e = pages.operand(at.e[piece], self.numbers) if self.problem.erases else None
        return pages.operand(at.q[piece], self.numbers), pages.operand(at.k[piece], self.numbers), e

    def same_segment(self) -> Array | None:
        if not self.problem.segmented:
            return None
        return rows(self.per_token("runs"), C) == cols(self.per_token("runs_again", COL), C)

    def head_scores(self) -> tuple[Array, ...]:
        """P and L where all channels of a head decay together, or none does."""
        totals = []
        for which in (0, 2) if self.problem.erases else (0,):
            terms = []
            for piece in range(self.problem.key_pieces):
                operands = self.operands(piece)
                terms.append((operands[which], transposed(operands[1])))
            totals.append(product(self.numbers, *terms))
        if self.problem.decay is None:
            return tuple(totals)
        r, c = iotas()
        exponent = rows(self.per_token("prefix"), C) - cols(self.per_token("prefix_again", COL), C)
        factor = jnp.exp2(jnp.where(r >= c, exponent, -jnp.inf))
        return tuple(factor * x for x in totals)

    def scale_by_head(self) -> None:
        """Q, Gamma E and K in the place of q, e and k."""
        decays = self.problem.decay is not None
        into = self.per_token("into") if decays else None
        out_of = self.per_token("out_of") if decays else None
        for piece in range(self.problem.key_pieces):
            q, k, e = self.operands(piece)
            x = take(q) * self.problem.scale
            put(q, x * rows(into, C) if decays else x, self.numbers)
            if decays:
                put(k, take(k) * rows(out_of, C), self.numbers)
                if e is not None:
                    put(e, take(e) * rows(into, C), self.numbers)

    def channel_piece(self, piece: int, sums: tuple[Array, ...], gamma: Any) -> tuple[Array, ...]:
        """Adds the scores of 64 channels; then Q, Gamma E and K in the place of q, e and k, and gamma to memory."""
        pages, layout, numbers = self.pages, self.layout, self.numbers
        c = iotas()[1]
        log_decay = tuple(pages.tile(layout.log_decay + part, jnp.float16) for part in (0, 1))
        tiles = {n: self.landed(n, page) for n, page in layout.decay_gates.items()} | self.gates("log_decay")
        store_log_decay(self.output("log_decay", tiles), log_decay, numbers.parts)
        plgpu.commit_smem()
        q, k, e = self.operands(piece)
        kx, kx_wide = self.scaled.operand(0, numbers), self.scaled.operand(0, Numbers(jnp.bfloat16))
        select = self.inputs["select"]
        sums = channel_scores(numbers, q, k, e, log_decay, select, kx, kx_wide, sums)

        last = select.shape[0]
        into = jnp.exp2(summed(select.at[last - 2], log_decay, numbers.interpret))
        if self.problem.segmented:
            into = into * rows(self.per_token("into"), C)
        put(q, take(q) * (self.problem.scale * into), numbers)
        if e is not None:
            put(e, take(e) * into, numbers)
        out_of = jnp.exp2(summed(select.at[last - 1], log_decay, numbers.interpret))
        if self.problem.segmented:
            out_of = out_of * rows(self.per_token("out_of"), C)
        put(k, take(k) * out_of, numbers)
        # The whole chunk's decay as one number per row of a transposed product: no sum across warps.
        ones = self.scaled.tile(0, jnp.float16)
        ones[...] = plgpu.layout_cast(jnp.full((C, C), 1.0 / SCALE, jnp.float16), TILE)
        plgpu.commit_smem()
        one = Numbers(jnp.float16, 1, numbers.interpret)
        total = product(one, *(((part.T,), (ones,)) for part in log_decay))
        total = jnp.exp2(jnp.sum(jnp.where(c == 0, total, 0.0), axis=1))
        if self.problem.segmented:
            total = total * self.per_chunk("through")
        gamma[...] = total
        return sums

    def mask_scores(self, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Keeps j <= i in P, times the scale, and j < i in L; both inside a segment."""
        r, c = iotas()
        same = self.same_segment()
        masks = (r >= c, r > c) if same is None else ((r >= c) & same, (r > c) & same)
        sums = tuple(jnp.where(mask, x, 0.0) for mask, x in zip(masks, sums, strict=False))
        return (sums[0] * self.problem.scale, *sums[1:])

    def invert(self, lower: Array) -> tuple[Array, ...]:
        """A as the parts of an operand in registers."""
        numbers = Numbers(jnp.float16, self.numbers.parts, self.numbers.interpret)
        x, l = (self.pages.operand(page, numbers) for page in (self.layout.x, self.layout.l))
        return split(invert(lower, x, l, numbers), self.numbers)

    def values(self, inverse: tuple[Array, ...] | None) -> Any:
        """U0 of 64 value channels, in the place where v landed."""
        layout = self.layout
        tiles = {"v": self.landed("v", layout.z)} | self.gates("z")
        tiles |= {n: self.landed(n, page) for n, page in layout.value_gates.items()}
        z = self.pages.operand(layout.z, self.numbers)
        put(z, self.output("z", tiles), self.numbers)
        if inverse is not None:
            plgpu.commit_smem()
            put(z, product(self.numbers, (inverse, z)), self.numbers)
        plgpu.commit_smem()
        return z

    def erase(self, piece: int, inverse: tuple[Array, ...]) -> Any:
        """W of 64 key channels, in the place of Gamma E."""
        e = self.operands(piece)[2]
        put(e, product(self.numbers, (inverse, e)), self.numbers)
        return e


def _run(chunk: Chunk, outputs: Mapping[str, Any]) -> None:
    """One chunk from device memory to device memory."""
    problem, numbers = chunk.problem, chunk.numbers
    place = (chunk.batch, chunk.head, chunk.tokens)

    def store(source: Any, name: str, piece: int) -> None:
        for part, ref in enumerate(source):
            plgpu.copy_smem_to_gmem(ref, outputs[name].at[part, *place, pl.ds(piece * C, C)])

    chunk.fetch_keys()
    if problem.decay == "key":
        chunk.fetch_decay(0)
    plgpu.barrier_wait(chunk.bar_keys)
    for piece in range(problem.key_pieces):
        chunk.keys(piece)
    plgpu.commit_smem()
    if problem.decay == "key":
        sums = tuple(zeros((C, C)) for _ in range(2 if problem.erases else 1))
        for piece in range(problem.key_pieces):
            plgpu.barrier_wait(chunk.bar_decay)
            gamma = outputs["gamma"].at[chunk.batch, chunk.head, chunk.index, pl.ds(piece * C, C)]
            sums = chunk.channel_piece(piece, sums, gamma)
            if piece + 1 < problem.key_pieces:
                chunk.fetch_decay(piece + 1)
    else:
        sums = chunk.head_scores()
        chunk.scale_by_head()
    sums = chunk.mask_scores(sums)
    scores = chunk.scaled.operand(0, numbers)
    put(scores, sums[0], numbers)
    plgpu.commit_smem()
    store(scores, "p", 0)
    for piece in range(problem.key_pieces):
        q, k, _ = chunk.operands(piece)
        store(q, "q", piece)
        store(k, "k", piece)
    inverse = chunk.invert(sums[1]) if problem.erases else None
    plgpu.commit_smem()
    chunk.fetch_values(0)
    if inverse is not None:
        for piece in range(problem.key_pieces):
            chunk.erase(piece, inverse)
        plgpu.commit_smem()
        for piece in range(problem.key_pieces):
            store(chunk.operands(piece)[2], "w", piece)
    for piece in range(problem.value_pieces):
        plgpu.barrier_wait(chunk.bar_values)
        store(chunk.values(inverse), "u", piece)
        if piece + 1 < problem.value_pieces:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            chunk.fetch_values(piece + 1)
    plgpu.wait_smem_to_gmem(0)


def workers_for(layout: Layout) -> int:
    """Chunks that one multiprocessor works on at once."""
    return max(0, min(3, (SMEM_LIMIT - RESERVED) // layout.bytes))


def prepare(
    problem: Problem,
    rule: TiledRule,
    inputs: Mapping[str, Array],
    workers: int | None = None,
    interpret: Any = None,
) -> dict[str, Array]:
    """The arrays that the scan over chunks reads, [parts, B, HV, T', .] with T' = chunks * C.

    inputs: q, k [B, T, H, K]; v [B, T, HV, V]; gates per channel [B, T, heads, .]; gates per head [B, heads, T'];
        with a decay per head: prefix, prefix_again, into, out_of [B, heads, T'] (log2 of the decay since the start of
        the chunk; decay from the state before the chunk, and to the state after it); where some tokens are not valid:
        valid [B, T']; where some clear the state: runs, runs_again [B, T'], and with a decay per channel into, out_of
        [B, T'] and through [B, chunks], zeros where the state is cleared on the way.
    """
    layout = Layout(problem, rule, {n: x.dtype for n, x in inputs.items()})
    workers = workers_for(layout) if workers is None else workers
    inputs = dict(inputs)
    if problem.decay == "key":
        inputs["select"] = jnp.asarray(selections(problem.numbers.parts))
    names = list(inputs)
    shape = (problem.numbers.parts, problem.batch, problem.value_heads, problem.chunks * C)
    dtype = problem.numbers.dtype
    out = {
        "q": jax.ShapeDtypeStruct((*shape, problem.key_dim), dtype),
        "k": jax.ShapeDtypeStruct((*shape, problem.key_dim), dtype),
        "p": jax.ShapeDtypeStruct((*shape, C), dtype),
        "u": jax.ShapeDtypeStruct((*shape, problem.value_dim), dtype),
    }
    if problem.erases:
        out["w"] = jax.ShapeDtypeStruct((*shape, problem.key_dim), dtype)
    if problem.decay == "key":
        gamma = (problem.batch, problem.value_heads, problem.chunks, problem.key_dim)
        out["gamma"] = jax.ShapeDtypeStruct(gamma, jnp.float32)
    dtypes = list(dict.fromkeys([jnp.dtype(x) for x in (jnp.float32, jnp.float16, jnp.bfloat16)]))
    halves = [jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)]
    blocks = -(-problem.chunks // workers)

    def body(*refs: Any) -> None:
        given = dict(zip(names, refs, strict=False))
        results = dict(zip(out, refs[len(names) :], strict=False))
        views, scaled, *barriers = refs[len(names) + len(out) :]
        worker = lax.axis_index("worker") if workers > 1 else jnp.int32(0)
        index = lax.axis_index("block") * workers + worker
        pages, scaled_pages = Pages(views, worker, dtypes), Pages(scaled, worker, halves)
        place = (lax.axis_index("batch"), lax.axis_index("head"), index)

        @pl.when(index < problem.chunks)
        def _():
            mine = tuple(b.at[worker] for b in barriers)
            _run(Chunk(problem, rule, layout, given, pages, scaled_pages, mine, place), results)

    keys = sum(len(at) for at in layout.landing.values())
    barrier = partial(plgpu.Barrier, num_barriers=workers)
    threads = {"num_threads": workers, "thread_name": "worker"} if workers > 1 else {}
    made = plgpu.kernel(
        body,
        out_type=list(out.values()),
        grid=(problem.batch, blocks, problem.value_heads),
        grid_names=("batch", "block", "head"),
        scratch_types=[
            memory(workers, layout.pages, dtypes),
            memory(workers, layout.parts, halves),
            barrier(num_arrivals=keys),
            barrier(num_arrivals=max(1, len(layout.decay_gates))),
            barrier(num_arrivals=1 + len(layout.value_gates)),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, reduction_scratch_bytes=1024
        ),
        interpret=interpret,
        **threads,
    )(*inputs.values())
    return dict(zip(out, made, strict=True))

