"""Shared memory as pages: tiles of 64 x 64 16-bit numbers (8 KiB) that may hold other types at other times.

A float32 tile takes two pages that follow one another, and so does an operand of two parts: a tile that lands as
float32 is split where it lies.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import C, Numbers, Operand, smem

PAGE = C * C * 2
"""Bytes of a page."""


def pages_of(dtype: Any) -> int:
    """Pages that a tile of this type takes."""
    return jnp.dtype(dtype).itemsize // 2


def memory(workers: int, pages: int, dtypes: Sequence[Any], interpret: bool) -> Any:
    """The shared memory of all workers of a block, with one view for each type.

    In the CPU interpreter the views are apart: a page is never read as another type than it was written as, and its
    detection of races takes an access to any page of a union for an access to all of them.
    """
    views = [smem((workers, pages // pages_of(dtype), C, C), dtype) for dtype in dtypes]
    return views if interpret else plgpu.RefUnion(*views)


class Pages:
    """Tiles of one worker's pages, by number."""

    def __init__(self, views: Sequence[Any], worker: Any, dtypes: Sequence[Any], extra: Any = None) -> None:
        self.worker, self.extra = worker, extra
        self.views = {jnp.dtype(dtype): view for dtype, view in zip(dtypes, views, strict=True)}

    def tile(self, page: Any, dtype: Any) -> Any:
        """The tile that begins at a page; an even one for a type of 32 bits."""
        each = pages_of(dtype)
        return self.views[jnp.dtype(dtype)].at[self.worker, page if each == 1 else page // each]

    def operand(self, page: Any, numbers: Numbers) -> Operand:
        """As many pages as an operand has parts; page None: those apart from the others."""
        if page is None:
            return tuple(self.extra.at[self.worker * numbers.parts + part] for part in range(numbers.parts))
        return tuple(self.tile(page + part, numbers.dtype) for part in range(numbers.parts))


class Taken:
    """Numbers of pages, given out one after the other."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, count: int, even: bool = False) -> int:
        """The first of `count` pages that follow one another, an even number if wanted."""
        start = self.count + (self.count % 2 if even else 0)
        self.count = start + count
        return start
