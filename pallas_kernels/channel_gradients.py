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
from pallas_kernels.intervals import diagonal_columns, end_columns, level_columns
from pallas_kernels.scores import exponents, levels, log_numbers, store_log_decay
from pallas_kernels.tiles import (
    TILE,
    C,
    Numbers,
    product,
    put,
    rows,
    split,
    sync,
    take,
    widened,
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
        return [d_k, self.summed(), *d_x]

    # The gradient of log_decay. A pair (i, j) adds x = dP_ij P_ij to that of all tokens t, j < t <= i: x is summed up
    # for token i and -x for token j, and at the end come sums over all later tokens. What is subtracted there was the
    # same sum of the same products, so that nothing is lost but the last bits of float32. Registers are scarce: the
    # sums lie in shared memory.

    @property
    def d_decay(self) -> Any:
        return self.pages.tile(self.mine(self.layout.d_decay), jnp.float32)

    def add_decay(self, x: Array) -> None:
        self.d_decay[...] = plgpu.load(self.d_decay, layout=TILE, optimized=False) + x

    def summed(self) -> Array:
        """Over all later tokens, the token itself among them."""
        x = plgpu.load(self.d_decay, layout=TILE, optimized=False)
        later = self.ones((self.vectors["numbers"], C - 1), jnp.bfloat16)
        wide = Numbers(jnp.bfloat16, 2, self.numbers.interpret)
        rest = x
        for part in split(x, wide):
            rest = rest - widened(part)
        one = Numbers(jnp.bfloat16, 1, self.numbers.interpret)
        memory = self.pages.operand(self.mine(self.layout.state), one)
        put(memory, rest, one)
        return self.times(later, x) + product(one, ((later,), memory))

    @property
    def names(self) -> tuple[str, ...]:
        return ("q", "e") if self.problem.erases else ("q",)

    def ends(self, piece: Any, grads: list[Array], both: Array, logs: Any) -> list[Array]:
        """What passes to and from the ends of the chunk, gradients of k, q, and of e."""
        problem = self.problem
        into, out_of, whole = end_columns(self.vectors["numbers"])

        def factor(columns: tuple[Any, Any], mask: str | None = None) -> Array:
            made = jnp.exp2(self.exponents(columns, logs))
            return made * rows(self.vectors[mask], C) if mask and problem.segmented else made

        # One thing after the other: registers are what is scarce.
        last = self.numbered()[0] == C - 1
        # The sum over values of S D, in every row.
        across = self.times(self.ones(whole, jnp.bfloat16), both, transpose=True) * factor(whole)
        if problem.segmented:
            across = across * self.inputs["through"][self.batch, self.index]
        self.d_decay[...] = jnp.where(last, across, 0.0)
        decay = factor(into, "into")
        d_q = grads[0] * (decay * problem.scale)
        d_e = [x * decay for x in grads[2:]]
        through = take(self.key("q", piece)) * d_q
        for x in d_e:
            through = through + take(self.key("e", piece)) * x
        self.add_decay(through)
        d_k = grads[1] * factor(out_of, "out_of")
        # What reaches the end from any token before one: all of it, less that of later ones.
        through = take(self.key("k", piece)) * d_k
        total = self.times(self.ones(whole, jnp.bfloat16), through)
        self.add_decay(jnp.where(last, total, 0.0) - through)
        return [d_k, d_q, *d_e]

    def exponents(self, columns: tuple[Any, Any], logs: Any, sign: Array | None = None) -> Array:
        """log2 of decays: sums of log_decay over some tokens for each row, times its sign."""
        matrix = self.ones(columns, jnp.float16)
        if sign is not None:
            matrix = matrix * rows(sign.astype(jnp.float16), C)
        return exponents(self.numbers, [(matrix, logs)])[0]

    def masked(self, name: str, mask: Array) -> tuple[Array, ...]:
        """dP or dL for some of the pairs, in registers."""
        parts = self.operand(self.layout.scores, 0 if name == "q" else 1)
        return tuple(plgpu.load(ref, layout=TILE, optimized=False) * mask for ref in parts)

    def pairs(self, piece: Any, half: Any, logs: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds what the pairs of one level give."""
        r = self.vectors["numbers"]
        second = jnp.bitwise_and(self.numbered()[0], half) != 0
        between, partners = level_columns(r, half)
        decay = jnp.exp2(self.exponents(between, logs))
        memory = self.level_memory()
        self.level_tiles(piece, decay, second, memory)
        sync()
        d_k, *d_x = sums
        mask = self.ones(partners, jnp.bfloat16)
        for i, name in enumerate(self.names):
            made = product(self.numbers, (self.masked(name, mask), memory[i]))
            through = take(memory[i]) * made
            self.add_decay(jnp.where(second, through, -through))
            made = made * decay
            d_x[i] = jnp.where(second, d_x[i] + made, d_x[i])
            d_k = jnp.where(second, d_k, d_k + made)
        sync()
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
        between, lower, upper, sign = diagonal_columns(r)
        exponent = self.exponents(between, logs, sign)
        left, right = jnp.exp2(exponent), jnp.exp2(-exponent)
        memory = self.level_memory()
        of_k = self.operand(self.layout.spare, self.me)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for name, x in zip(self.names, memory, strict=False):
            put(x, take(self.key(name, piece)) * left, self.numbers)
        put(of_k, take(self.key("k", piece)) * right, self.numbers)
        sync()
        through = zeros((C, C))
        for i, name in enumerate(self.names):
            made = product(self.numbers, (self.masked(name, self.ones(lower, jnp.bfloat16)), of_k))
            through = through + take(memory[i]) * made
            d_x[i] = d_x[i] + made * left
            made = product(self.numbers, (self.masked(name, self.ones(upper, jnp.bfloat16)), memory[i]))
            through = through - take(of_k) * made
            d_k = d_k + made * right
            d_x[i], d_k, through = lax.optimization_barrier((d_x[i], d_k, through))
        sync()
        self.add_decay(through)
        return (d_k, *d_x)
