"""One chunk of one head: the steps of `prepare`, in the shared memory of one worker."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
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
    summed,
)
from pallas_kernels.tiles import (
    COL,
    ROW,
    TILE,
    C,
    Numbers,
    cols,
    product,
    put,
    rows,
    split,
    sync,
    transposed,
    vector,
    zeros,
)
from pallas_kernels.triangular import invert

STEPS = 6
"""Steps of a chunk between which addresses are forgotten."""


class Barriers(NamedTuple):
    """What has landed: q, k and the gates of e; log_decay; v and its gates, by the place where they land."""

    keys: Any
    decay: Any
    values: Callable[[int], Any]


class Chunk:
    """One chunk of one head, in the pages of one worker."""

    def __init__(
        self,
        problem: Problem,
        rule: TiledRule,
        layout: Layout,
        inputs: Mapping[str, Any],
        shared: Callable[[Any], tuple[Pages, Barriers]],
        place: tuple[Any, Any, Any],
        counts: tuple[Array, Array],
        vectors: dict[str, Array] | None = None,
    ) -> None:
        self.counts = counts
        self.problem, self.rule, self.layout, self.inputs = problem, rule, layout, inputs
        self.shared = shared
        self.batch, self.head, self.index = place
        self.numbers = problem.numbers
        self.tokens = pl.ds(self.index * C, C)
        self.vectors = {} if vectors is None else vectors
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
        for name in vector_names(self.problem, self.rule):
            if name.endswith("_again") == again:
                ref = self.inputs[name]
                head = () if len(ref.shape) == 2 else (self.problem.shared_head(self.head, ref.shape[1]),)
                found[name] = vector(ref.at[(self.batch, *head, self.tokens)], COL if again else ROW)
        return found

    def fetch(self, name: str, page: Any, piece: Any, barrier: Any) -> None:
        ref = self.inputs[name]
        source = ref.at[self.batch, self.tokens, self.problem.shared_head(self.head, ref.shape[2]), pl.ds(piece * C, C)]
        plgpu.copy_gmem_to_smem(source, self.pages.tile(page, ref.dtype), barrier)

    def fetch_keys(self, names: tuple[str, ...]) -> None:
        """Starts the copies of some of q, k and the gates of e, all channels."""
        for name in names:
            first, step = self.layout.keys[name]
            for piece in range(self.problem.key_pieces):
                self.fetch(name, first + piece * step, piece, self.barriers.keys)

    def fetch_decay(self) -> None:
        for name, (first, step) in self.layout.decay.items():
            for piece in range(self.problem.key_pieces):
                self.fetch(name, first + piece * step, piece, self.barriers.decay)

    def fetch_values(self, start: int) -> None:
        """As many pieces of v and its gates as q has pages for, from piece `start` on."""
        for slot in range(min(self.problem.key_pieces, self.problem.value_pieces - start)):
            for name, (first, step) in self.layout.values.items():
                self.fetch(name, first + slot * step, start + slot, self.barriers.values(slot))

    # Tiles.

    def landed(self, name: str, page: Any) -> Array:
        """A tile as it came, in float32, zeros for tokens that are not valid."""
        ref = self.pages.tile(page, self.inputs[name].dtype)
        return self.valid(plgpu.load(ref, layout=TILE, optimized=False).astype(jnp.float32))

    def numbered(self) -> tuple[Array, Array]:
        """Row and column numbers of a tile, made of loaded numbers: a compiler that can compute them computes them, and
        masks made of them, before the loop over chunks, and then has no registers left inside it."""
        return rows(self.counts[0] + self.vectors["nothing0"], C), cols(self.counts[1], C)

    def valid(self, x: Array) -> Array:
        if not self.problem.masked:
            return x
        keep = self.vectors["valid"]
        return jnp.where((rows(keep, x.shape[1]) if x.ndim == 2 else keep) > 0, x, 0.0)

    def gates(self, *outputs: str) -> dict[str, Array]:
        """Gates with one number per head, vectors."""
        return {n: self.valid(self.vectors[n]) for n in head_gates(self.rule, *outputs)}

    def output(self, output: str, tiles: Mapping[str, Array], piece: int = 0) -> Array:
        """One of the rule's outputs for 64 channels; zeros for tokens that are not valid and channels that are padding,
        of which a rule's function may have made anything."""
        made = plgpu.layout_cast(self.rule(output, tiles), TILE)
        left = self.problem.true_key_dim - piece * C
        if output != "z" and left < C:
            made = jnp.where(self.numbered()[1] < left, made, 0.0)
        return self.valid(made)

    def operand(self, first: int, piece: int = 0) -> Any:
        return self.pages.operand(first + piece * self.layout.step, self.numbers)

    def operands(self, piece: int) -> tuple[Any, Any, Any]:
        at = self.layout
        e = self.operand(at.e, piece) if self.problem.erases else None
        return self.operand(at.q, piece), self.operand(at.k, piece), e

    def loaded(self) -> None:
        """Tiles of 32 bits have been loaded and may be overwritten: their rows end elsewhere as 16-bit tiles."""
        if self.numbers.parts == 2:
            sync()

    # Steps.

    def keys(self, piece: int) -> None:
        """q, k and e of 64 channels as operands, in the place of what landed there."""
        outputs = ("k", "e") if self.problem.erases else ("k",)
        tiles = {n: self.landed(n, first + piece * step) for n, (first, step) in self.layout.keys.items()}
        tiles |= self.gates(*outputs)
        made = {"q": tiles["q"]} | {o: self.output(o, tiles, piece) for o in outputs}
        self.loaded()
        for x, name in zip(self.operands(piece), ("q", "k", "e"), strict=True):
            if x is not None:
                put(x, made[name], self.numbers)

    def head_scores(self, which: int) -> Array:
        """P (which = 0) or L (2) where all channels of a head decay together, or none does."""
        pieces = [self.operands(piece) for piece in range(self.problem.key_pieces)]
        total = product(self.numbers, *((x[which], transposed(x[1])) for x in pieces))
        if self.problem.decay is None:
            return total
        r, c = self.numbered()
        exponent = rows(self.vectors["prefix"], C) - cols(self.vectors["prefix_again"], C)
        return jnp.exp2(jnp.where(r >= c, exponent, -jnp.inf)) * total

    def scale_by_head(self, piece: int) -> None:
        """Q, Gamma E and K in the place of q, e and k."""
        q, k, e = self.operands(piece)
        if self.problem.decay is None:
            store_parts(q, scaled(q, zeros((C, C)) + self.problem.scale, self.numbers))
            return
        self.scale_operands((q, k, e), rows(self.vectors["into"], C), rows(self.vectors["out_of"], C))

    def scale_operands(self, operands: tuple[Any, Any, Any], into: Array, out_of: Array) -> None:
        """Q = scale Gamma q, K = tail k and Gamma E in the place of q, k and e."""
        for x, factor in zip(operands, (into * self.problem.scale, out_of, into), strict=True):
            if x is not None:
                store_parts(x, scaled(x, factor, self.numbers))

    def log_decays(self) -> list[Any]:
        """log_decay as operands."""
        numbers, layout = log_numbers(self.numbers), self.layout
        made = []
        for piece in range(self.problem.key_pieces):
            tiles = {n: self.landed(n, first + piece * step) for n, (first, step) in layout.decay.items()}
            made.append(self.pages.operand(layout.scratch + piece * layout.scratch_step, numbers))
            value = self.output("log_decay", tiles | self.gates("log_decay"), piece)
            sync()
            store_log_decay(value, made[-1], self.numbers)
        sync()
        return made

    def channel_scores(self, log_decays: list[Any], select: Callable[[Any], Any]) -> tuple[Array, ...]:
        """P and L with one decay per channel."""
        layout, numbers = self.layout, self.numbers
        pieces = []
        for piece, log_decay in enumerate(log_decays):
            page = layout.scratch + piece * layout.scratch_step + numbers.parts
            room = self.pages.operand(page, numbers), self.pages.operand(page, Numbers(jnp.bfloat16))
            pieces.append(Piece(*self.operands(piece), log_decay, *room))
        return channel_scores(numbers, pieces, select, self.numbered())

    def scale_by_channel(self, piece: int, log_decay: Any, select: Callable[[Any], Any], gamma: Any) -> None:
        """Q, Gamma E and K in the place of q, e and k; gamma to device memory."""
        numbers, layout = self.numbers, self.layout
        count = self.inputs["select"].shape[0]
        # The whole chunk's decay as one number per row of a transposed product: no sum across warps.
        ones = self.pages.tile(layout.ones, jnp.float16)
        if piece == 0:
            ones[...] = plgpu.layout_cast(jnp.full((C, C), 1.0 / SCALE, jnp.float16), TILE)
        into = jnp.exp2(summed(select(count - 2), log_decay, numbers))
        out_of = jnp.exp2(summed(select(count - 1), log_decay, numbers))
        if self.problem.segmented:
            into, out_of = into * rows(self.vectors["into"], C), out_of * rows(self.vectors["out_of"], C)
        self.scale_operands(self.operands(piece), into, out_of)
        sync()
        one = Numbers(jnp.float16, 1, numbers.interpret)
        total = product(one, *(((part.T,), (ones,)) for part in log_decay))
        total = jnp.exp2(jnp.sum(jnp.where(self.numbered()[1] == 0, total, 0.0), axis=1))
        gamma[...] = total * self.inputs["through"][self.batch, self.index] if self.problem.segmented else total

    def inside(self, x: Array, diagonal: bool) -> Array:
        """Keeps the pairs with j <= i (or j < i) of one segment."""
        r, c = self.numbered()
        mask = r >= c if diagonal else r > c
        if self.problem.segmented:
            mask &= rows(self.vectors["runs"], C) == cols(self.vectors["runs_again"], C)
        return jnp.where(mask, x.astype(jnp.float32), 0.0)

    def store_scores(self, scores: Array) -> None:
        put(self.operand(self.layout.p), self.inside(scores, True) * self.problem.scale, self.numbers)

    def invert(self, lower: Array, meanwhile: Callable[[], None]) -> tuple[Array, ...]:
        """A as the parts of an operand in registers."""
        numbers = log_numbers(self.numbers)
        memory = self.pages.operand(self.layout.x, numbers), self.pages.operand(self.layout.l, numbers)
        return split(invert(lower, *memory, numbers, meanwhile, self.numbered()), self.numbers)

    def values(self, slot: int, inverse: tuple[Array, ...] | None) -> Any:
        """U0 of 64 value channels, in the place where v landed."""
        tiles = {n: self.landed(n, first + slot * step) for n, (first, step) in self.layout.values.items()}
        u = self.operand(self.layout.q, slot)
        z = self.output("z", tiles | self.gates("z"))
        self.loaded()
        put(u, z, self.numbers)
        sync()
        if inverse is not None:
            made = product(self.numbers, (inverse, u))
            sync()
            put(u, made, self.numbers)
            sync()
        return u


def vector_names(problem: Problem, rule: TiledRule) -> list[str]:
    """The inputs with one number for each token."""
    outputs = ("k", "e", "z", "log_decay") if problem.decay == "key" else ("k", "e", "z")
    names = head_gates(rule, *outputs) + (["valid"] if problem.masked else [])
    if problem.decay == "head":
        names += ["prefix", "prefix_again", "into", "out_of"]
    if problem.segmented:
        names += ["runs", "runs_again"] + (["into", "out_of"] if problem.decay == "key" else [])
    return list(dict.fromkeys(names))
