"""The scan over chunks: U = A (Z - Y S), O = Q S + P U, S' = gamma S + K^T U, the state in registers.

One warpgroup carries the columns of the state that belong to one tile of values. One or two of them make a block, with
one more that starts copies and makes operands of what they bring (landing.py); they share the tiles of a chunk that do
not depend on the columns. A sequence may be cut into stretches that run at the same time, each from a state of its own.
What happens in a chunk is in steps.py, and for gradients in reverse.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.joins import PARTS
from pallas_kernels.landing import Barriers, Block
from pallas_kernels.layout import RESERVED, channel_gates, head_gates
from pallas_kernels.pages import PAGE, Pages, Taken, memory, pages_of
from pallas_kernels.problem import Problem
from pallas_kernels.reverse import Reverse
from pallas_kernels.rule import TiledRule
from pallas_kernels.steps import Steps
from pallas_kernels.tiles import PROCESSORS, SMEM_LIMIT, C


@dataclass(frozen=True)
class Scan:
    """How the scan is laid out.

    stretches: parts of a sequence that run at the same time. warpgroups: value tiles of a block. depth: chunks in
    flight. outputs: write O and the final state; otherwise only the state at the end of each stretch.
    identity: carry the columns of the identity through the chunks, with Z = 0: the end is the stretch's transition.
    save_states: also write the state before each chunk. keep: also write U and that state, as operands. reverse: from
    the last chunk to the first, as reverse.py does. first, last: the stretches to run, all by default.
    """

    stretches: int
    warpgroups: int
    depth: int
    outputs: bool = True
    identity: bool = False
    save_states: bool = False
    keep: bool = False
    reverse: bool = False
    first: int = 0
    last: int | None = None

    def chunks(self, problem: Problem) -> int:
        return -(-problem.chunks // self.stretches)

    @property
    def count(self) -> int:
        """Stretches that run."""
        return (self.stretches if self.last is None else self.last) - self.first


class Layout:
    """Pages of a block (`shared`, `slot` for each chunk in flight) and of each of its warpgroups (`own`).

    Attributes:
        tiles: by name, (first page in a slot, step from piece to piece): q, k, y, gates of k; a and p.
        state, x, t: own operands: the state; Z - Y S, then U, then the output; U with the decay to the end.
            In reverse: D; dU, then dZ; dZ as k or y is multiplied with it.
        read: in reverse, what q is multiplied with where it is not dO.
        values: by name, (first page, step from slot to slot): v, which becomes Z, and its gates, one for all slots;
            in reverse dO.
    """

    def __init__(
        self, problem: Problem, rule: TiledRule, dtypes: Mapping[str, Any], depth: int, reverse: bool = False
    ) -> None:
        parts, pieces = problem.numbers.parts, problem.key_pieces
        even = parts == 2
        slot = Taken()
        self.tiles: dict[str, tuple[int, int]] = {}
        for name in ("q", "k", *(("y",) if problem.erases and not problem.direct else ())):
            self.tiles[name] = (slot.take(pieces * parts, even), parts)
        if problem.direct:
            for name in channel_gates(rule, "k"):
                size = pages_of(dtypes[name])
                self.tiles[name] = (slot.take(pieces * size, size > 1), size)
        for name in ("p", *(("a",) if problem.erases else ())):
            self.tiles[name] = (slot.take(parts, even), parts)
        self.slot = slot.count + slot.count % 2
        self.shared = depth * self.slot
        own = Taken()
        self.state = own.take(pieces * parts, even)
        out = pages_of(problem.dtype)
        self.x = own.take(max(parts, out), even or out > 1)
        separate = reverse or (problem.direct and problem.decay is not None)
        self.t = own.take(parts, even) if separate else self.x
        self.read = own.take(parts, even) if reverse and problem.direct else self.t
        self.values = {"d_out" if reverse else "v": (own.take(depth * parts, even), parts)}
        # What one chunk's gates of v were for is done before the next one's land.
        for name in () if reverse else channel_gates(rule, "z"):
            size = pages_of(dtypes[name])
            self.values[name] = (own.take(size, size > 1), 0)
        self.own = own.count + own.count % 2
        # After the last chunk, the parts of a transition.
        self.own = max(self.own, PARTS * pieces)

    def bytes(self, warpgroups: int) -> int:
        return (self.shared + warpgroups * self.own) * PAGE


def choose(
    problem: Problem, rule: TiledRule, dtypes: Mapping[str, Any], stretches: int, reverse: bool = False
) -> tuple[int, int] | None:
    """(warpgroups, depth) that fit into shared memory, or None."""
    blocks = problem.batch * problem.value_heads * stretches * problem.value_pieces
    most = 1 if blocks <= PROCESSORS else 2
    options = [(w, d) for d in (2, 1) for w in range(most, 0, -1) if problem.value_pieces % w == 0]
    for warpgroups, depth in options:
        if Layout(problem, rule, dtypes, depth, reverse).bytes(warpgroups) <= SMEM_LIMIT - RESERVED:
            return warpgroups, depth
    return None


def _inputs(problem: Problem, rule: TiledRule, how: Scan) -> tuple[list[str], list[str], list[str], list[str]]:
    """Names of the arrays that a scan reads: shared tiles; values and gates; vectors for what lands; for the rest."""
    reads_q = how.outputs or how.reverse or (problem.erases and problem.direct and "q" in (problem.terms or ()))
    tiles = (["q"] if reads_q else []) + ["k"] + (["y"] if problem.erases and not problem.direct else [])
    tiles += channel_gates(rule, "k") if problem.direct else []
    tiles += (["p"] if how.outputs or how.reverse else []) + (["a"] if problem.erases else [])
    values = [] if how.identity else ["d_out"] if how.reverse else ["v", *channel_gates(rule, "z")]
    outputs = (() if how.identity or how.reverse else ("z",)) + (("k",) if problem.direct else ())
    valid = ["valid"] if problem.masked else []
    vectors: list[str] = []
    if problem.direct:
        vectors += head_gates(rule, "e") + valid if problem.erases else []
        vectors += ["into", "out_of"] if problem.decay is not None else []
    return tiles, values, head_gates(rule, *outputs) + valid, vectors


def scan(
    problem: Problem,
    rule: TiledRule,
    how: Scan,
    prepared: Mapping[str, Array],
    inputs: Mapping[str, Array],
    start: Array | None,
    interpret: Any = None,
) -> dict[str, Array]:
    """Runs the chunks of each stretch in order.

    prepared: what `prepare` returns. inputs: as `prepare` takes them, with v [B, T, HV, V] and its gates, and with a
    decay per head `carry` [B, heads, chunks], the decay across a chunk.
    start: [B, HV, stretches that run, K, V], the states before each; None with `how.identity`.
    Returns:
        out [B, T, HV, V] and end [B, HV, K, V] with `how.outputs`, else end [B, HV, stretches that ran, K, V], with
        `how.identity` [2, B, HV, stretches that ran, K, K] in bfloat16 parts; states [chunks, B, HV, K, V] with
        `how.save_states`.
    """
    numbers = problem.numbers
    columns = problem.key_dim if how.identity else problem.value_dim
    tiles, values, landing, vectors = _inputs(problem, rule, how)
    given = {n: prepared[n] if n in prepared else inputs[n] for n in (*tiles, *values, *landing, *vectors)}
    if problem.decay is not None:
        name = "gamma" if problem.decay == "key" else "carry"
        given[name] = prepared[name] if name in prepared else inputs[name]
    if start is not None:
        given["start"] = start
    layout = Layout(problem, rule, {n: x.dtype for n, x in inputs.items()}, how.depth, how.reverse)
    state_shape = (problem.batch, problem.value_heads, problem.key_dim, columns)
    out: dict[str, Any] = {}
    kept = (problem.batch, problem.value_heads, problem.chunks * C, problem.value_dim)
    names = ("d_z", "d_states") if how.reverse and how.outputs else ("kept_u", "kept_states") if how.keep else None
    if names is not None:
        parts = numbers.parts if how.reverse else problem.u_parts
        out[names[0]] = jax.ShapeDtypeStruct((parts, *kept), numbers.dtype)
        out[names[1]] = jax.ShapeDtypeStruct((numbers.parts, problem.chunks, *state_shape), numbers.dtype)
    if how.outputs and not how.reverse:
        shape = (problem.batch, problem.length, problem.value_heads, problem.value_dim)
        out["out"] = jax.ShapeDtypeStruct(shape, problem.dtype)
    if how.outputs:
        out["end"] = jax.ShapeDtypeStruct(state_shape, jnp.float32)
    else:
        each = (*state_shape[:2], how.count, *state_shape[2:])
        out["end"] = jax.ShapeDtypeStruct(each, jnp.float32)
    if how.identity:
        out["end"] = jax.ShapeDtypeStruct((PARTS, *each), jnp.bfloat16)
    if how.save_states:
        out["states"] = jax.ShapeDtypeStruct((problem.chunks, *state_shape), jnp.float32)
    others = [jnp.bfloat16] if how.identity else [jnp.float16] if how.keep else []
    landed = [given[n].dtype for n in (*tiles, *values)]
    dtypes = list(dict.fromkeys(jnp.dtype(x) for x in (numbers.dtype, problem.dtype, *landed, *others)))
    per_stretch = how.chunks(problem)
    wider = [n for n in tiles if n in prepared and prepared[n].dtype != numbers.dtype]
    block = Block(problem, rule, layout, how, tiles, values, landing, vectors, tuple(wider))

    def body(*refs: Any) -> None:
        arrays = dict(zip(given, refs, strict=False))
        results = dict(zip(out, refs[len(given) :], strict=False))
        shared_views, own_views, *barriers = refs[len(given) + len(out) :]
        place = (lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("stretch"))
        me = lax.axis_index("warpgroup")
        own = [Pages(own_views, w, dtypes) for w in range(how.warpgroups)]
        tile = lax.axis_index("tile") * how.warpgroups
        first = (place[2] + how.first) * per_stretch
        last = jnp.minimum(first + per_stretch, problem.chunks)

        def steps(me: Any) -> Steps:
            pages = Pages(shared_views, 0, dtypes), Pages(own_views, me, dtypes), own
            kind = Reverse if how.reverse else Steps
            return kind(block, arrays, results, pages, Barriers(*barriers), place, (tile, me), (first, last))

        pl.when(me == how.warpgroups)(lambda: steps(0).serve())
        pl.when(me < how.warpgroups)(lambda: steps(me).run())

    made = plgpu.kernel(
        body,
        out_type=list(out.values()),
        grid=(problem.batch, how.count, problem.value_heads, columns // (C * how.warpgroups)),
        grid_names=("batch", "stretch", "head", "tile"),
        scratch_types=[
            memory(1, layout.shared, dtypes, numbers.interpret),
            memory(how.warpgroups, layout.own, dtypes, numbers.interpret),
            plgpu.Barrier(num_arrivals=block.arrivals, num_barriers=how.depth),
            plgpu.Barrier(num_arrivals=1, num_barriers=how.depth),
            plgpu.Barrier(num_arrivals=how.warpgroups, num_barriers=how.depth),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=numbers.parts == 1,
            reduction_scratch_bytes=1024,
            unsafe_no_auto_barriers=True,  # see `tiles.sync`
        ),
        interpret=interpret,
        num_threads=how.warpgroups + 1,
        thread_name="warpgroup",
    )(*given.values())
    return dict(zip(out, made, strict=True))
