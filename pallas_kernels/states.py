"""The scan over chunks: U = U0 - W S, O = Q S + P U, S' = gamma S + K^T U, the state in registers.

One warpgroup carries the columns of the state that belong to one tile of values; the warpgroups of a block share the
tiles of a chunk that do not depend on the columns. A sequence may be cut into stretches that run at the same time, each
from a state of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import RESERVED
from pallas_kernels.pages import PAGE, Pages, memory, pages_of
from pallas_kernels.problem import Problem
from pallas_kernels.tiles import (
    PROCESSORS,
    ROW,
    SMEM_LIMIT,
    TILE,
    C,
    iotas,
    product,
    put,
    rows,
    take,
    transposed,
    vector,
    zeros,
)


@dataclass(frozen=True)
class Scan:
    """How the scan is laid out.

    stretches: parts of a sequence that run at the same time. warpgroups: value tiles of a block. depth: chunks in
    flight. outputs: write O and the final state; otherwise only the state at the end of each stretch.
    identity: carry the columns of the identity through the chunks, with U0 = 0: the end is the stretch's transition.
    save_states: also write the state before each chunk. first, last: the stretches to run, all by default.
    """

    stretches: int
    warpgroups: int
    depth: int
    outputs: bool = True
    identity: bool = False
    save_states: bool = False
    first: int = 0
    last: int | None = None

    def chunks(self, problem: Problem) -> int:
        return -(-problem.chunks // self.stretches)

    @property
    def count(self) -> int:
        """Stretches that run."""
        return (self.stretches if self.last is None else self.last) - self.first


class Layout:
    """Pages of a block (`shared`) and of each of its warpgroups (`own`): first the state, from page 0."""

    def __init__(self, problem: Problem, depth: int) -> None:
        parts, pieces = problem.numbers.parts, problem.key_pieces
        self.parts = parts
        self.pieces = pieces
        matrices = 3 if problem.erases else 2
        self.per_slot = (matrices * pieces + 1) * parts
        self.shared = depth * self.per_slot
        self.shared += self.shared % 2
        self.corrected = pieces * parts
        self.values = self.corrected + (parts if problem.erases else 0)
        out = self.values + depth * parts
        self.out = out + out % pages_of(problem.dtype)
        self.own = self.out + pages_of(problem.dtype)
        self.own += self.own % 2

    def page(self, slot: Any, which: int, piece: int) -> Any:
        """which: 0 Q, 1 K, 2 W, -1 P."""
        offset = self.per_slot - self.parts if which < 0 else (which * self.pieces + piece) * self.parts
        return slot * self.per_slot + offset

    def bytes(self, warpgroups: int) -> int:
        return (self.shared + warpgroups * self.own) * PAGE


def choose(problem: Problem, stretches: int) -> tuple[int, int] | None:
    """(warpgroups, depth) that fit into shared memory, or None."""
    blocks = problem.batch * problem.value_heads * stretches * problem.value_pieces
    most = 1 if blocks <= PROCESSORS else 2
    options = [(w, d) for d in (2, 1) for w in range(most, 0, -1) if problem.value_pieces % w == 0]
    for warpgroups, depth in options:
        if Layout(problem, depth).bytes(warpgroups) <= SMEM_LIMIT - RESERVED:
            return warpgroups, depth
    return None


def scan(
    problem: Problem, how: Scan, prepared: Mapping[str, Array], start: Array | None, interpret: Any = None
) -> dict[str, Array]:
    """Runs the chunks of each stretch in order.

    prepared: what `prepare` returns, and with a decay per head `carry` [B, heads, chunks], the decay across a chunk.
    start: [B, HV, stretches that run, K, V], the states before each; None for zeros (the identity if `how.identity`).
    Returns:
        out [B, T, HV, V] and end [B, HV, K, V] with `how.outputs`, else end [B, HV, stretches that ran, K, V or K];
        states [chunks, B, HV, K, V] with `how.save_states`.
    """
    numbers = problem.numbers
    layout = Layout(problem, how.depth)
    columns = problem.key_dim if how.identity else problem.value_dim
    names = [n for n in ("q", "p") if how.outputs] + ["k"] + (["w"] if problem.erases else [])
    names += [] if how.identity else ["u"]
    inputs = {n: prepared[n] for n in names}
    if problem.decay is not None:
        name = "gamma" if problem.decay == "key" else "carry"
        inputs[name] = prepared[name]
    if start is not None:
        inputs["start"] = start
    state_shape = (problem.batch, problem.value_heads, problem.key_dim, columns)
    out: dict[str, Any] = {}
    if how.outputs:
        shape = (problem.batch, problem.length, problem.value_heads, problem.value_dim)
        out["out"] = jax.ShapeDtypeStruct(shape, problem.dtype)
        out["end"] = jax.ShapeDtypeStruct(state_shape, jnp.float32)
    else:
        each = (*state_shape[:2], how.count, *state_shape[2:])
        out["end"] = jax.ShapeDtypeStruct(each, jnp.float32)
    if how.save_states:
        out["states"] = jax.ShapeDtypeStruct((problem.chunks, *state_shape), jnp.float32)
    dtypes = list(dict.fromkeys([jnp.dtype(numbers.dtype), jnp.dtype(problem.dtype)]))
    per_stretch = how.chunks(problem)
    arrivals = layout.parts * problem.key_pieces * sum(n in names for n in ("q", "k", "w"))
    arrivals += layout.parts * (("p" in names) + how.warpgroups * ("u" in names))

    def body(*refs: Any) -> None:
        given = dict(zip(inputs, refs, strict=False))
        results = dict(zip(out, refs[len(inputs) :], strict=False))
        shared_views, own_views, full, empty = refs[len(inputs) + len(out) :]
        batch, head, stretch = (lax.axis_index(n) for n in ("batch", "head", "stretch"))
        me = lax.axis_index("warpgroup") if how.warpgroups > 1 else jnp.int32(0)
        shared = Pages(shared_views, 0, [numbers.dtype])
        mine = Pages(own_views, me, dtypes)
        column = (lax.axis_index("tile") * how.warpgroups + me) * C
        first = (stretch + how.first) * per_stretch
        last = jnp.minimum(first + per_stretch, problem.chunks)

        def shared_operand(slot: Any, which: int, piece: int = 0) -> Any:
            return shared.operand(layout.page(slot, which, piece), numbers)

        def value_page(slot: Any) -> Any:
            return layout.values + slot * layout.parts

        def fetch(index: Any, slot: Any) -> None:
            """Starts the copies of one chunk; one warpgroup does."""
            tokens = pl.ds(index * C, C)
            for part in range(layout.parts):
                for which, name in ((0, "q"), (1, "k"), (2, "w")):
                    if name in given:
                        for piece in range(problem.key_pieces):
                            source = given[name].at[part, batch, head, tokens, pl.ds(piece * C, C)]
                            plgpu.copy_gmem_to_smem(source, shared_operand(slot, which, piece)[part], full.at[slot])
                if "p" in given:
                    source = given["p"].at[part, batch, head, tokens]
                    plgpu.copy_gmem_to_smem(source, shared_operand(slot, -1)[part], full.at[slot])
                if "u" in given:
                    for other in range(how.warpgroups):
                        start_column = (lax.axis_index("tile") * how.warpgroups + other) * C
                        source = given["u"].at[part, batch, head, tokens, pl.ds(start_column, C)]
                        target = Pages(own_views, other, dtypes).operand(value_page(slot), numbers)[part]
                        plgpu.copy_gmem_to_smem(source, target, full.at[slot])

        def leader(action: Any, when: Any = True) -> None:
            condition = when if how.warpgroups == 1 else when & (me == 0)
            if condition is True:
                action()
            else:
                pl.when(condition)(action)

        def release(slot: Any) -> None:
            """Waits until every warpgroup is done with a slot."""
            if how.warpgroups > 1:
                plgpu.barrier_wait(empty.at[slot])

        def initial(piece: int) -> Array:
            if start is not None:
                ref = given["start"].at[batch, head, stretch, pl.ds(piece * C, C), pl.ds(column, C)]
                return plgpu.load(ref, layout=TILE, optimized=False)
            r, c = iotas()
            if how.identity:
                return jnp.where(r + piece * C == c + column, 1.0, 0.0)
            return zeros((C, C))

        def decay(index: Any, piece: int) -> Any:
            """gamma, a number for each row or one for all."""
            if problem.decay == "key":
                return vector(given["gamma"].at[batch, head, index, pl.ds(piece * C, C)], ROW)
            if problem.decay == "head":
                return given["carry"][batch, problem.shared_head(head, given["carry"].shape[1]), index]
            return None

        def step(number: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
            index = first + number
            slot = lax.rem(number, how.depth) if how.depth > 1 else 0
            # Early: it waits for device memory.
            kept = [decay(index, piece) for piece in range(problem.key_pieces)]
            state_s = [mine.operand(p * layout.parts, numbers) for p in range(problem.key_pieces)]
            for piece, x in enumerate(state):
                put(state_s[piece], x, numbers)
                if how.save_states:
                    results["states"].at[index, batch, head, pl.ds(piece * C, C), pl.ds(column, C)][...] = x
            plgpu.commit_smem()
            if how.depth > 1:
                after = lax.rem(number + 1, how.depth)

                def ahead() -> None:
                    if how.warpgroups > 1:
                        pl.when(number > 0)(lambda: release(after))
                    fetch(index + 1, after)

                leader(ahead, index + 1 < last)
            else:

                def now() -> None:
                    if how.warpgroups > 1:
                        pl.when(number > 0)(lambda: release(0))
                    fetch(index, 0)

                leader(now)
            plgpu.barrier_wait(full.at[slot])
            pieces = range(problem.key_pieces)
            values = None if how.identity else mine.operand(value_page(slot), numbers)
            if problem.erases:
                read = product(numbers, *((shared_operand(slot, 2, p), state_s[p]) for p in pieces))
                corrected: Any = mine.operand(layout.corrected, numbers)
                put(corrected, -read if values is None else take(values) - read, numbers)
            else:
                corrected = values
            if how.outputs:
                result = product(numbers, *((shared_operand(slot, 0, p), state_s[p]) for p in pieces))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()
                result = product(numbers, (shared_operand(slot, -1), corrected), add_to=result)
                out_s = mine.tile(layout.out, problem.dtype)
                out_s[...] = result.astype(problem.dtype)
                plgpu.commit_smem()
                target = results["out"].at[batch, pl.ds(index * C, C), head, pl.ds(column, C)]
                plgpu.copy_smem_to_gmem(out_s, target)
            else:
                plgpu.commit_smem()
            after_state = []
            for piece, x in enumerate(state):
                if kept[piece] is not None:
                    x = x * (kept[piece] if problem.decay == "head" else rows(kept[piece], C))
                key = transposed(shared_operand(slot, 1, piece))
                after_state.append(product(numbers, (key, corrected), add_to=x))
            if how.warpgroups > 1:
                if numbers.interpret:
                    plgpu.commit_smem()
                again = index + how.depth < last
                pl.when(again)(lambda: plgpu.barrier_arrive(empty.at[slot]))
            return tuple(after_state)

        if how.depth > 1:
            leader(lambda: fetch(first, 0), first < last)
        state = tuple(initial(piece) for piece in range(problem.key_pieces))
        state = lax.fori_loop(0, last - first, step, state)
        for piece, x in enumerate(state):
            place = (pl.ds(piece * C, C), pl.ds(column, C))
            if how.outputs:

                @pl.when((last == problem.chunks) & (first < last))
                def _(x: Array = x, place: Any = place) -> None:
                    results["end"].at[batch, head, *place][...] = x
            else:
                results["end"].at[batch, head, stretch, *place][...] = x
        plgpu.wait_smem_to_gmem(0)

    threads: Any = {"num_threads": how.warpgroups, "thread_name": "warpgroup"} if how.warpgroups > 1 else {}
    tiles = columns // (C * how.warpgroups)
    made = plgpu.kernel(
        body,
        out_type=list(out.values()),
        grid=(problem.batch, how.count, problem.value_heads, tiles),
        grid_names=("batch", "stretch", "head", "tile"),
        scratch_types=[
            memory(1, layout.shared, [numbers.dtype], numbers.interpret),
            memory(how.warpgroups, layout.own, dtypes, numbers.interpret),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=how.depth),
            plgpu.Barrier(num_arrivals=how.warpgroups, num_barriers=how.depth),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, reduction_scratch_bytes=1024
        ),
        interpret=interpret,
        **threads,
    )(*inputs.values())
    return dict(zip(out, made, strict=True))
