"""What is fixed when a kernel is built: sizes, number formats, and what the rule needs."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiles import C, Numbers


def contracts(terms: tuple[str, ...] | None) -> bool:
    """Whether e is beta k: I - k e^T lengthens nothing for a key of unit norm and beta in [0, 2]. The products of
    others may grow without end (docs/kernels.md, Numbers)."""
    return terms == ("k",)


@dataclass(frozen=True)
class Problem:
    """One call: B sequences of T tokens, HV heads of state [K, V]; H heads of q and k, each for HV / H value heads."""

    batch: int
    length: int
    value_heads: int
    key_dim: int
    value_dim: int
    true_key_dim: int  # without the channels added to make K and V multiples of 64
    true_value_dim: int
    scale: float
    numbers: Numbers
    dtype: Any
    erases: bool
    terms: tuple[str, ...] | None  # what e is a sum of, q and k, each with a number per row (`linear.terms`)
    decay: str | None  # "head", "key" or None
    masked: bool  # some tokens are not valid
    segmented: bool  # some tokens clear the state

    @property
    def direct(self) -> bool:
        """Whether the scan over chunks reads q and k as they are: all else is a number per row, then."""
        return self.decay != "key" and (not self.erases or self.terms is not None)

    @property
    def u_parts(self) -> int:
        """Of U as the forward scan keeps it for the gradients: two where one has the digits of bfloat16 only and the
        gradient of a decay per channel would lose by it."""
        coarse = self.numbers.parts == 1 and jnp.dtype(self.numbers.dtype) == jnp.bfloat16
        return 2 if coarse and self.decay == "key" and self.erases else self.numbers.parts

    @property
    def chunks(self) -> int:
        return -(-self.length // C)

    def shared_head(self, head: Any, heads: int) -> Any:
        """The head of an array with fewer heads that serves a value head: each serves several."""
        share = self.value_heads // heads
        return head if share == 1 else lax.div(head, jnp.int32(share))

    @property
    def key_pieces(self) -> int:
        """Tiles of 64 key channels."""
        return self.key_dim // C

    @property
    def value_pieces(self) -> int:
        """Tiles of 64 value channels."""
        return self.value_dim // C
