"""The gradients that follow one another from chunk to chunk, last to first, D being that of the state after a chunk:

    dU = P^T dO + K D      dZ = A^T dU      dS = gamma D + Q^T dO - Y^T dZ

with dS the next D. All else about a chunk follows from D, dZ, and the S and U of the forward pass (gradients.py).
"""

from dataclasses import replace
from typing import Any

from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.landing import slot_of
from pallas_kernels.steps import Carry, Steps, decayed, scale
from pallas_kernels.tiles import accumulate, products, put, sync, take, transposed
from pallas_kernels.tokens import Tokens


class Reverse(Steps):
    """The gradients of the states of one head."""

    def step(self, number: Any, carry: Carry) -> Carry:
        after, vectors, kept = carry
        index, slot = self.index(number), slot_of(number, self.how.depth)
        ahead = self.vectors(self.block.vectors, self.index(number + 1)), self.decays(self.index(number + 1))
        if self.how.outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's D and dZ
        for x, to in zip(after, self.states, strict=True):
            put(to, x, self.numbers)
        sync()
        if self.how.outputs:
            self.keep_states("d_states", index)
        self.wait(number)
        tokens = self.tokens(index, vectors)
        d_out, x = self.own(self.value_page("d_out", slot)), self.own(self.layout.x)
        d_z = self._values(slot, tokens, d_out, x)
        put(x, d_z, self.numbers)
        left = self._left(tokens, d_out, d_z)
        sync()
        if self.how.outputs:
            self.keep_values("d_z", x, index)
        sums = []
        for piece, y in enumerate(after):
            terms = [(transposed(self.operand(name, slot, piece)), operand) for name, operand in left]
            sums.append((terms, decayed(y, kept, piece)))
        made = accumulate(self.numbers, sums)
        self.done(number)
        return tuple(made), *ahead

    def _values(self, slot: Any, tokens: Tokens, d_out: Any, x: Any) -> Array:
        """dZ."""
        write = [(self.operand("k", slot, piece), state) for piece, state in enumerate(self.states)]
        inner = [(transposed(self.operand("p", slot)), d_out)]
        if self.problem.direct and self.problem.decay is not None:
            of_write, of_out = products(self.numbers, write, inner)
            d_u = scale(of_write, tokens.vectors["out_of"]) + of_out
        else:
            (d_u,) = products(self.numbers, [*write, *inner])
        if not self.problem.erases:
            return d_u
        parts = x
        if self.numbers.parts == 1:
            # Two parts of dU: of all that is rounded on the way to dZ this costs least.
            parts = (*x, *self.own(self.layout.t))
        put(parts, d_u, replace(self.numbers, parts=2))
        sync()
        a = transposed(self.operand("a", slot))
        terms = [(a, x)] if self.numbers.parts == 2 else [(a, (part,)) for part in parts]
        (d_z,) = products(self.numbers, terms)
        sync()
        return d_z

    def _left(self, tokens: Tokens, d_out: Any, d_z: Array) -> list[tuple[str, Any]]:
        """What the transposes of q, k or y are multiplied with."""
        problem = self.problem
        t, read = self.own(self.layout.t), self.own(self.layout.read)
        if not problem.direct:
            if problem.erases:
                put(t, -d_z, self.numbers)
            return [("q", d_out), *([("y", t)] if problem.erases else [])]
        into = tokens.vectors["into"] if problem.decay is not None else 1.0
        of_q = scale(take(d_out), problem.scale * into)
        left = [("q", read)]
        if problem.erases:
            of = tokens.coefficients()
            if of.q is not None:
                of_q -= scale(d_z, of.q * into)
            if of.k is not None:
                put(t, -scale(d_z, of.k * into), self.numbers)
                left.append(("k", t))
        put(read, of_q, self.numbers)
        return left
