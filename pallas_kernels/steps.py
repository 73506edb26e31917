"""One chunk after the other: what `scan` does, in the registers and the shared memory of one warpgroup."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.landing import PARTS, Landing
from pallas_kernels.linear import coefficients
from pallas_kernels.tiles import (
    ROW,
    TILE,
    C,
    Numbers,
    accumulate,
    iotas,
    products,
    put,
    rows,
    sync,
    take,
    transposed,
    vector,
)
from pallas_kernels.tokens import Tokens

Carry = tuple[tuple[Array, ...], dict[str, Array], list[Any]]
"""The state [C, C] for each piece of 64 key channels; the vectors and the decays of the chunk that comes."""


class Steps(Landing):
    """The recurrence over the chunks of one head."""

    def initial(self) -> Carry:
        """The state before the first chunk, and what must be there before it; starts the first copies."""
        state, depth = tuple(self._before(piece) for piece in self.pieces), self.how.depth
        if self.how.joins and self.how.count > 2:
            state = self._join(state)
        first = jnp.minimum(self.first, self.problem.chunks - 1)
        kept, ahead = self.decays(first), self.vectors(first) if depth > 1 else {}
        if depth > 1:
            self.leader(lambda: self.fetch(self.first, 0), self.first < self.last)
            pl.when(self.first < self.last)(lambda: self.land(self.first, 0, ahead))
            # The gates of v land where the first chunk's did.
            self.done(1, self.first + 1 < self.last)
        return state, ahead, kept

    def _before(self, piece: int) -> Array:
        """The state before the stretch; if stretches are joined here, that after the first, where they begin."""
        if self.how.identity:
            r, c = iotas()
            return jnp.where(r + piece * C == c + self.column, 1.0, 0.0)
        start = self._load("start", (), piece, self.column)
        if self.how.joins:
            return jnp.where(self.stretch == 0, start, self._load("ends", (0,), piece, self.column))
        return start if self.how.count == 1 else jnp.where(self.stretch == 0, start, 0.0)

    def _load(self, name: str, stretch: tuple[Any, ...], piece: int, column: Any) -> Array:
        place = (self.batch, self.head, *stretch, pl.ds(piece * C, C), pl.ds(column, C))
        return plgpu.load(self.arrays[name].at[place], layout=TILE, optimized=False)

    def _join(self, state: tuple[Array, ...]) -> tuple[Array, ...]:
        """S <- M S + E across each earlier stretch but the first: M its transition, E the state it adds."""
        if not self.problem.erases:
            return lax.fori_loop(1, self.stretch, self._decayed, state)
        buffers, landed, used = self.layout.moves, self.barriers.landed, self.barriers.used
        count = len(self.pieces)
        total = jnp.maximum(self.stretch - 1, 0) * count
        numbers = Numbers(jnp.bfloat16, PARTS, self.numbers.interpret)
        memory = [self.mine.operand(PARTS * piece, numbers) for piece in self.pieces]

        def move(number: Any, other: int) -> Any:
            """M from piece `other` to the piece whose turn it is."""
            return self.shared.operand(PARTS * (lax.rem(number, buffers) * count + other), numbers)

        def fetch(number: Any) -> None:
            stretch, piece = lax.div(number, count), lax.rem(number, count)
            for other in range(count):
                for part, ref in enumerate(move(number, other)):
                    place = (part, self.batch, self.head, stretch, pl.ds(piece * C, C), pl.ds(other * C, C))
                    plgpu.copy_gmem_to_smem(self.arrays["moves"].at[place], ref, landed.at[lax.rem(number, buffers)])

        def again(number: Any) -> None:
            if self.several:
                plgpu.barrier_wait(used.at[lax.rem(number, buffers)])
            pl.when(number + buffers < total)(lambda: fetch(number + buffers))

        def across(stretch: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
            after = [self._load("ends", (stretch,), piece, self.column) for piece in self.pieces]
            sync()
            for x, to in zip(state, memory, strict=True):
                put(to, x, numbers)
            sync()
            for piece in self.pieces:
                number = (stretch - 1) * count + piece
                plgpu.barrier_wait(landed.at[lax.rem(number, buffers)])
                terms = [(move(number, other), memory[other]) for other in range(count)]
                (after[piece],) = accumulate(numbers, [(terms, after[piece])])
                sync()
                if self.several:
                    plgpu.barrier_arrive(used.at[lax.rem(number, buffers)])
                self.leader(lambda number=number: again(number), number < total)
            return tuple(after)

        for number in range(buffers):
            self.leader(lambda number=number: fetch(jnp.int32(number)), number < total)
        state = lax.fori_loop(1, self.stretch, across, state)
        sync()  # the first copies of chunks land where operands were
        return state

    def _decayed(self, stretch: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
        """The same where nothing is erased: M is a decay."""
        after = []
        for piece, x in enumerate(state):
            made = self._load("ends", (stretch,), piece, self.column)
            if self.problem.decay is not None:
                ref = self.arrays["moves"].at[self.batch, self.head, stretch - 1]
                each = self.problem.decay == "key"
                x = _scale(x, vector(ref.at[pl.ds(piece * C, C)], ROW) if each else ref[0])
            after.append(made + x)
        return tuple(after)

    def step(self, number: Any, carry: Carry) -> Carry:
        state, vectors, kept = carry
        index, depth = self.first + number, self.how.depth
        slot, after = (lax.rem(number, depth), lax.rem(number + 1, depth)) if depth > 1 else (0, 0)
        # Early: these wait for device memory.
        ahead = self.vectors(jnp.minimum(index + depth - 1, self.last - 1))
        kept_ahead = self.decays(jnp.minimum(index + 1, self.last - 1))
        for piece, x in enumerate(state):
            put(self.own(self.layout.state + piece * self.numbers.parts), x, self.numbers)
            if self.how.save_states:
                place = (index, self.batch, self.head, pl.ds(piece * C, C), pl.ds(self.column, C))
                self.results["states"].at[place][...] = x
        sync()

        def fetch() -> None:
            if self.several:
                wait = lambda: plgpu.barrier_wait(self.barriers.empty.at[after])  # noqa: E731
                wait() if depth > 1 else pl.when(number > 0)(wait)
            self.fetch(index + depth - 1, after)

        more = index + 1 < self.last
        self.leader(fetch, more if depth > 1 else index < self.last)
        if depth == 1:
            vectors = ahead
            self.land(index, 0, vectors)
            sync()
        if self.problem.direct and self.several:
            plgpu.barrier_wait(self.barriers.ready.at[slot])
        of = self._reads(slot, self.tokens(index, vectors))
        u, t = self._corrections(slot, of, self.tokens(index, vectors))
        sums = []
        if self.how.outputs:
            sums.append(([(self.operand("p", slot), u)], of["out"]))
        for piece, x in enumerate(state):
            key = transposed(self.operand("k", slot, piece))
            sums.append(([(key, t)], _scale(x, kept[piece % len(kept)]) if kept else x))

        def meanwhile() -> None:
            if depth > 1:
                pl.when(more)(lambda: self.land(index + 1, after, ahead))

        made = accumulate(self.numbers, sums, meanwhile)
        if self.how.outputs:
            self._store(index, made.pop(0))
        self.done(slot, index + depth < self.last)
        return tuple(made), ahead if depth > 1 else {}, kept_ahead

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
        if self.how.identity:
            numbers = Numbers(jnp.bfloat16, PARTS, self.numbers.interpret)
            memory = [self.mine.operand(PARTS * piece, numbers) for piece in self.pieces]
            sync()
            for x, to in zip(carry[0], memory, strict=True):
                put(to, x, numbers)
            sync()
            for piece, refs in enumerate(memory):
                for part, ref in enumerate(refs):
                    place = (self.batch, self.head, self.stretch, pl.ds(piece * C, C), pl.ds(self.column, C))
                    plgpu.copy_smem_to_gmem(ref, self.results["end"].at[(part, *place)])
            plgpu.wait_smem_to_gmem(0)
            return
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
