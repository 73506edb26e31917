"""How the tiles of one chunk reach `scan`, and where they lie: in the shared memory of a block of warpgroups."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pages import Pages
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.tiles import (
    ROW,
    C,
    put,
    sync,
    vector,
)
from pallas_kernels.tokens import Tokens

PARTS = 2
"""16-bit parts of a transition and of the states that it is applied to."""


class Block(NamedTuple):
    """What is fixed when the kernel is built. tiles, values, vectors: names of the arrays it reads."""

    problem: Problem
    rule: TiledRule
    layout: Any
    how: Any
    tiles: list[str]
    values: list[str]
    vectors: list[str]
    dtypes: list[Any]

    def lands(self, name: str) -> bool:
        """Whether a shared tile comes as the caller gave it, not from `prepare`."""
        return self.problem.direct and name not in ("a", "p")

    def pieces(self, name: str) -> int:
        return 1 if name in ("a", "p") else self.problem.key_pieces

    def copies(self, name: str) -> int:
        return 1 if self.lands(name) else self.problem.numbers.parts

    @property
    def arrivals(self) -> int:
        """Copies of one chunk."""
        return sum(self.pieces(n) * self.copies(n) for n in self.tiles) + self.how.warpgroups * len(self.values)


class Barriers(NamedTuple):
    """Of a block, one for each chunk in flight, or each piece of a transition."""

    full: Any  # a chunk has landed
    ready: Any  # its q and k are operands
    empty: Any  # all warpgroups are done with it
    landed: Any  # a piece of a transition has landed
    used: Any  # all warpgroups are done with it


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
        self.several = self.how.warpgroups > 1

    # Where things are.

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

    # Copies.

    def fetch(self, index: Any, slot: Any) -> None:
        """Starts the copies of one chunk; one warpgroup does."""
        tokens, full = self.tokens(index), self.barriers.full.at[slot]
        for name in self.block.tiles:
            for piece in range(self.block.pieces(name)):
                page = self.page(name, slot, piece)
                if self.block.lands(name):
                    tokens.fetch(name, self.shared.tile(page, self.arrays[name].dtype), piece, full)
                    continue
                for part, ref in enumerate(self.shared.operand(page, self.numbers)):
                    place = (part, self.batch, self.head, tokens.tokens, pl.ds(piece * C, C))
                    plgpu.copy_gmem_to_smem(self.arrays[name].at[place], ref, full)
        for name in self.block.values:
            for other, pages in enumerate(self.each):
                tile = pages.tile(self.value_page(name, slot), self.arrays[name].dtype)
                tokens.fetch(name, tile, self.tile + other, full)

    def leader(self, action: Any, when: Any) -> None:
        pl.when(when & (self.me == 0) if self.several else when)(action)

    def land(self, index: Any, slot: Any, vectors: dict[str, Array]) -> None:
        """Waits for a chunk and makes operands of what landed: q and k, shared out among the warpgroups, and Z."""
        plgpu.barrier_wait(self.barriers.full.at[slot])
        tokens = self.tokens(index, vectors)

        def loaded() -> None:
            if self.numbers.parts == 2:
                sync()  # 32-bit rows end elsewhere as 16-bit tiles

        def keys(piece: Any) -> None:
            names = [n for n in self.block.tiles if self.block.lands(n)]
            tiles = {n: tokens.landed(self.shared.tile(self.page(n, slot, piece), self.arrays[n].dtype)) for n in names}
            made = {n: tiles[n] for n in ("q",) if n in tiles}
            made["k"] = tokens.output("k", tiles | tokens.gates("k"), piece)
            loaded()
            for name, x in made.items():
                put(self.operand(name, slot, piece), x, self.numbers)

        if self.problem.direct:
            # By numbers of pieces, not by branches: all loads can be in flight at the same time then.
            count, several = len(self.pieces), self.how.warpgroups
            for start in range(0, count, several):
                piece = self.me + start if self.several else start
                if start + several <= count:
                    keys(piece)
                else:
                    pl.when(piece < count)(lambda piece=piece: keys(piece))
        if self.block.values:
            tiles = {
                n: tokens.landed(self.mine.tile(self.value_page(n, slot), self.arrays[n].dtype))
                for n in self.block.values
            }
            z = tokens.output("z", tiles | tokens.gates("z"))
            loaded()
            put(self.own(self.value_page("v", slot)), z, self.numbers)
        if self.problem.direct and self.several:
            sync()
            plgpu.barrier_arrive(self.barriers.ready.at[slot])

    def done(self, slot: Any, again: Any) -> None:
        """This warpgroup needs a slot no more; again: whether another chunk will land there."""
        if self.several:
            if self.numbers.interpret:
                sync()
            pl.when(again)(lambda: plgpu.barrier_arrive(self.barriers.empty.at[slot]))

    def vectors(self, index: Any) -> dict[str, Array]:
        tokens = self.tokens(index)
        return {name: tokens.load(name) for name in self.block.vectors}

    def decays(self, index: Any) -> list[Any]:
        """gamma for each piece: a vector with a number for each row, one number for all, or nothing."""
        if self.problem.decay == "key":
            gamma = self.arrays["gamma"].at[self.batch, self.head, index]
            return [vector(gamma.at[pl.ds(piece * C, C)], ROW) for piece in self.pieces]
        if self.problem.decay == "head":
            ref = self.arrays["carry"]
            return [ref[self.batch, self.problem.shared_head(self.head, ref.shape[1]), index]]
        return []
