"""The states before each stretch of a sequence, from what the stretches add and their transitions: S <- M S + E."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import RESERVED
from pallas_kernels.pages import PAGE, Pages, memory
from pallas_kernels.problem import Problem
from pallas_kernels.tiles import SMEM_LIMIT, TILE, C, Numbers, accumulate, put, sync, transposed

PARTS = 2
"""16-bit parts of a transition, and of the states that it is applied to: a relative error of 2^-16."""


def join(
    problem: Problem, start: Array, ends: Array, moves: Array, interpret: Any = None, *, reverse: bool = False
) -> Array:
    """The states before each of n stretches, [B, HV, n, K, V], where something is erased.

    start: [B, HV, K, V], before the first. ends: [B, HV, n - 1, K, V], the state after the first, and what each later
    one adds. moves: [PARTS, B, HV, n - 2, K, K], bfloat16 parts of the transitions of the second and later.
    reverse: for gradients, D <- M^T D + E from the last stretch to the first: the gradients of the states after each,
    from that after the last, what each adds (the last one's with that start), and the same transitions.
    """
    if reverse:
        ends, moves = jnp.flip(ends, 2), jnp.flip(moves, 3)
    count, pieces = ends.shape[2] + 1, problem.key_pieces
    numbers = Numbers(jnp.bfloat16, PARTS, problem.numbers.interpret)
    each = PARTS * pieces
    total = (count - 2) * pieces
    room = (SMEM_LIMIT - RESERVED) // PAGE
    buffers = min(4, total, room // each - 1)

    def body(start, ends, moves, out, views, landed):
        batch, head, column = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("tile") * C
        pages = Pages(views, 0, [numbers.dtype])
        # The state, and rows of 64 of transitions.
        memory = [pages.operand(PARTS * piece, numbers) for piece in range(pieces)]

        def row(number: Any, other: int) -> Any:
            return pages.operand(each * (1 + lax.rem(number, buffers)) + PARTS * other, numbers)

        def fetch(number: Any) -> None:
            stretch, piece = lax.div(number, pieces), lax.rem(number, pieces)
            for other in range(pieces):
                for part, ref in enumerate(row(number, other)):
                    to, of = pl.ds(piece * C, C), pl.ds(other * C, C)
                    place = (part, batch, head, stretch, *((of, to) if reverse else (to, of)))
                    plgpu.copy_gmem_to_smem(moves.at[place], ref, landed.at[lax.rem(number, buffers)])

        def load(ref: Any, *place: Any) -> tuple[Array, ...]:
            tiles = [ref.at[(*place, pl.ds(piece * C, C), pl.ds(column, C))] for piece in range(pieces)]
            return tuple(plgpu.load(tile, layout=TILE, optimized=False) for tile in tiles)

        def store(stretch: Any, state: tuple[Array, ...]) -> None:
            for piece, x in enumerate(state):
                out.at[batch, head, stretch, pl.ds(piece * C, C), pl.ds(column, C)][...] = x

        def across(stretch: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
            after = list(load(ends, batch, head, stretch))
            sync()
            for x, to in zip(state, memory, strict=True):
                put(to, x, numbers)
            sync()
            for piece in range(pieces):
                number = (stretch - 1) * pieces + piece
                plgpu.barrier_wait(landed.at[lax.rem(number, buffers)])
                rows = [row(number, other) for other in range(pieces)]
                terms = [(transposed(x) if reverse else x, memory[other]) for other, x in enumerate(rows)]
                (after[piece],) = accumulate(numbers, [(terms, after[piece])])
                sync()
                pl.when(number + buffers < total)(partial(fetch, number + buffers))
            store(stretch + 1, tuple(after))
            return tuple(after)

        for number in range(buffers):
            fetch(jnp.int32(number))
        store(0, load(start, batch, head))
        first = load(ends, batch, head, 0)
        store(1, first)
        lax.fori_loop(1, count - 1, across, first)

    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*start.shape[:2], count, *start.shape[2:]), jnp.float32),
        grid=(problem.batch, problem.value_heads, problem.value_pieces),
        grid_names=("batch", "head", "tile"),
        scratch_types=[
            memory(1, each * (1 + buffers), [numbers.dtype], numbers.interpret),
            plgpu.Barrier(num_arrivals=each, num_barriers=buffers),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # see `tiles.sync`
        ),
        interpret=interpret,
    )(start, ends, moves)
    return jnp.flip(made, 2) if reverse else made


def decayed(
    problem: Problem, prepared: Mapping[str, Array], start: Array, ends: Array, *, reverse: bool = False
) -> Array:
    """The same where nothing is erased: a transition is the decay across a stretch."""
    ends = jnp.flip(ends, 2) if reverse else ends
    count = ends.shape[2] + 1
    each = -(-problem.chunks // count)
    decay = None
    if problem.decay is not None and count > 2:
        x = prepared["gamma"] if problem.decay == "key" else prepared["carry"][..., None]
        x = jnp.repeat(x, problem.value_heads // x.shape[1], axis=1)[:, :, each : each * (count - 1)]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, each * (count - 2) - x.shape[2]), (0, 0)), constant_values=1)
        decay = jnp.prod(x.reshape(*x.shape[:2], count - 2, each, -1), axis=3)[..., None]
        decay = jnp.flip(decay, 2) if reverse else decay
    before = [start, ends[:, :, 0]]
    for index in range(1, count - 1):
        moved = before[-1] if decay is None else decay[:, :, index - 1] * before[-1]
        before.append(moved + ends[:, :, index])
    made = jnp.stack(before, axis=2)
    return jnp.flip(made, 2) if reverse else made
