"""The gradients of one chunk of one head, and what the decay means for them where there is one per head."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gradient_tiles import GradientTiles
from pallas_kernels.layout import channel_gates
from pallas_kernels.tiles import (
    C,
    accumulate,
    products,
    put,
    rows,
    sync,
    take,
    transposed,
    zeros,
)


class Gradients(GradientTiles):
    """One chunk of one head."""

    channel_decay: Callable[[Any, list[Array], Array], list[Array]]

    def run(self) -> None:
        self.fetch_all()
        plgpu.barrier_wait(self.landing)
        for piece in range(self.problem.key_pieces):
            self.keys(piece)
        for piece in range(self.problem.value_pieces):
            x = self.landed(self.landing_tile(self.layout.values, "d_out", piece))
            sync()
            put(self.operand("values", "d_out", piece), x, self.numbers)
        sync()
        self.scores()
        self.each(self.problem.key_pieces, self.key_piece, "keys")
        self.fetch_late()
        self.each(self.problem.value_pieces, self.value_piece, "values")
        plgpu.wait_smem_to_gmem(0)

    def each(self, count: int, action: Callable[[Any], None], side: str) -> None:
        """For each tile of channels, with the sums over them, which are added up outside."""

        def one(piece: Any, nothing: tuple[()]) -> tuple[()]:
            self.sums = {}
            action(piece)
            for name, x in self.sums.items():
                self.results[f"{name} {side}"].at[piece, self.batch, self.head, self.tokens][...] = x
            return nothing

        lax.fori_loop(0, count, one, ())

    # Steps.

    def keys(self, piece: int) -> None:
        """q, k and e as operands."""
        landed = {n: self.landed(self.landing_tile(self.places, n, piece)) for n in ("q", "k")}
        outputs = ("k", "e") if self.problem.erases else ("k",)
        tiles = landed | self.key_gates(piece)
        made = {"q": tiles["q"]} | {o: self.output(o, tiles, piece) for o in outputs}
        # k as it came is needed again where the rule makes another of it: that has a place of its own.
        sync()
        for name, x in made.items():
            put(self.operand("keys", name, piece), x, self.numbers)

    def key_gates(self, piece: Any) -> dict[str, Array]:
        """The gates of k, e and log_decay."""
        outputs = ("k", "e", *(("log_decay",) if self.problem.decay == "key" else ()))
        names = channel_gates(self.rule, "k", "e", "log_decay")
        return {n: self.landed(self.landing_tile(self.places, n, piece)) for n in names} | self.gates(*outputs)

    def key_tiles(self, piece: Any) -> dict[str, Array]:
        """What the rule's function gets, once q and k are operands."""
        q, k = (take(self.operand("keys", n, piece)) for n in ("q", "k"))
        if "k" in self.layout.gates:
            k = self.landed(self.landing_tile(self.places, "k", piece))
        return {"q": q, "k": k, **self.key_gates(piece)}

    def scores(self) -> None:
        """dP (with the scale of the output) and dL as operands; with a decay per head with the decay, too."""
        problem, values = self.problem, range(self.problem.value_pieces)
        left = ("d_out", "d_z") if problem.erases else ("d_out",)
        made = products(
            self.numbers,
            *(
                [(self.operand("values", x, v), transposed(self.operand("values", "u", v))) for v in values]
                for x in left
            ),
        )
        grads = [self.inside(made[0] * problem.scale, True)]
        if problem.erases:
            grads.append(self.inside(-made[1], False))
        if problem.decay == "head":
            grads = self.through_decay(grads)
        for x, page in zip(grads, (self.layout.d_p, self.layout.d_l), strict=False):
            put(self.pages.operand(page, self.numbers), x, self.numbers)
        sync()

    def through_decay(self, grads: list[Array]) -> list[Array]:
        """The gradient of log_decay between the tokens of the chunk; returns the others times the decay."""
        decay = self.decay_between()
        grads = [decay * x for x in grads]
        pieces = range(self.problem.key_pieces)
        names = ("q", "e")[: len(grads)]
        found = products(
            self.numbers,
            *([(self.operand("keys", n, p), transposed(self.operand("keys", "k", p))) for p in pieces] for n in names),
        )
        between = grads[0] * found[0]
        for x, y in zip(grads[1:], found[1:], strict=True):
            between = between + x * y
        # g_t = sum over i >= t > j: nothing is subtracted.
        r, c = self.numbered()
        crossing = self.times(jnp.where(c >= r, 1.0, 0.0).astype(jnp.bfloat16), between)
        sums = jnp.sum(jnp.where(c < r, crossing, 0.0), axis=1)
        self.results["pairs"].at[self.batch, self.head, self.tokens][...] = sums
        return grads

    def boundary(self, piece: Any) -> tuple[list[Array], Array]:
        """Gradients of Q, K and Y, the last where something is erased, and the sum of S D over values, tile by tile."""
        count = 3 if self.problem.erases else 2

        def one(value: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            *grads, both = sums
            state, after = self.fetch_states(piece, value)
            terms = [("d_out", state), ("u", after), ("d_z", state)][:count]
            left = [[(self.operand("values", n, value), transposed(x))] for n, x in terms]
            made = accumulate(self.numbers, list(zip(left, grads, strict=True)))
            if self.problem.decay is not None:
                both = both + take(state) * take(after)
            sync()
            return (*made, both)

        start = tuple(zeros((C, C)) for _ in range(count + 1))
        d_q, d_k, *d_y, both = lax.fori_loop(0, self.problem.value_pieces, one, start)
        return [d_q, d_k, *(-x for x in d_y)], both

    def key_piece(self, piece: Any) -> None:
        grads, both = self.boundary(piece)
        if self.problem.decay == "key":
            d_k, d_decay, d_q, *d_e = self.channel_decay(piece, grads, both)
        else:
            d_k, d_q, *d_e = self.head_decay(piece, grads, both)
        found: dict[str, Array] = {"q": d_q}
        made = {"log_decay": d_decay} if self.problem.decay == "key" else {}
        made |= dict(zip(("k", "e"), (d_k, *d_e), strict=False))
        left = [n for n in ("log_decay", "e", "k") if n in made and n in self.pull_back.jaxprs]
        tiles = self.key_tiles(piece)
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
                self.add(side, jnp.sum(take(self.operand("keys", name, piece)) * x, axis=1))
            ref = self.results["carry"].at[self.batch, self.head, self.index, pl.ds(piece * C, C)]
            ref[...] = jnp.sum(both, axis=1)
        d_p, d_l = (self.pages.operand(page, self.numbers) for page in (self.layout.d_p, self.layout.d_l))
        q, k = (self.operand("keys", n, piece) for n in ("q", "k"))
        write = [(transposed(d_p), q)]
        if d_e:
            write.append((transposed(d_l), self.operand("keys", "e", piece)))
        return accumulate(self.numbers, [(write, d_k), ([(d_p, k)], d_q), *(([(d_l, k)], x) for x in d_e)])

    def value_piece(self, piece: int) -> None:
        names = list(self.layout.late)
        tiles = {n: self.landed(self.landing_tile(self.layout.late, n, piece)) for n in names}
        d_z = self.valid(take(self.operand("values", "d_z", piece)))
        read = self.rule.arguments["z"]
        keep = self.real_channels(True, piece)
        for name, x in self.pull_back("z", d_z, tiles | self.gates("z"), keep).items() if read else ():
            self.give(name, x, piece)
        self.give_zeros("value", set(read), piece)
