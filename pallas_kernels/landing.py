"""How the tiles of one chunk reach `scan`, and where they lie: in the shared memory of a block of warpgroups."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pages import Pages
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.tiles import ROW, C, Numbers, put, sync, take, vector
from pallas_kernels.tokens import Tokens


class Block(NamedTuple):
    """What is fixed when the kernel is built. tiles, values: names of the arrays whose chunks land; landing, vectors:
    of those with one number for each token, for what lands and for what is computed; others: of tiles from `prepare`
    that have another type than the operands here."""

    problem: Problem
    rule: TiledRule
    layout: Any
    how: Any
    tiles: list[str]
    values: list[str]
    landing: list[str]
    vectors: list[str]
    others: tuple[str, ...] = ()

    def lands(self, name: str) -> bool:
        """Whether a shared tile comes as the caller gave it, not from `prepare`."""
        return self.problem.direct and name not in ("a", "p")

    def pieces(self, name: str) -> int:
        return 1 if name in ("a", "p") else self.problem.key_pieces

    def copies(self, name: str) -> int:
        return 1 if self.lands(name) else self.problem.numbers.parts

    @property
    def converts(self) -> bool:
        """Whether anything that lands is not yet an operand."""
        return self.problem.direct or bool(self.values) or bool(self.others)

    @property
    def arrivals(self) -> int:
        """Copies of one chunk."""
        return sum(self.pieces(n) * self.copies(n) for n in self.tiles) + self.how.warpgroups * len(self.values)


class Barriers(NamedTuple):
    """Of a block, one for each chunk in flight."""

    full: Any  # a chunk has landed
    ready: Any  # what landed is operands
    empty: Any  # all warpgroups that compute are done with it


class Landing:
    """The chunks first .. last - 1 of one head.

    arrays, results: by name, in device memory. pages: of the block, of this warpgroup, and of each. place: sequence,
    value head, stretch. tile: the first tile of values of the block, and which of its warpgroups this is.
    """

    def __init__(
        self,
        block: Block,
        arrays: Mapping[str, Any],
        results: Mapping[str, Any],
        pages: tuple[Pages, Pages, list[Pages]],
        barriers: Barriers,
        place: tuple[Any, Any, Any],
        tile: tuple[Any, Any],
        between: tuple[Any, Any],
    ) -> None:
        self.block, self.arrays, self.results = block, arrays, results
        self.problem, self.layout, self.how = block.problem, block.layout, block.how
        self.numbers = block.problem.numbers
        self.shared, self.mine, self.each = pages
        self.barriers = barriers
        self.batch, self.head, self.stretch = place
        self.tile, self.me = tile
        self.first, self.last = between
        self.pieces = range(block.problem.key_pieces)
        self.column = (self.tile + self.me) * C

    # Where things are.

    def index(self, number: Any) -> Any:
        """The chunk whose turn it is after `number` others; one of the sequence's in any case."""
        turn = self.last - 1 - number if self.how.reverse else self.first + number
        return jnp.clip(turn, 0, self.problem.chunks - 1)

    def tokens(self, index: Any, vectors: dict[str, Array] | None = None) -> Tokens:
        return Tokens(self.problem, self.block.rule, self.arrays, (self.batch, self.head, index), vectors)

    def page(self, name: str, slot: Any, piece: int = 0) -> Any:
        first, step = self.layout.tiles[name]
        return slot * self.layout.slot + first + piece * step

    def operand(self, name: str, slot: Any, piece: int = 0) -> Any:
        return self.shared.operand(self.page(name, slot, piece), self.numbers)

    def own(self, page: Any) -> Any:
        return self.mine.operand(page, self.numbers)

    def value_page(self, name: str, slot: Any) -> Any:
        first, step = self.layout.values[name]
        return first + slot * step

    @property
    def finer(self) -> bool:
        """Whether U is kept with more digits than one operand has."""
        return self.how.keep and self.problem.u_parts > self.numbers.parts

    @property
    def of_z(self) -> Numbers:
        """Z is no operand where something is erased: of float16 it keeps more digits of what came as such."""
        return replace(self.numbers, dtype=jnp.float16) if self.finer else self.numbers

    # Copies.

    def fetch(self, index: Any, slot: Any) -> None:
        """Starts the copies of one chunk."""
        tokens, full = self.tokens(index), self.barriers.full.at[slot]
        for name in self.block.tiles:
            for piece in range(self.block.pieces(name)):
                page = self.page(name, slot, piece)
                if self.block.lands(name):
                    tokens.fetch(name, self.shared.tile(page, self.arrays[name].dtype), piece, full)
                    continue
                for part, ref in enumerate(self.landing_tile(name, page)):
                    place = (part, self.batch, self.head, tokens.tokens, pl.ds(piece * C, C))
                    plgpu.copy_gmem_to_smem(self.arrays[name].at[place], ref, full)
        for name in self.block.values:
            for other, pages in enumerate(self.each):
                tile = pages.tile(self.value_page(name, slot), self.arrays[name].dtype)
                tokens.fetch(name, tile, self.tile + other, full)

    def landing_tile(self, name: str, page: Any) -> Any:
        """Where a tile from `prepare` lands, part by part."""
        if name in self.block.others:
            return (self.shared.tile(page, self.arrays[name].dtype),)
        return self.shared.operand(page, self.numbers)

    def land(self, index: Any, slot: Any, vectors: dict[str, Array]) -> None:
        """Waits for a chunk and makes operands of what landed: q and k, and Z for each warpgroup."""
        plgpu.barrier_wait(self.barriers.full.at[slot])
        if not self.block.converts:
            return
        tokens = self.tokens(index, vectors)

        def loaded() -> None:
            if self.numbers.parts == 2:
                sync()  # 32-bit rows end elsewhere as 16-bit tiles

        names = [n for n in self.block.tiles if self.block.lands(n)]
        for piece in self.pieces if names else ():
            tiles = {n: tokens.landed(self.shared.tile(self.page(n, slot, piece), self.arrays[n].dtype)) for n in names}
            made = {n: tiles[n] for n in ("q",) if n in tiles}
            made["k"] = tokens.output("k", tiles | tokens.gates("k"), piece)
            loaded()
            for name, x in made.items():
                put(self.operand(name, slot, piece), x, self.numbers)
        for name in self.block.others:
            for piece in range(self.block.pieces(name)):
                page = self.page(name, slot, piece)
                put(self.shared.operand(page, self.numbers), take(self.landing_tile(name, page)), self.numbers)
        for other, pages in enumerate(self.each if self.block.values else ()):
            tiles = {
                n: tokens.landed(pages.tile(self.value_page(n, slot), self.arrays[n].dtype)) for n in self.block.values
            }
            name = self.block.values[0]
            z = tiles[name] if self.how.reverse else tokens.output("z", tiles | tokens.gates("z"), self.tile + other)
            loaded()
            numbers = self.numbers if self.how.reverse else self.of_z
            put(pages.operand(self.value_page(name, slot), numbers), z, numbers)
        sync()
        plgpu.barrier_arrive(self.barriers.ready.at[slot])

    def serve(self) -> None:
        """What the last warpgroup does: all copies, and operands of what they bring."""
        depth, count = self.how.depth, self.last - self.first
        lead = max(depth - 1, 1)
        for number in range(lead):
            pl.when(number < count)(partial(self.fetch, self.index(number), number))

        def step(number: Any, vectors: dict[str, Array]) -> dict[str, Array]:
            new = number + lead
            ahead = self.vectors(self.block.landing, self.index(number + 1))
            self.land(self.index(number), slot_of(number, depth), vectors)

            @pl.when(new < count)
            def _() -> None:
                pl.when(new >= depth)(lambda: plgpu.barrier_wait(self.barriers.empty.at[slot_of(new, depth)]))
                self.fetch(self.index(new), slot_of(new, depth))

            return ahead

        lax.fori_loop(0, count, step, self.vectors(self.block.landing, self.index(0)))

    def wait(self, number: Any) -> None:
        """Until a chunk can be used."""
        barrier = self.barriers.ready if self.block.converts else self.barriers.full
        plgpu.barrier_wait(barrier.at[slot_of(number, self.how.depth)])

    def done(self, number: Any) -> None:
        """This warpgroup needs a chunk no more."""
        if self.numbers.interpret:
            sync()
        again = self.first + number + self.how.depth < self.last
        pl.when(again)(lambda: plgpu.barrier_arrive(self.barriers.empty.at[slot_of(number, self.how.depth)]))

    def vectors(self, names: list[str], index: Any) -> dict[str, Array]:
        tokens = self.tokens(index)
        return {name: tokens.load(name) for name in names}

    def decays(self, index: Any) -> list[Any]:
        """gamma for each piece: a vector with a number for each row, one number for all, or nothing."""
        if self.problem.decay == "key":
            gamma = self.arrays["gamma"].at[self.batch, self.head, index]
            return [vector(gamma.at[pl.ds(piece * C, C)], ROW) for piece in self.pieces]
        if self.problem.decay == "head":
            ref = self.arrays["carry"]
            return [ref[self.batch, self.problem.shared_head(self.head, ref.shape[1]), index]]
        return []


def slot_of(number: Any, depth: int) -> Any:
    return lax.rem(number, depth) if depth > 1 else 0
