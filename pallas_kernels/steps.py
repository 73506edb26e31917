"""One chunk after the other: what `scan` does, in the registers and the shared memory of one warpgroup."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import coefficients
from pallas_kernels.pages import Pages
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.tiles import (
    ROW,
    TILE,
    C,
    accumulate,
    iotas,
    products,
    put,
    rows,
    sync,
    take,
    transposed,
    vector,
    zeros,
)
from pallas_kernels.tokens import Tokens

Carry = tuple[tuple[Array, ...], dict[str, Array]]
"""The state [C, C] for each piece of 64 key channels, and the vectors of the chunk that comes."""


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


class Steps:
    """The chunks first .. last - 1 of one head.

    arrays, results: by name, in device memory. pages: of the block, of this warpgroup, and of each. barriers: a chunk
    has landed; its q and k are operands; all warpgroups are done with it. place: sequence, value head, stretch.
    tile: the first tile of values of the block, and which of its warpgroups this is.
    """

    def __init__(
        self,
        block: Block,
        arrays: Mapping[str, Any],
        results: Mapping[str, Any],
        pages: tuple[Pages, Pages, list[Pages]],
        barriers: tuple[Any, Any, Any],
        place: tuple[Any, Any, Any],
        tile: tuple[Any, Any],
        between: tuple[Any, Any],
    ) -> None:
        self.block, self.arrays, self.results = block, arrays, results
        self.problem, self.layout, self.how = block.problem, block.layout, block.how
        self.numbers = block.problem.numbers
        self.shared, self.mine, self.each = pages
        self.full, self.ready, self.empty = barriers
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
        tokens, full = self.tokens(index), self.full.at[slot]
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
        plgpu.barrier_wait(self.full.at[slot])
        tokens = self.tokens(index, vectors)

        def loaded() -> None:
            if self.numbers.parts == 2:
                sync()  # 32-bit rows end elsewhere as 16-bit tiles

        def keys(piece: int) -> None:
            names = [n for n in self.block.tiles if self.block.lands(n)]
            tiles = {n: tokens.landed(self.shared.tile(self.page(n, slot, piece), self.arrays[n].dtype)) for n in names}
            made = {n: tiles[n] for n in ("q",) if n in tiles}
            made["k"] = tokens.output("k", tiles | tokens.gates("k"), piece)
            loaded()
            for name, x in made.items():
                put(self.operand(name, slot, piece), x, self.numbers)

        if self.problem.direct:
            for piece in self.pieces:
                if self.several:
                    pl.when(self.me == piece % self.how.warpgroups)(lambda piece=piece: keys(piece))
                else:
                    keys(piece)
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
            plgpu.barrier_arrive(self.ready.at[slot])

    def done(self, slot: Any, again: Any) -> None:
        """This warpgroup needs a slot no more; again: whether another chunk will land there."""
        if self.several:
            if self.numbers.interpret:
                sync()
            pl.when(again)(lambda: plgpu.barrier_arrive(self.empty.at[slot]))

    def vectors(self, index: Any) -> dict[str, Array]:
        tokens = self.tokens(index)
        return {name: tokens.load(name) for name in self.block.vectors}

    def decays(self, index: Any) -> list[Any]:
        """gamma for each piece: a number for each row, one for all, or None."""
        if self.problem.decay == "key":
            gamma = self.arrays["gamma"].at[self.batch, self.head, index]
            return [rows(vector(gamma.at[pl.ds(piece * C, C)], ROW), C) for piece in self.pieces]
        if self.problem.decay == "head":
            ref = self.arrays["carry"]
            return [ref[self.batch, self.problem.shared_head(self.head, ref.shape[1]), index]] * len(self.pieces)
        return [None] * len(self.pieces)

    # The chunks.

    def initial(self) -> Carry:
        state = []
        for piece in self.pieces:
            if "start" in self.arrays:
                place = (pl.ds(piece * C, C), pl.ds(self.column, C))
                ref = self.arrays["start"].at[(self.batch, self.head, self.stretch, *place)]
                state.append(plgpu.load(ref, layout=TILE, optimized=False))
            elif self.how.identity:
                r, c = iotas()
                state.append(jnp.where(r + piece * C == c + self.column, 1.0, 0.0))
            else:
                state.append(zeros((C, C)))
        ahead = self.vectors(jnp.minimum(self.first, self.problem.chunks - 1)) if self.how.depth > 1 else {}
        if self.how.depth > 1:
            pl.when(self.first < self.last)(lambda: self.land(self.first, 0, ahead))
            # The gates of v land where the first chunk's did.
            self.done(1, self.first + 1 < self.last)
        return tuple(state), ahead

    def begin(self) -> None:
        """Starts the first copies."""
        self.leader(lambda: self.fetch(self.first, 0), self.first < self.last)

    def step(self, number: Any, carry: Carry) -> Carry:
        state, vectors = carry
        index, depth = self.first + number, self.how.depth
        slot, after = (lax.rem(number, depth), lax.rem(number + 1, depth)) if depth > 1 else (0, 0)
        # Early: these wait for device memory.
        ahead = self.vectors(jnp.minimum(index + depth - 1, self.last - 1))
        kept = self.decays(index)
        for piece, x in enumerate(state):
            put(self.own(self.layout.state + piece * self.numbers.parts), x, self.numbers)
            if self.how.save_states:
                place = (index, self.batch, self.head, pl.ds(piece * C, C), pl.ds(self.column, C))
                self.results["states"].at[place][...] = x
        sync()

        def fetch() -> None:
            if self.several:
                wait = lambda: plgpu.barrier_wait(self.empty.at[after])  # noqa: E731
                wait() if depth > 1 else pl.when(number > 0)(wait)
            self.fetch(index + depth - 1, after)

        more = index + 1 < self.last
        self.leader(fetch, more if depth > 1 else index < self.last)
        if depth == 1:
            vectors = ahead
            self.land(index, 0, vectors)
            sync()
        if self.problem.direct and self.several:
            plgpu.barrier_wait(self.ready.at[slot])
        of = self._reads(slot, self.tokens(index, vectors))
        u, t = self._corrections(slot, of, self.tokens(index, vectors))
        sums = []
        if self.how.outputs:
            sums.append(([(self.operand("p", slot), u)], of["out"]))
        for piece, (x, decay) in enumerate(zip(state, kept, strict=True)):
            key = transposed(self.operand("k", slot, piece))
            sums.append(([(key, t)], x if decay is None else x * decay))

        def meanwhile() -> None:
            if depth > 1:
                pl.when(more)(lambda: self.land(index + 1, after, ahead))

        made = accumulate(self.numbers, sums, meanwhile)
        if self.how.outputs:
            self._store(index, made.pop(0))
        self.done(slot, index + depth < self.last)
        return tuple(made), ahead if depth > 1 else {}

    def _reads(self, slot: Any, tokens: Tokens) -> dict[str, Array]:
        """What the state holds for the tokens: "e", what is erased, and "out", their output without this chunk's."""
        problem, direct = self.problem, self.problem.direct
        states = [self.own(self.layout.state + piece * self.numbers.parts) for piece in self.pieces]
        terms = (problem.terms if direct else ("y",)) if problem.erases else ()
        names = list(dict.fromkeys((*(terms or ()), *(("q",) if self.how.outputs else ()))))
        sums = [[(self.operand(n, slot, piece), states[piece]) for piece in self.pieces] for n in names]
        read = dict(zip(names, products(self.numbers, *sums), strict=True)) if names else {}
        if not direct:
            return {new: read[old] for new, old in (("e", "y"), ("out", "q")) if old in read}
        into = tokens.vectors["into"] if problem.decay is not None else 1.0
        found = {}
        if problem.erases:
            factors = coefficients(self.block.rule, tokens.gates("e"))._asdict()
            parts = [_scale(read[n], factors[n] * into) for n in terms or ()]
            found["e"] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        if self.how.outputs:
            found["out"] = _scale(read["q"], problem.scale * into)
        return found

    def _corrections(self, slot: Any, of: Mapping[str, Array], tokens: Tokens) -> tuple[Any, Any]:
        """U, and U with the decay to the end of the chunk, as operands."""
        z = None if self.how.identity else self.own(self.value_page("v", slot))
        x, t = self.own(self.layout.x), self.own(self.layout.t)
        separate = self.layout.t != self.layout.x
        if not self.problem.erases:
            if separate:
                put(t, take(z) * rows(tokens.vectors["out_of"], C), self.numbers)
                sync()
            return z, t if separate else z
        if self.how.outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's output
        put(x, -of["e"] if z is None else take(z) - of["e"], self.numbers)
        sync()
        (u,) = products(self.numbers, [(self.operand("a", slot), x)])
        sync()
        if self.how.outputs or not separate:
            put(x, u, self.numbers)
        if separate:
            put(t, u * rows(tokens.vectors["out_of"], C), self.numbers)
        sync()
        return x, t

    def _store(self, index: Any, out: Array) -> None:
        """The output to device memory, from where U was."""
        if self.problem.erases:
            sync()
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile = self.mine.tile(self.layout.x, self.problem.dtype)
        tile[...] = out.astype(self.problem.dtype)
        sync()
        target = (self.batch, pl.ds(index * C, C), self.head, pl.ds(self.column, C))
        plgpu.copy_smem_to_gmem(tile, self.results["out"].at[target])

    def finish(self, carry: Carry) -> None:
        """The last state to device memory."""
        for piece, x in enumerate(carry[0]):
            place = (pl.ds(piece * C, C), pl.ds(self.column, C))
            if not self.how.outputs:
                self.results["end"].at[(self.batch, self.head, self.stretch, *place)][...] = x
                continue

            @pl.when((self.last == self.problem.chunks) & (self.first < self.last))
            def _(x: Array = x, place: Any = place) -> None:
                self.results["end"].at[(self.batch, self.head, *place)][...] = x

        plgpu.wait_smem_to_gmem(0)


def _scale(x: Array, factor: Any) -> Array:
    """Each row times a number of its own, or all times one."""
    return x * (rows(factor, C) if getattr(factor, "ndim", 0) else factor)
