"""One chunk after the other: what `scan` does, in the registers and the shared memory of one warpgroup."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.joins import PARTS
from pallas_kernels.landing import Landing, slot_of
from pallas_kernels.tiles import (
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
)
from pallas_kernels.tokens import Tokens

Carry = tuple[tuple[Array, ...], dict[str, Array], list[Any]]
"""The state [C, C] for each piece of 64 key channels; the vectors and the decays of the chunk that comes."""


class Steps(Landing):
    """The recurrence over the chunks of one head."""

    def initial(self) -> tuple[Array, ...]:
        """The state before the first chunk."""
        state = []
        for piece in self.pieces:
            if self.how.identity:
                r, c = iotas()
                state.append(jnp.where(r + piece * C == c + self.column, 1.0, 0.0))
                continue
            place = (self.batch, self.head, self.stretch, pl.ds(piece * C, C), pl.ds(self.column, C))
            state.append(plgpu.load(self.arrays["start"].at[place], layout=TILE, optimized=False))
        return tuple(state)

    def run(self) -> None:
        """The chunks one after the other, then the last state to device memory."""
        carry = self.initial(), self.vectors(self.block.vectors, self.index(0)), self.decays(self.index(0))
        self.finish(lax.fori_loop(0, self.last - self.first, self.step, carry)[0])

    def step(self, number: Any, carry: Carry) -> Carry:
        state, vectors, kept = carry
        index, slot = self.index(number), slot_of(number, self.how.depth)
        # Early: these wait for device memory.
        ahead = self.vectors(self.block.vectors, self.index(number + 1)), self.decays(self.index(number + 1))
        if self.how.keep:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's state and U
        for piece, (x, to) in enumerate(zip(state, self.states, strict=True)):
            put(to, x, self.numbers)
            if self.how.save_states:
                place = (index, self.batch, self.head, pl.ds(piece * C, C), pl.ds(self.column, C))
                self.results["states"].at[place][...] = x
        sync()
        if self.how.keep:
            self.keep_states("kept_states", index)
        self.wait(number)
        of = self._reads(slot, self.tokens(index, vectors))
        u, t = self._corrections(slot, of, self.tokens(index, vectors))
        sums = []
        if self.how.outputs:
            sums.append(([(self.operand("p", slot), u)], of["out"]))
        for piece, x in enumerate(state):
            key = transposed(self.operand("k", slot, piece))
            sums.append(([(key, t)], decayed(x, kept, piece)))
        if self.how.keep:
            self.keep_values("kept_u", self.kept_u(slot, u), index)
        made = accumulate(self.numbers, sums)
        if self.how.outputs:
            self._store(index, made.pop(0))
        if self.how.keep and (not self.problem.erases or self.finer) and not self.how.outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # some of U lies where the next values land
        self.done(number)
        return tuple(made), *ahead

    def kept_u(self, slot: Any, u: Any) -> Any:
        """U, or what it is made of, in as many parts as are kept; the second one lies where Z was."""
        return (*u, *self.own(self.value_page("v", slot))) if self.finer else u

    @property
    def states(self) -> list[Any]:
        """The state as operands."""
        return [self.own(self.layout.state + piece * self.numbers.parts) for piece in self.pieces]

    def keep_states(self, name: str, index: Any) -> None:
        """The state as it was stored for the products to device memory."""
        for piece, x in enumerate(self.states):
            for part, ref in enumerate(x):
                place = (part, index, self.batch, self.head, pl.ds(piece * C, C), pl.ds(self.column, C))
                plgpu.copy_smem_to_gmem(ref, self.results[name].at[place])

    def keep_values(self, name: str, x: Any, index: Any) -> None:
        for part, ref in enumerate(x):
            place = (part, self.batch, self.head, pl.ds(index * C, C), pl.ds(self.column, C))
            plgpu.copy_smem_to_gmem(ref, self.results[name].at[place])

    def _reads(self, slot: Any, tokens: Tokens) -> dict[str, Array]:
        """What the state holds for the tokens: "e", what is erased, and "out", their output without this chunk's."""
        problem, direct = self.problem, self.problem.direct
        terms = (problem.terms if direct else ("y",)) if problem.erases else ()
        names = list(dict.fromkeys((*(terms or ()), *(("q",) if self.how.outputs else ()))))
        sums = [[(self.operand(n, slot, piece), x) for piece, x in enumerate(self.states)] for n in names]
        read = dict(zip(names, products(self.numbers, *sums), strict=True)) if names else {}
        if not direct:
            return {new: read[old] for new, old in (("e", "y"), ("out", "q")) if old in read}
        into = tokens.vectors["into"] if problem.decay is not None else 1.0
        found = {}
        if problem.erases:
            factors = tokens.coefficients()._asdict()
            parts = [scale(read[n], factors[n] * into) for n in terms or ()]
            found["e"] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        if self.how.outputs:
            found["out"] = scale(read["q"], problem.scale * into)
        return found

    def _corrections(self, slot: Any, of: Mapping[str, Array], tokens: Tokens) -> tuple[Any, Any]:
        """U, and U with the decay to the end of the chunk, as operands."""
        z: Any = None if self.how.identity else self.mine.operand(self.value_page("v", slot), self.of_z)
        x, t = self.own(self.layout.x), self.own(self.layout.t)
        separate = self.layout.t != self.layout.x
        if not self.problem.erases:
            if separate:
                put(t, take(z) * rows(tokens.vectors["out_of"], C), self.numbers)
                sync()
            return z, t if separate else z
        if self.how.outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's output
        parts = self.kept_u(slot, x)
        wide = replace(self.numbers, parts=len(parts))
        put(parts, -of["e"] if z is None else take(z) - of["e"], wide)
        sync()
        a = self.operand("a", slot)
        (u,) = products(self.numbers, [(a, (part,)) for part in parts] if self.finer else [(a, x)])
        sync()
        if self.how.outputs or self.how.keep or not separate:
            put(parts, u, wide)
        if separate:
            put(t, u * rows(tokens.vectors["out_of"], C), self.numbers)
        sync()
        return x, t

    def _store(self, index: Any, out: Array) -> None:
        """The output to device memory, from where U was."""
        if self.problem.erases and not self.how.keep:
            sync()
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile = self.mine.tile(self.layout.x, self.problem.dtype)
        tile[...] = out.astype(self.problem.dtype)
        sync()
        target = (self.batch, pl.ds(index * C, C), self.head, pl.ds(self.column, C))
        plgpu.copy_smem_to_gmem(tile, self.results["out"].at[target])

    def finish(self, state: tuple[Array, ...]) -> None:
        """The last state to device memory."""
        if self.how.identity:
            numbers = Numbers(jnp.bfloat16, PARTS, self.numbers.interpret)
            memory = [self.mine.operand(PARTS * piece, numbers) for piece in self.pieces]
            sync()
            for x, to in zip(state, memory, strict=True):
                put(to, x, numbers)
            sync()
            for piece, refs in enumerate(memory):
                for part, ref in enumerate(refs):
                    place = (self.batch, self.head, self.stretch, pl.ds(piece * C, C), pl.ds(self.column, C))
                    plgpu.copy_smem_to_gmem(ref, self.results["end"].at[(part, *place)])
            plgpu.wait_smem_to_gmem(0)
            return
        for piece, x in enumerate(state):
            within = (pl.ds(piece * C, C), pl.ds(self.column, C))
            if not self.how.outputs:
                self.results["end"].at[(self.batch, self.head, self.stretch, *within)][...] = x
                continue

            at_end = self.first == 0 if self.how.reverse else self.last == self.problem.chunks

            @pl.when(at_end & (self.first < self.last))
            def _(x: Array = x, within: Any = within) -> None:
                self.results["end"].at[(self.batch, self.head, *within)][...] = x

        plgpu.wait_smem_to_gmem(0)


def decayed(x: Array, kept: list[Any], piece: int) -> Array:
    """The state across a chunk; kept: from `Landing.decays`."""
    return scale(x, kept[piece % len(kept)]) if kept else x


def scale(x: Array, factor: Any) -> Array:
    """Each row times a number of its own, or all times one."""
    return x * (rows(factor, C) if getattr(factor, "ndim", 0) else factor)
