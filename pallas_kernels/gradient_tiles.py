"""Where the tiles of one chunk lie while its gradients are made, how they get there, and how gradients leave."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gradient_layout import Layout
from pallas_kernels.pages import Pages
from pallas_kernels.problem import Problem
from pallas_kernels.pull_back import pull_back
from pallas_kernels.rule import TiledRule
from pallas_kernels.scores import SCALE
from pallas_kernels.tiles import COL, ROW, C, Numbers, cols, product, put, rows, sync, take, transposed, vector
from pallas_kernels.tokens import Tokens

ONES = {jnp.bfloat16: 1.0, jnp.float16: 1.0 / SCALE}
"""What is not 0 in a matrix that sums gradients or log_decay."""


class Barriers(NamedTuple):
    """values, keys: what both warpgroups use. states: for each warpgroup and each of two places. late: for each
    warpgroup. met: the warpgroups themselves."""

    values: Any
    keys: Any
    states: Any
    late: Any
    met: Any


def column_name(kind: Any) -> str:
    return f"columns {jnp.dtype(kind).name}"


def place(problem: Problem, task: Any) -> tuple[Any, Any, Any]:
    """Sequence, head and chunk of a block."""
    rest, chunk = lax.div(task, problem.chunks), lax.rem(task, problem.chunks)
    return lax.div(rest, problem.value_heads), lax.rem(rest, problem.value_heads), chunk


class GradientTiles(Tokens):
    """One chunk of one head in shared memory. me: which of the warpgroups this is."""

    def __init__(
        self,
        problem: Problem,
        rule: TiledRule,
        layout: Layout,
        arrays: Mapping[str, Any],
        results: Mapping[str, Any],
        pages: Pages,
        columns: Mapping[Any, Any],
        barriers: Barriers,
        task: Any,
        me: Any,
    ) -> None:
        super().__init__(problem, rule, arrays, place(problem, task))
        self.layout, self.results, self.pages, self.barriers = layout, results, pages, barriers
        self.columns = columns
        self.me = me if layout.warpgroups > 1 else 0
        self.pull_back = pull_back(rule)
        self.sums: dict[str, Array] = {}
        # Where things land.
        self.places = {**{n: layout.keys[n] for n in ("q", "k")}, **layout.gates}
        self.vectors["numbers"] = vector(arrays["numbers"], ROW)
        for name, ref in arrays.items():
            if len(ref.shape) in (2, 3) and name not in ("through", "numbers", *map(column_name, ONES)):
                self.vectors[name] = self.load(name)

    def mine(self, place: tuple[Any, int]) -> Any:
        """The first page of this warpgroup."""
        return place[0] + self.me * place[1]

    def operand(self, place: tuple[int, int], index: Any = 0) -> Any:
        return self.pages.operand(place[0] + index * place[1], self.numbers)

    def value(self, name: str, piece: Any) -> Any:
        return self.operand(self.layout.values[name], piece)

    def key(self, name: str, piece: Any) -> Any:
        return self.operand(self.layout.keys[name], piece)

    def landing_tile(self, places: Mapping[str, tuple[int, int]], name: str, index: Any) -> Any:
        first, step = places[name]
        return self.pages.tile(first + index * step, self.inputs[name].dtype)

    def landing(self, name: str, place: tuple[Any, int], index: Any) -> Any:
        """Where what the scans left lands, part by part: the forward pass may leave another type than the operands."""
        if self.numbers.parts == 2:
            return self.operand(place, index)
        if name == "u" and self.inputs["u"].shape[0] == 2 and self.layout.u_low is not None:
            return (*self.operand(place, index), *self.operand(self.layout.u_low, index))
        return (self.pages.tile(place[0] + index * place[1], self.inputs[name].dtype),)

    def to_operand(self, name: str, place: tuple[Any, int], index: Any) -> None:
        """In the same place."""
        if self.inputs[name].dtype != self.numbers.dtype:
            put(self.operand(place, index), take(self.landing(name, place, index)), self.numbers)

    def ones(self, columns: tuple[Any, ...], dtype: Any) -> Array:
        """A matrix with `ONES` of its type in some columns of each row, from the first to the last of two that are
        vectors or numbers, and 0 in the others.

        The numbers of columns come from memory: ptxas 13.0 may set a register of the left side of a product after the
        product has begun if it knows the number, so none of a matrix may be known to it.
        """
        one = ONES[dtype]
        first, last = columns

        def row(x: Any) -> Array:
            x = self.vectors["numbers"] * 0 + x if isinstance(x, int) else x
            return rows((x.astype(jnp.float32) * one).astype(dtype), C)

        column = cols(vector(self.columns[dtype], COL), C)
        inside = jnp.minimum(column - row(first - 1), row(last + 1) - column)
        return jnp.maximum(jnp.minimum(inside, jnp.array(one, dtype)), jnp.array(0, dtype))

    def times(self, matrix: Array, x: Array, *, transpose: bool = False) -> Array:
        """matrix x (or x^T) of a bfloat16 tile and a float32 one, which is stored in two parts."""
        wide = Numbers(jnp.bfloat16, 2, self.numbers.interpret)
        memory = self.pages.operand(self.mine(self.layout.spare), wide)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a result on its way out
        put(memory, x, wide)
        sync()
        one = Numbers(jnp.bfloat16, 1, self.numbers.interpret)
        made = product(one, *(((matrix,), (part,)) for part in (transposed(memory) if transpose else memory)))
        sync()
        return made

    def meet(self) -> None:
        """What each warpgroup has stored is visible to the other."""
        sync()
        if self.layout.warpgroups > 1:
            plgpu.barrier_arrive(self.barriers.met)
            plgpu.barrier_wait(self.barriers.met)

    def fetch_all(self) -> None:
        pl.when(self.me == 0)(self._fetch_shared)
        if self.layout.tiles == 1:
            self.fetch_states(self.me, 0)
        if self.layout.early:
            self.fetch_late(self.me)

    def kept(self, name: str, part: int, piece: Any) -> Any:
        """A part of U or dZ in device memory."""
        return self.inputs[name].at[part, self.batch, self.head, self.tokens, pl.ds(piece * C, C)]

    def state(self, name: str, key: Any, value: Any) -> list[Any]:
        """S or D of 64 key and 64 value channels in device memory, part by part."""
        within = (self.batch, self.head, pl.ds(key * C, C), pl.ds(value * C, C))
        return [self.inputs[name].at[(p, self.index, *within)] for p in range(self.numbers.parts)]

    def _fetch_shared(self) -> None:
        problem, landing = self.problem, self.barriers.values
        for kind, ref in self.columns.items():
            plgpu.copy_gmem_to_smem(self.inputs[column_name(kind)], ref, landing)
        for piece in range(problem.value_pieces):
            self.fetch("d_out", self.landing_tile(self.layout.values, "d_out", piece), piece, landing)
            for name in ("u", "d_z"):
                for part, ref in enumerate(self.landing(name, self.layout.values[name], piece)):
                    plgpu.copy_gmem_to_smem(self.kept(name, part, piece), ref, landing)
        for name in self.places:
            for piece in range(problem.key_pieces):
                self.fetch(name, self.landing_tile(self.places, name, piece), piece, self.barriers.keys)

    def fetch_late(self, piece: Any) -> None:
        """v and its gates."""
        for name in self.layout.late:
            self.fetch(name, self.landing_tile(self.layout.late, name, self.me), piece, self.barriers.late.at[self.me])

    def state_places(self) -> list[tuple[tuple[Any, int], tuple[Any, int]]]:
        """Where S and D land, in turn."""
        layout = self.layout
        places = [(layout.state, layout.after)]
        if not layout.shared_spare and self.numbers.parts == 1:
            first, step = layout.spare
            places.append(((first, step), (first + 1, step)))
        return places

    def level_memory(self) -> tuple[Any, Any]:
        """The same place for two operands."""
        state, after = self.state_places()[0]
        return self.operand(state, self.me), self.operand(after, self.me)

    def fetch_states(self, key: Any, value: int) -> None:
        """S and D of 64 key and 64 value channels."""
        places = self.state_places()
        slot = value % len(places)
        for name, place in zip(("states", "d_states"), places[slot], strict=True):
            for source, ref in zip(self.state(name, key, value), self.landing(name, place, self.me), strict=True):
                plgpu.copy_gmem_to_smem(source, ref, self.barriers.states.at[2 * self.me + slot])

    def wait_states(self, value: int) -> tuple[Any, Any]:
        places = self.state_places()
        slot = value % len(places)
        plgpu.barrier_wait(self.barriers.states.at[2 * self.me + slot])
        state, after = places[slot]
        if self.inputs["states"].dtype != self.numbers.dtype:
            self.to_operand("states", state, self.me)
            sync()
        return self.operand(state, self.me), self.operand(after, self.me)

    def add(self, name: str, x: Array) -> None:
        """To the gradient of a gate with one number per head."""
        self.sums[name] = self.sums[name] + x if name in self.sums else x

    def store(self, name: str, x: Array, piece: Any) -> None:
        """A gradient with one number per channel to device memory."""
        dtype = self.results[name].dtype
        tile = self.pages.tile(self.mine(self.layout.spare), dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = x.astype(dtype)
        sync()
        place = (self.batch, self.tokens, self.head, pl.ds(piece * C, C))
        plgpu.copy_smem_to_gmem(tile, self.results[name].at[place])
