"""The gradients of one chunk with one decay per key channel, by the levels of scores.py.

At a level a pair has its later token i in the second half of a block and its earlier one j in the first. So one tile X
holds what both sides of all pairs need, q (or e) with its decay in the rows of second halves and k in those of first
ones; and with M the pairs of the level in both places, M_ij = M_ji = dP_ij, the rows of M X are the gradients of q in
second halves and those of k in first ones.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunk_gradients import Gradients
from pallas_kernels.intervals import Rows, diagonal_rows, end_rows, level_rows
from pallas_kernels.scores import exponents, levels, log_numbers, store_log_decay
from pallas_kernels.tiles import (
    TILE,
    C,
    product,
    put,
    rows,
    sync,
    take,
    zeros,
)


class ChannelGradients(Gradients):
    """One chunk of one head, whatever its decay."""

    def channel_decay(self, piece: Any, grads: list[Array], both: Array) -> list[Array]:
        """Gradients of k, log_decay, q, and of e where something is erased."""
        numbers = self.numbers
        first, step = self.layout.logs
        logs = self.pages.operand(first + piece * step, log_numbers(numbers))
        store_log_decay(self.output("log_decay", self.key_tiles(piece, "log_decay"), piece), logs, numbers)
        sync()
        sums = self.ends(piece, grads, both, logs)
        steps = levels(numbers.parts)

        def level(index: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            return self.pairs(piece, jnp.right_shift(jnp.int32(C // 2), index), logs, sums)

        d_k, *d_x = self.diagonal(piece, logs, lax.fori_loop(0, len(steps), level, tuple(sums)))
        return [d_k, plgpu.load(self.d_decay, layout=TILE, optimized=False), *d_x]

    @property
    def d_decay(self) -> Any:
        """Where the gradient of log_decay is summed up: registers are what is scarce."""
        first, step = self.layout.d_decay
        return self.pages.tile(first + self.me * step, jnp.float32)

    def add_decay(self, x: Array) -> None:
        self.d_decay[...] = plgpu.load(self.d_decay, layout=TILE, optimized=False) + x

    @property
    def names(self) -> tuple[str, ...]:
        return ("q", "e") if self.problem.erases else ("q",)

    def ends(self, piece: Any, grads: list[Array], both: Array, logs: Any) -> list[Array]:
        """What passes to and from the ends of the chunk, gradients of k, q, and of e."""
        problem = self.problem
        into, out_of, whole = end_rows(self.vectors["numbers"])

        def factor(of: Rows, mask: str | None = None) -> Array:
            made = self.decays(of, logs)
            return made * rows(self.vectors[mask], C) if mask and problem.segmented else made

        # One thing after the other: registers are what is scarce.
        decay = factor(into, "into")
        d_q = grads[0] * (decay * problem.scale)
        d_e = [x * decay for x in grads[2:]]
        through = take(self.key("q", piece)) * d_q
        for x in d_e:
            through = through + take(self.key("e", piece)) * x
        self.d_decay[...] = self.spread(into, through)
        d_k = grads[1] * factor(out_of, "out_of")
        self.add_decay(self.spread(out_of, take(self.key("k", piece)) * d_k))
        # The sum over values of S D, in every row.
        total = self.times(self.ones(whole.spread, jnp.bfloat16), both, transpose=True) * factor(whole)
        if problem.segmented:
            total = total * self.inputs["through"][self.batch, self.index]
        self.add_decay(total)
        return [d_k, d_q, *d_e]

    def decays(self, of: Rows, logs: Any) -> Array:
        return jnp.exp2(self.exponents(of, logs))

    def exponents(self, of: Rows, logs: Any) -> Array:
        matrix = self.ones(of.sums, jnp.float16)
        if of.sign is not None:
            matrix = matrix * rows(of.sign.astype(jnp.float16), C)
        return exponents(self.numbers, [(matrix, logs)])[0]

    def spread(self, of: Rows, x: Array) -> Array:
        """From the gradient of sums of log_decay to that of log_decay."""
        matrix = self.ones(of.spread, jnp.bfloat16)
        if of.sign is not None:
            matrix = matrix * rows(of.sign.astype(jnp.bfloat16), C)
        return self.times(matrix, x)

    def masked(self, name: str, mask: Array) -> tuple[Array, ...]:
        """dP or dL for some of the pairs, in registers."""
        parts = self.operand(self.layout.scores, 0 if name == "q" else 1)
        return tuple(plgpu.load(ref, layout=TILE, optimized=False) * mask for ref in parts)

    def pairs(self, piece: Any, half: Any, logs: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds what the pairs of one level give."""
        of = level_rows(self.vectors["numbers"], half)
        second = jnp.bitwise_and(self.numbered()[0], half) != 0
        decay = self.decays(of, logs)
        memory = self.state_places()[0]
        self.level_tiles(piece, decay, second, memory)
        sync()
        d_k, *d_x = sums
        first, step = self.layout.spare
        parked = self.pages.tile(first + self.me * step, jnp.float32)
        mask = self.ones(of.pairs, jnp.bfloat16)
        for i, name in enumerate(self.names):
            made = product(self.numbers, (self.masked(name, mask), memory[i]))
            made = made * decay
            late = jnp.where(second, made, 0.0)
            d_x[i] = d_x[i] + late
            d_k = d_k + (made - late)
            through = jnp.where(second, take(self.key(name, piece)), take(self.key("k", piece))) * made
            if i > 0:
                through = plgpu.load(parked, layout=TILE, optimized=False) + through
                sync()
            elif len(self.names) > 1:
                parked[...] = through
        self.add_decay(self.spread(of, through))
        return (d_k, *d_x)

    def level_tiles(self, piece: Any, decay: Array, second: Array, memory: Sequence[Any]) -> None:
        """q and e in the rows of second halves and k in those of first ones, with the decay."""
        if self.numbers.parts == 2:
            k = take(self.key("k", piece))
            for name, x in zip(self.names, memory, strict=False):
                put(x, decay * jnp.where(second, take(self.key(name, piece)), k), self.numbers)
            return
        # In pairs of 16-bit numbers, of which one instruction multiplies two.
        late, early = (
            x.astype(self.numbers.dtype) for x in (jnp.where(second, decay, 0.0), jnp.where(second, 0.0, decay))
        )
        (k,) = (plgpu.load(ref, layout=TILE, optimized=False) for ref in self.key("k", piece))
        k = k * early
        for name, (ref,) in zip(self.names, memory, strict=False):
            (x,) = (plgpu.load(ref, layout=TILE, optimized=False) for ref in self.key(name, piece))
            ref[...] = x * late + k

    def diagonal(self, piece: Any, logs: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds what the pairs of no level give: in blocks referenced to their middle, or each token with itself."""
        d_k, *d_x = sums
        r = self.vectors["numbers"]
        if self.numbers.parts == 2:
            mask = self.ones((r, r), jnp.bfloat16)
            for i, name in enumerate(self.names):
                pairs = self.masked(name, mask)
                d_x[i] = d_x[i] + product(self.numbers, (pairs, self.key("k", piece)))
                d_k = d_k + product(self.numbers, (pairs, self.key(name, piece)))
            return (d_k, *d_x)
        of = diagonal_rows(r)
        exponent = self.exponents(of, logs)
        left, right = jnp.exp2(exponent), jnp.exp2(-exponent)
        memory = self.state_places()[0]
        first, step = self.layout.spare
        of_k = self.pages.operand(first + self.me * step, self.numbers)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for name, x in zip(self.names, memory, strict=False):
            put(x, take(self.key(name, piece)) * left, self.numbers)
        put(of_k, take(self.key("k", piece)) * right, self.numbers)
        sync()
        through = zeros((C, C))
        for i, name in enumerate(self.names):
            made = product(self.numbers, (self.masked(name, self.ones(of.lower, jnp.bfloat16)), of_k))
            through = through + take(memory[i]) * made
            d_x[i] = d_x[i] + made * left
            made = product(self.numbers, (self.masked(name, self.ones(of.upper, jnp.bfloat16)), memory[i]))
            through = through - take(of_k) * made
            d_k = d_k + made * right
            d_x[i], d_k, through = lax.optimization_barrier((d_x[i], d_k, through))
        sync()
        self.add_decay(self.spread(of, through))
        return (d_k, *d_x)
