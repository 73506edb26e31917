"""The gradients of one chunk of one head, and what the decay means for them where there is one per head."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gradient_tiles import GradientTiles
from pallas_kernels.layout import channel_gates
from pallas_kernels.scores import store_parts
from pallas_kernels.tiles import (
    C,
    Numbers,
    accumulate,
    product,
    products,
    put,
    rows,
    split,
    sync,
    take,
    transposed,
    zeros,
)


class Gradients(GradientTiles):
    """One chunk of one head."""

    channel_decay: Callable[[Any, list[Array], Array], list[Array]]

    def run(self) -> None:
        problem = self.problem
        self.fetch_all()
        plgpu.barrier_wait(self.barriers.values)
        if problem.masked or self.numbers.parts == 2 or self.inputs["u"].dtype != self.numbers.dtype:
            self.each(problem.value_pieces, self.values)
            self.meet()
        if problem.erases and self.layout.warpgroups == 2:
            # One does dP, the other dL, while the keys land.
            self.scores(self.me, self.all_keys)
        else:
            self.all_keys()
            pl.when(self.me == 0)(partial(self.scores, 0))
            if problem.erases:
                self.scores(1)
        self.meet()
        self.each(problem.key_pieces, self.key_piece, "keys")
        self.each(problem.value_pieces, self.value_piece, "values")
        plgpu.wait_smem_to_gmem(0)

    def each(self, count: int, action: Callable[[Any], None], side: str | None = None) -> None:
        """For each tile of channels that is this warpgroup's; sums over its channels are added up outside."""

        def one(piece: Any) -> None:
            self.sums = {}
            action(piece)
            for name, x in self.sums.items():
                self.results[f"{name} {side}"].at[piece, self.batch, self.head, self.tokens][...] = x

        def turn(number: Any, nothing: tuple[()]) -> tuple[()]:
            piece = number * warpgroups + self.me
            if count % warpgroups:
                pl.when(piece < count)(partial(one, piece))
            else:
                one(piece)
            return nothing

        warpgroups = self.layout.warpgroups
        turns = -(-count // warpgroups)
        if turns == 1:
            turn(0, ())
        else:
            lax.fori_loop(0, turns, turn, ())

    # Steps.

    def all_keys(self) -> None:
        plgpu.barrier_wait(self.barriers.keys)
        self.each(self.problem.key_pieces, self.keys)
        if self.problem.decay == "head":
            self.meet()

    def keys(self, piece: Any) -> None:
        """q, k and e as operands."""
        landed = {n: self.landed(self.landing_tile(self.places, n, piece)) for n in ("q", "k")}
        outputs = ("k", "e") if self.problem.erases else ("k",)
        tiles = landed | self.key_gates(piece, *outputs)
        made = {"q": tiles["q"]} | {o: self.output(o, tiles, piece) for o in outputs}
        if not self.problem.masked and self.numbers.parts == 1:
            # As they landed.
            made = {n: x for n, x in made.items() if n == "e" or (n == "k" and "k" in self.layout.gates)}
        # k as it came is needed again where the rule makes another of it: that has a place of its own.
        sync()
        for name, x in made.items():
            put(self.key(name, piece), x, self.numbers)

    def values(self, piece: Any) -> None:
        """dO and U as operands."""
        if self.layout.u_low is None:
            self.to_operand("u", self.layout.values["u"], piece)
        elif self.inputs["u"].dtype != self.numbers.dtype:
            u = take(self.landing("u", self.layout.values["u"], piece))
            for memory, part in zip((self.value("u", piece), self.u_low(piece)), split(u, self.two), strict=True):
                store_parts(memory, (part,))
        if self.problem.masked or self.numbers.parts == 2:
            x = self.landed(self.landing_tile(self.layout.values, "d_out", piece))
            sync()
            put(self.value("d_out", piece), x, self.numbers)

    def key_gates(self, piece: Any, *outputs: str) -> dict[str, Array]:
        """The gates of some outputs."""
        names = channel_gates(self.rule, *outputs)
        return {n: self.landed(self.landing_tile(self.places, n, piece)) for n in names} | self.gates(*outputs)

    def key_tiles(self, piece: Any, *outputs: str) -> dict[str, Array]:
        """What the rule's function gets for some outputs, once q and k are operands."""
        q, k = (take(self.key(n, piece)) for n in ("q", "k"))
        if "k" in self.layout.gates:
            k = self.landed(self.landing_tile(self.places, "k", piece))
        return {"q": q, "k": k, **self.key_gates(piece, *outputs)}

    def scores(self, which: Any, meanwhile: Callable[[], None] | None = None) -> None:
        """dP (which = 0, with the scale of the output) or dL (1) as operand: with a decay per head with the decay; with
        one per channel as symmetric matrices, each pair in both places. meanwhile: is done once the products are."""
        problem, values = self.problem, range(self.problem.value_pieces)
        left = self.either(self.layout.values, ("d_out", "d_z"), which)
        parts = [self.value("u", v) for v in values]
        lefts = [self.operand(left, v) for v in values]
        if self.layout.u_low is not None:
            # Decays per channel have the gradient of log_decay to lose by what rounds U.
            parts, lefts = parts + [self.u_low(v) for v in values], 2 * lefts
        pairs = [(x, transposed(u)) for x, u in zip(lefts, parts, strict=True)]
        r, c = self.numbered()
        if problem.decay == "key":
            swapped = [(u, transposed(x)) for x, u in zip(lefts, parts, strict=True)]
            lower, upper = products(self.numbers, pairs, swapped)
            made = jnp.where(r == c, jnp.where(which == 0, lower, 0.0), jnp.where(r > c, lower, upper))
        else:
            made = jnp.where(r >= c + which, product(self.numbers, *pairs), 0.0)
        made = self.same_run(made * jnp.where(which == 0, problem.scale, -1.0).astype(jnp.float32))
        if meanwhile is not None:
            meanwhile()
        if problem.decay == "head":
            made = self.decay_between() * made
            self.between(which, made)
        put(self.operand(self.layout.scores, which), made, self.numbers)

    def u_low(self, piece: Any) -> Any:
        assert self.layout.u_low is not None
        return self.operand(self.layout.u_low, piece)

    @property
    def two(self) -> Numbers:
        return Numbers(self.numbers.dtype, 2, self.numbers.interpret)

    def either(self, places: Mapping[str, tuple[int, int]], names: tuple[str, str], which: Any) -> tuple[Any, int]:
        """The place of the first (which = 0) or the second of two that have the same step."""
        (first, step), (other, _) = (places.get(name, places[names[0]]) for name in names)
        return first + which * (other - first), step

    def between(self, which: Any, grad: Array) -> None:
        """The gradient of log_decay between the tokens of the chunk, from that of q's or e's scores."""
        pieces = range(self.problem.key_pieces)
        left = self.either(self.layout.keys, ("q", "e"), which)
        found = product(self.numbers, *((self.operand(left, p), transposed(self.key("k", p))) for p in pieces))
        # g_t = sum over i >= t > j: nothing is subtracted.
        r, c = self.numbered()
        later = self.ones((self.vectors["numbers"], C - 1), jnp.bfloat16)
        crossing = self.times(later, grad * found)
        sums = jnp.sum(jnp.where(c < r, crossing, 0.0), axis=1)
        self.results["pairs scores"].at[which, self.batch, self.head, self.tokens][...] = sums

    def boundary(self, piece: Any) -> tuple[list[Array], Array]:
        """Gradients of Q, K and Y, the last where something is erased, and the sum of S D over values, tile by tile."""
        problem = self.problem
        count = 3 if problem.erases else 2
        grads = [zeros((C, C)) for _ in range(count)]
        both = zeros((C, C))
        ahead = len(self.state_places()) > 1
        if self.layout.tiles > 1:
            self.fetch_states(piece, 0)
        for value in range(problem.value_pieces):
            if ahead and value + 1 < problem.value_pieces:
                self.fetch_states(piece, value + 1)
            state, after = self.wait_states(value)
            terms = [("d_out", state), ("u", after), ("d_z", state)][:count]
            left = [[(self.value(n, value), transposed(x))] for n, x in terms]
            grads = accumulate(self.numbers, list(zip(left, grads, strict=True)))
            if problem.decay is not None:
                both = both + take(state) * take(after)
            sync()
            if not ahead and value + 1 < problem.value_pieces:
                self.fetch_states(piece, value + 1)
        d_q, d_k, *d_y = grads
        return [d_q, d_k, *(-x for x in d_y)], both

    def key_piece(self, piece: Any) -> None:
        grads, both = self.boundary(piece)
        if self.layout.shared_spare:
            self.meet()
        if self.problem.decay == "key":
            d_k, d_decay, d_q, *d_e = self.channel_decay(piece, grads, both)
        else:
            d_k, d_q, *d_e = self.head_decay(piece, grads, both)
        found: dict[str, Array] = {"q": d_q}
        made = {"log_decay": d_decay} if self.problem.decay == "key" else {}
        made |= dict(zip(("k", "e"), (d_k, *d_e), strict=False))
        left = [n for n in ("log_decay", "e", "k") if n in made and n in self.pull_back.jaxprs]
        decay = () if self.problem.decay != "key" or self.layout.lands_in_sum else ("log_decay",)
        tiles = self.key_tiles(piece, "k", "e", *decay)
        for output in list(left):
            keep = self.real_channels(False, piece)
            for name, y in self.pull_back(output, self.valid(made[output]), tiles, keep).items():
                found[name] = found[name] + y if name in found else y
            left.remove(output)
            # As early as it can be: registers are what is scarce.
            wanted = {n for o in left for n in self.rule.arguments[o]} | ({"q"} if left else set())
            for name in [n for n in found if n not in wanted]:
                self.give(name, found.pop(name), piece)
        for name, x in found.items():
            self.give(name, x, piece)
        self.give_zeros("key", {"q", *(n for o in made for n in self.rule.arguments[o])}, piece)

    def give_zeros(self, axis: str, given: set[str], piece: Any) -> None:
        """What the rule does not read has a gradient, too."""
        for name in self.results:
            if self.rule.axis.get(name) == axis and name not in given:
                self.give(name, zeros((C, C)), piece)

    def give(self, name: str, x: Array, piece: Any) -> None:
        """A finished gradient."""
        x = self.valid(x)
        if x.ndim == 1:
            self.add(name, x)
        else:
            self.store(name, x, piece)

    def head_decay(self, piece: Any, grads: list[Array], both: Array) -> list[Array]:
        """Gradients of k, q, and of e where something is erased."""
        problem = self.problem
        into, out_of = (rows(self.vectors[n], C) if problem.decay else 1.0 for n in ("into", "out_of"))
        d_q, d_k, d_e = grads[0] * (into * problem.scale), grads[1] * out_of, [x * into for x in grads[2:]]
        if problem.decay == "head":
            for name, side, x in (("q", "into", d_q), ("k", "out_of", d_k), *(("e", "into", x) for x in d_e)):
                self.add(side, jnp.sum(take(self.key(name, piece)) * x, axis=1))
            ref = self.results["carry"].at[self.batch, self.head, self.index, pl.ds(piece * C, C)]
            ref[...] = jnp.sum(both, axis=1)
        d_p, d_l = (self.operand(self.layout.scores, i) for i in range(2))
        q, k = (self.key(n, piece) for n in ("q", "k"))
        write = [(transposed(d_p), q)]
        if d_e:
            write.append((transposed(d_l), self.key("e", piece)))
        return accumulate(self.numbers, [(write, d_k), ([(d_p, k)], d_q), *(([(d_l, k)], x) for x in d_e)])

    def value_piece(self, piece: Any) -> None:
        if not self.layout.early:
            sync()
            self.fetch_late(piece)
        plgpu.barrier_wait(self.barriers.late.at[self.me])
        tiles = {n: self.landed(self.landing_tile(self.layout.late, n, self.me)) for n in self.layout.late}
        d_z = self.valid(take(self.value("d_z", piece)))
        read = self.rule.arguments["z"]
        keep = self.real_channels(True, piece)
        for name, x in self.pull_back("z", d_z, tiles | self.gates("z"), keep).items() if read else ():
            self.give(name, x, piece)
        self.give_zeros("value", set(read), piece)
