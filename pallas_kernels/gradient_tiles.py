"""Where the tiles of one chunk lie while its gradients are made, how they get there, and how gradients leave."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pages import Pages
from pallas_kernels.problem import Problem
from pallas_kernels.pull_back import pull_back
from pallas_kernels.rule import TiledRule
from pallas_kernels.tiles import C, Numbers, product, put, sync, transposed
from pallas_kernels.tokens import Tokens


class GradientTiles(Tokens):
    """One chunk of one head in shared memory."""

    def __init__(
        self,
        problem: Problem,
        rule: TiledRule,
        layout: Any,
        arrays: Mapping[str, Any],
        results: Mapping[str, Any],
        pages: Pages,
        barriers: tuple[Any, ...],
        place: tuple[Any, Any, Any],
    ) -> None:
        super().__init__(problem, rule, arrays, place)
        self.layout, self.results, self.pages = layout, results, pages
        self.landing, self.states, self.late = barriers
        self.pull_back = pull_back(rule)
        self.sums: dict[str, Array] = {}
        # Where things land.
        self.places = {**{n: layout.keys[n] for n in ("q", "k")}, **layout.gates}
        for name, ref in arrays.items():
            if len(ref.shape) in (2, 3) and name not in ("select", "spread", "through"):
                self.vectors[name] = self.load(name)

    def page(self, kind: str, name: str, piece: Any = 0) -> Any:
        first, step = getattr(self.layout, kind)[name]
        return first + piece * step

    def operand(self, kind: str, name: str, piece: Any = 0) -> Any:
        return self.pages.operand(self.page(kind, name, piece), self.numbers)

    def landing_tile(self, places: Mapping[str, tuple[int, int]], name: str, piece: Any) -> Any:
        first, step = places[name]
        return self.pages.tile(first + piece * step, self.inputs[name].dtype)

    def times(self, matrix: Array, x: Array, *, transpose: bool = False) -> Array:
        """matrix x (or x^T) of a bfloat16 tile and a float32 one, which is stored in two parts."""
        wide = Numbers(jnp.bfloat16, 2, self.numbers.interpret)
        memory = self.pages.operand(self.layout.spare, wide)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a result on its way out
        put(memory, x, wide)
        sync()
        one = Numbers(jnp.bfloat16, 1, self.numbers.interpret)
        made = product(one, *(((matrix,), (part,)) for part in (transposed(memory) if transpose else memory)))
        sync()
        return made

    def fetch_all(self) -> None:
        problem = self.problem
        for name in self.places:
            for piece in range(problem.key_pieces):
                self.fetch(name, self.landing_tile(self.places, name, piece), piece, self.landing)
        for piece in range(problem.value_pieces):
            self.fetch("d_out", self.landing_tile(self.layout.values, "d_out", piece), piece, self.landing)
            for name in ("u", "d_z"):
                for part, ref in enumerate(self.operand("values", name, piece)):
                    place = (part, self.batch, self.head, self.tokens, pl.ds(piece * C, C))
                    plgpu.copy_gmem_to_smem(self.inputs[name].at[place], ref, self.landing)

    def fetch_late(self) -> None:
        """v and its gates."""
        sync()
        for name in self.layout.late:
            for piece in range(self.problem.value_pieces):
                self.fetch(name, self.landing_tile(self.layout.late, name, piece), piece, self.late)
        plgpu.barrier_wait(self.late)

    def fetch_states(self, key: Any, value: Any) -> tuple[Any, Any]:
        """S and D of 64 key and 64 value channels."""
        found = []
        for name, page in (("states", self.layout.state), ("d_states", self.layout.after)):
            found.append(self.pages.operand(page, self.numbers))
            for part, ref in enumerate(found[-1]):
                place = (part, self.index, self.batch, self.head, pl.ds(key * C, C), pl.ds(value * C, C))
                plgpu.copy_gmem_to_smem(self.inputs[name].at[place], ref, self.states)
        plgpu.barrier_wait(self.states)
        return found[0], found[1]

    def add(self, name: str, x: Array) -> None:
        """To the gradient of a gate with one number per head."""
        self.sums[name] = self.sums[name] + x if name in self.sums else x

    def store(self, name: str, x: Array, piece: int) -> None:
        """A gradient with one number per channel to device memory."""
        dtype = self.results[name].dtype
        tile = self.pages.tile(self.layout.spare, dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = x.astype(dtype)
        sync()
        place = (self.batch, self.tokens, self.head, pl.ds(piece * C, C))
        plgpu.copy_smem_to_gmem(tile, self.results[name].at[place])
