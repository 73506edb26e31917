"""The gradients of one chunk with one decay per key channel, by the levels of scores.py."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunk_gradients import Gradients
from pallas_kernels.scores import DIAGONAL, SCALE, exponents, levels, log_numbers, store_log_decay
from pallas_kernels.tiles import (
    TILE,
    C,
    products,
    put,
    rows,
    sync,
    take,
    transposed,
)


class ChannelGradients(Gradients):
    """One chunk of one head, whatever its decay."""

    def channel_decay(self, piece: Any, grads: list[Array], both: Array) -> list[Array]:
        """Gradients of k, log_decay, q, and of e where something is erased."""
        numbers = self.numbers
        logs = self.pages.operand(self.layout.logs, log_numbers(numbers))
        store_log_decay(self.output("log_decay", self.key_tiles(piece), piece), logs, numbers)
        sync()
        sums = self.ends(piece, grads, both, logs)
        steps = levels(numbers.parts)

        def level(index: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            half = jnp.right_shift(jnp.int32(C // 2), index)
            r, c = self.numbered()
            mask = jnp.bitwise_and(r, -half) == jnp.bitwise_xor(jnp.bitwise_and(c, -half), half)
            return self.pairs(piece, index, mask, logs, sums, wide=False)

        sums = lax.fori_loop(0, len(steps), level, tuple(sums))
        r, c = self.numbered()
        if numbers.parts == 1:
            mask = jnp.bitwise_and(r, -DIAGONAL) == jnp.bitwise_and(c, -DIAGONAL)
            return list(self.pairs(piece, len(steps), mask, logs, sums, wide=True))
        return list(self.pairs(piece, None, r == c, logs, sums, wide=False))

    def ends(self, piece: Any, grads: list[Array], both: Array, logs: Any) -> list[Array]:
        """What passes to and from the ends of the chunk, in the order of `channel_decay`."""
        problem, numbers = self.problem, self.numbers
        count = self.inputs["select"].shape[0]

        def factor(matrix: Array, mask: str | None = None) -> Array:
            made = jnp.exp2(exponents(numbers, [(matrix, logs)])[0])
            return made * rows(self.vectors[mask], C) if mask and problem.segmented else made

        # One thing after the other: registers are what is scarce.
        into = factor(self.matrix("select", count - 2), "into")
        d_q = grads[0] * (into * problem.scale)
        d_e = [x * into for x in grads[2:]]
        through = take(self.operand("keys", "q", piece)) * d_q
        for x in d_e:
            through = through + take(self.operand("keys", "e", piece)) * x
        d_decay = self.spread(count - 2, through)
        d_k = grads[1] * factor(self.matrix("select", count - 1), "out_of")
        d_decay = d_decay + self.spread(count - 1, take(self.operand("keys", "k", piece)) * d_k)
        # The sum over values of S D, in every row.
        total = self.times(plgpu.layout_cast(jnp.full((C, C), 1.0, jnp.bfloat16), TILE), both, transpose=True)
        whole = factor(plgpu.layout_cast(jnp.full((C, C), 1.0 / SCALE, jnp.float16), TILE))
        if problem.segmented:
            whole = whole * self.inputs["through"][self.batch, self.index]
        return [d_k, d_decay + whole * total, d_q, *d_e]

    def matrix(self, name: str, index: Any) -> Array:
        return plgpu.load(self.inputs[name].at[index], layout=TILE, optimized=False)

    def spread(self, index: Any, x: Array) -> Array:
        """From the gradient of sums of log_decay to that of log_decay."""
        return self.times(self.matrix("spread", index), x)

    def pairs(
        self,
        piece: int,
        index: Any,
        mask: Array,
        logs: Any,
        sums: tuple[Array, ...],
        *,
        wide: bool,
    ) -> tuple[Array, ...]:
        """Adds what the pairs of one level give. index: of its matrix; None where no decay lies between them."""
        numbers, layout = self.numbers, self.layout
        names = ("q", "e") if self.problem.erases else ("q",)
        left = right = None
        if index is not None:
            (exponent,) = exponents(numbers, [(self.matrix("select", index), logs)])
            left = jnp.exp2(exponent)
            right = jnp.exp2(-exponent) if wide else left

        def scale(x: Array, factor: Array | None) -> Array:
            return x if factor is None else x * factor

        # One thing after the other: registers are what is scarce.
        places = {"q": layout.state, "e": layout.after, "k": layout.scaled}
        memory = {n: self.pages.operand(places[n], numbers) for n in ("k", *names)}
        inside = {"q": self.pages.operand(layout.level_p, numbers), "e": self.pages.operand(layout.level_l, numbers)}
        whole = {"q": self.pages.operand(layout.d_p, numbers), "e": self.pages.operand(layout.d_l, numbers)}
        for name in names:
            put(inside[name], jnp.where(mask, take(whole[name]), 0.0), numbers)
        for name, x in memory.items():
            put(x, scale(take(self.operand("keys", name, piece)), right if name == "k" else left), numbers)
        sync()
        d_k, d_decay, *d_x = sums
        (of_k,) = products(numbers, [(transposed(inside[n]), memory[n]) for n in names])
        d_k = d_k + scale(of_k, right)
        through = take(memory["k"]) * of_k
        through = -through if wide else through
        for i, name in enumerate(names):
            (of_x,) = products(numbers, [(inside[name], memory["k"])])
            d_x[i] = d_x[i] + scale(of_x, left)
            through = through + take(memory[name]) * of_x
        sync()
        if index is not None:
            d_decay = d_decay + self.spread(index, through)
        return (d_k, d_decay, *d_x)
