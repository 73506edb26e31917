"""One chunk of one head: the steps of `prepare`, in the shared memory of one worker."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import Layout, head_gates
from pallas_kernels.pages import Pages
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.scores import (
    SCALE,
    Piece,
    channel_scores,
    log_numbers,
    scaled,
    store_log_decay,
    store_parts,
)
from pallas_kernels.tiles import (
    TILE,
    C,
    Numbers,
    iotas,
    products,
    put,
    rows,
    split,
    sync,
    transposed,
    zeros,
)
from pallas_kernels.tokens import AGAIN, Tokens
from pallas_kernels.triangular import invert

STEPS = 6
"""Steps of a chunk between which addresses are forgotten."""


class Barriers(NamedTuple):
    """What has landed: q, k and the gates of e; log_decay."""

    keys: Any
    decay: Any


class Chunk(Tokens):
    """One chunk of one head, in the pages of one worker."""

    def __init__(
        self,
        problem: Problem,
        rule: TiledRule,
        layout: Layout,
        inputs: Mapping[str, Any],
        shared: Callable[[Any], tuple[Pages, Barriers]],
        place: tuple[Any, Any, Any],
        counts: Array,
        vectors: dict[str, Array] | None = None,
    ) -> None:
        super().__init__(problem, rule, inputs, place, vectors)
        self.layout, self.shared, self.counts = layout, shared, counts
        self.forget_addresses(0)

    def forget_addresses(self, step: int) -> None:
        """Shared memory from here on, by addresses that the compiler cannot know to be those of another step: it would
        keep every one of them in registers to the end of the chunk."""
        self.pages, self.barriers = self.shared(self.vectors.get(f"nothing{step}", 0))

    # Device memory.

    def load_vectors(self, again: bool = False) -> dict[str, Array]:
        """One number for each token. Those along rows are loaded a chunk ahead, because nothing else waits for device
        memory; those along columns take too many registers for that."""
        found: dict[str, Array] = {}
        if not again:
            found |= {f"nothing{step}": self.inputs["nothing"][step] for step in range(STEPS)}
        names = vector_names(self.problem, self.rule)
        return found | {name: self.load(name) for name in names if (name in AGAIN) == again}

    def fetch_keys(self, names: tuple[str, ...]) -> None:
        """Starts the copies of some of q, k and the gates of e, all channels."""
        self._fetch({n: self.layout.keys[n] for n in names}, self.barriers.keys)

    def fetch_decay(self) -> None:
        self._fetch(self.layout.decay, self.barriers.decay)

    def prefetch(self) -> None:
        """Brings what the copies will fetch into the cache of the chip: their pages are free late."""
        for name in (*self.layout.keys, *self.layout.decay):
            for piece in range(self.problem.key_pieces):
                plgpu.async_prefetch(self.source(name, piece))

    def _fetch(self, places: Mapping[str, tuple[int, int]], barrier: Any) -> None:
        for name, (first, step) in places.items():
            for piece in range(self.problem.key_pieces):
                tile = self.pages.tile(first + piece * step, self.inputs[name].dtype)
                self.fetch(name, tile, piece, barrier)

    # Tiles.

    def numbered(self) -> tuple[Array, Array]:
        """Row and column numbers of a tile.

        A thread has elements of two rows, 8 apart, and of columns at fixed distances: masks of blocks of 8 are then
        known where they are compiled, or the same for a whole warp, as long as the compiler sees those numbers. The
        other bits of a row are loaded: a compiler that can compute masks does so before the loop over chunks, and has
        no registers left inside it.
        """
        r, c = iotas()
        return jnp.bitwise_and(r, 8) | jnp.bitwise_and(rows(self.counts + self.vectors["nothing0"], C), C - 1 - 8), c

    def tiles(self, places: Mapping[str, tuple[int, int]], piece: int) -> dict[str, Array]:
        return {
            name: self.landed(self.pages.tile(first + piece * step, self.inputs[name].dtype))
            for name, (first, step) in places.items()
        }

    def operand(self, first: int, piece: int = 0) -> Any:
        return self.pages.operand(first + piece * self.layout.step, self.numbers)

    def operands(self, piece: int) -> tuple[Any, Any, Any]:
        """q, k, and e or where Y will be."""
        at = self.layout
        return self.operand(at.q, piece), self.operand(at.k, piece), None if at.e is None else self.operand(at.e, piece)

    @property
    def has_e(self) -> bool:
        """Whether e is a tile."""
        return self.problem.erases and self.problem.terms is None

    def loaded(self) -> None:
        """Tiles of 32 bits have been loaded and may be overwritten: their rows end elsewhere as 16-bit tiles."""
        if self.numbers.parts == 2:
            sync()

    # Steps.

    def keys(self, piece: int) -> None:
        """q, k and e of 64 channels as operands, in the place of what landed there."""
        outputs = ("k", "e") if self.has_e else ("k",)
        tiles = self.tiles(self.layout.keys, piece) | self.gates(*outputs)
        made = {"q": tiles["q"]} | {o: self.output(o, tiles, piece) for o in outputs}
        self.loaded()
        for x, name in zip(self.operands(piece), ("q", "k", "e"), strict=True):
            if name in made:
                put(x, made[name], self.numbers)

    def erasing(self, of_q: Array, of_k: Array) -> Array:
        """The same sum for e where it is one of q and k."""
        made = None
        for x, factor in zip((of_k, of_q), self.coefficients(), strict=True):
            if factor is not None:
                term = x.astype(jnp.float32) * (rows(factor, C) if factor.ndim else factor)
                made = term if made is None else made + term
        assert made is not None
        return made

    def head_scores(self) -> list[Array]:
        """P, and L where something is erased, where all channels of a head decay together or none does."""
        pieces = [self.operands(piece) for piece in range(self.problem.key_pieces)]
        left = (0,) if not self.problem.erases else (0, 2) if self.has_e else (0, 1)
        # e along with q would take too many registers.
        sums = [[(x[which], transposed(x[1])) for x in pieces] for which in left]
        made = products(self.numbers, *sums)
        if self.problem.decay is not None:
            decay = self.decay_between()
            made = [decay * x for x in made]
        return self.scores(made)

    def scores(self, made: list[Array]) -> list[Array]:
        """P, and L of the products with q, and with e or k."""
        if self.problem.erases and not self.has_e:
            return [made[0], self.erasing(*made)]
        return made

    def scale_by_head(self, piece: int) -> None:
        """Q, Y = Gamma E and K in the place of q, e and k."""
        if self.problem.decay is None:
            q = self.operand(self.layout.q, piece)
            store_parts(q, scaled(q, zeros((C, C)) + self.problem.scale, self.numbers))
            return
        self.scale_operands(piece, *(rows(self.vectors[n], C) for n in ("into", "out_of")))

    def scale_operands(self, piece: int, into: Array, out_of: Array) -> None:
        """Q = scale Gamma q, K = tail k and Y = Gamma E in the place of q, k and e."""
        q, k, e = self.operands(piece)
        if e is not None:
            terms = [(e, into)]
            if not self.has_e:
                of = zip((k, q), self.coefficients(), strict=True)
                terms = [(x, into * (rows(a, C) if a.ndim else a)) for x, a in of if a is not None]
            made = [scaled(x, factor, self.numbers) for x, factor in terms]
            if len(made) == 1:
                store_parts(e, made[0])
            else:
                first, *others = (part.astype(jnp.float32) for parts in made for part in parts)
                put(e, sum(others, first), self.numbers)
        store_parts(q, scaled(q, into * self.problem.scale, self.numbers))
        store_parts(k, scaled(k, out_of, self.numbers))

    def log_decays(self) -> list[Any]:
        """log_decay as operands."""
        numbers, layout = log_numbers(self.numbers), self.layout
        made = []
        for piece in range(self.problem.key_pieces):
            tiles = self.tiles(layout.decay, piece)
            made.append(self.pages.operand(layout.scratch + piece * layout.scratch_step, numbers))
            value = self.output("log_decay", tiles | self.gates("log_decay"), piece)
            sync()
            store_log_decay(value, made[-1], self.numbers)
        sync()
        return made

    def channel_scores(self, log_decays: list[Any], select: Callable[[Any], Any]) -> list[Array]:
        """P, and L where something is erased, with one decay per channel."""
        layout, numbers = self.layout, self.numbers
        pieces = []
        for piece, log_decay in enumerate(log_decays):
            page = layout.scratch + piece * layout.scratch_step + numbers.parts
            room = self.pages.operand(page, numbers), self.pages.operand(page, Numbers(jnp.bfloat16))
            q, k, e = self.operands(piece)
            pieces.append(Piece(q, k, e if self.has_e else None, log_decay, *room))
        return self.scores(list(channel_scores(numbers, pieces, select, self.numbered(), self.problem.erases)))

    def store_ones(self) -> None:
        """What sums log_decay over a chunk: as one number per row of a transposed product, not across warps."""
        ones = self.pages.tile(self.layout.ones, jnp.float16)
        ones[...] = plgpu.layout_cast(jnp.full((C, C), 1.0 / SCALE, jnp.float16), TILE)

    def scale_by_channel(self, piece: int, log_decay: Any, select: Callable[[Any], Any], gamma: Any) -> None:
        """Q, Y = Gamma E and K in the place of q, e and k; gamma to device memory."""
        count = self.inputs["select"].shape[0]
        ones = (self.pages.tile(self.layout.ones, jnp.float16),)
        start, end = ([((select(count - n),), (part,)) for part in log_decay] for n in (2, 1))
        whole = [((part.T,), ones) for part in log_decay]
        made = products(Numbers(jnp.float16, 1, self.numbers.interpret), start, end, whole)
        into, out_of, total = (jnp.exp2(x) for x in made)
        if self.problem.segmented:
            into, out_of = into * rows(self.vectors["into"], C), out_of * rows(self.vectors["out_of"], C)
        self.scale_operands(piece, into, out_of)
        total = jnp.sum(jnp.where(self.numbered()[1] == 0, total, 0.0), axis=1)
        gamma[...] = total * self.inputs["through"][self.batch, self.index] if self.problem.segmented else total

    def store_scores(self, scores: Array) -> None:
        put(self.operand(self.layout.p), self.inside(scores, True) * self.problem.scale, self.numbers)

    def invert(self, lower: Array, meanwhile: Callable[[], None] | None) -> tuple[Array, ...]:
        """A as the parts of an operand in registers."""
        numbers, at = log_numbers(self.numbers), self.layout
        x, lower_s, lx = (self.pages.operand(page, numbers) for page in (at.x, at.l, at.lx))
        inverse = invert(self.inside(lower, False), x, lower_s, lx, numbers, meanwhile, self.numbered())
        return split(inverse, self.numbers)


def vector_names(problem: Problem, rule: TiledRule) -> list[str]:
    """The inputs with one number for each token that `prepare` reads."""
    outputs = ("k", "e", "log_decay") if problem.decay == "key" else ("k", "e")
    names = head_gates(rule, *outputs) + (["valid"] if problem.masked else [])
    if problem.decay == "head":
        names += ["prefix", "prefix_again"]
    if problem.segmented:
        names += ["runs", "runs_again"]
    if not problem.direct and (problem.decay == "head" or problem.segmented):
        names += ["into", "out_of"]
    return list(dict.fromkeys(names))
