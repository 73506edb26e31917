"""The tokens of one chunk of one head inside a kernel: their vectors, and what a rule makes of tiles that landed."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import head_gates
from pallas_kernels.linear import Terms, coefficients
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.tiles import COL, ROW, TILE, C, cols, iotas, rows, vector

AGAIN = ("runs_again", "prefix_again")
"""Vectors that are wanted along columns, too."""


class Tokens:
    """place: sequence, value head, chunk. vectors: one number for each token, by name (`load`)."""

    def __init__(
        self,
        problem: Problem,
        rule: TiledRule,
        inputs: Mapping[str, Any],
        place: tuple[Any, Any, Any],
        vectors: dict[str, Array] | None = None,
    ) -> None:
        self.problem, self.rule, self.inputs = problem, rule, inputs
        self.batch, self.head, self.index = place
        self.numbers = problem.numbers
        self.tokens = pl.ds(self.index * C, C)
        self.vectors = {} if vectors is None else vectors

    def load(self, name: str) -> Array:
        """A vector from device memory: along columns if one of `AGAIN`, otherwise along rows."""
        ref = self.inputs[name]
        head = () if len(ref.shape) == 2 else (self.problem.shared_head(self.head, ref.shape[1]),)
        return vector(ref.at[(self.batch, *head, self.tokens)], COL if name in AGAIN else ROW)

    def fetch(self, name: str, tile: Any, piece: Any, barrier: Any) -> None:
        """Starts the copy of 64 channels of q, k, v or a gate."""
        plgpu.copy_gmem_to_smem(self.source(name, piece), tile, barrier)

    def source(self, name: str, piece: Any) -> Any:
        ref = self.inputs[name]
        return ref.at[self.batch, self.tokens, self.problem.shared_head(self.head, ref.shape[2]), pl.ds(piece * C, C)]

    def numbered(self) -> tuple[Array, Array]:
        """Row and column numbers of a tile."""
        return iotas()

    def valid(self, x: Array) -> Array:
        if not self.problem.masked:
            return x
        keep = self.vectors["valid"]
        return jnp.where((rows(keep, x.shape[1]) if x.ndim == 2 else keep) > 0, x, 0.0)

    def landed(self, tile: Any) -> Array:
        """A tile as it came, in float32, zeros for tokens that are not valid."""
        return self.valid(plgpu.load(tile, layout=TILE, optimized=False).astype(jnp.float32))

    def gates(self, *outputs: str) -> dict[str, Array]:
        """Gates with one number per head, vectors."""
        return {n: self.valid(self.vectors[n]) for n in head_gates(self.rule, *outputs)}

    def output(self, output: str, tiles: Mapping[str, Array], piece: Any = 0) -> Array:
        """One of the rule's outputs for 64 channels; zeros for tokens that are not valid and channels that are padding,
        of which a rule's function may have made anything."""
        made = plgpu.layout_cast(self.rule(output, tiles), TILE)
        keep = self.real_channels(output == "z", piece)
        return self.valid(made if keep is None else jnp.where(keep, made, 0.0))

    def real_channels(self, values: bool, piece: Any) -> Array | None:
        """Which of 64 channels are not padding; None if none is."""
        problem = self.problem
        true, whole = (problem.true_value_dim, problem.value_dim) if values else (problem.true_key_dim, problem.key_dim)
        left = true - piece * C
        if (isinstance(piece, int) and left >= C) or true == whole:
            return None
        return self.numbered()[1] < left

    def inside(self, x: Array, diagonal: bool) -> Array:
        """Keeps the pairs with j <= i (or j < i) of one segment."""
        r, c = self.numbered()
        return self.same_run(jnp.where(r >= c if diagonal else r > c, x.astype(jnp.float32), 0.0))

    def same_run(self, x: Array) -> Array:
        """Keeps the pairs of one segment."""
        if not self.problem.segmented:
            return x
        return jnp.where(rows(self.vectors["runs"], C) == cols(self.vectors["runs_again"], C), x, 0.0)

    def decay_between(self) -> Array:
        """With a decay per head, from token j to token i; 0 where j > i."""
        r, c = self.numbered()
        exponent = rows(self.vectors["prefix"], C) - cols(self.vectors["prefix_again"], C)
        return jnp.exp2(jnp.where(r >= c, exponent, -jnp.inf))

    def coefficients(self) -> Terms:
        """What k and q are multiplied with in e, zeros for tokens that are not valid."""
        made = coefficients(self.rule, self.gates("e"))
        return Terms(*(None if x is None else self.valid(x) for x in made))
