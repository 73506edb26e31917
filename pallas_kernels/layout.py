"""Which pages of shared memory hold what while a chunk is prepared, for one worker.

q, k, e     one operand for each piece of 64 key channels: q, k and the first gate of e land there, become operands,
            and end as Q, K and Y; e only where `prepare` makes Y
scratch     with a decay per channel, log_decay and the scaled keys of one level, for each piece; then the operands of
            the inverse, and P
a           the inverse, on its way to device memory: where nothing else lands meanwhile, or in a page of its own
landing     further gates
"""

from collections.abc import Mapping
from typing import Any

from pallas_kernels.pages import PAGE, Taken, pages_of
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.scores import selections
from pallas_kernels.tiles import SMEM_LIMIT

RESERVED = 2048
"""Bytes of shared memory left to barriers and to the compiler's reductions."""


def channel_gates(rule: TiledRule, *outputs: str) -> list[str]:
    """The gates with one number per channel that some outputs read."""
    names = [n for o in outputs for n in rule.arguments.get(o, ()) if n not in ("q", "k", "v")]
    return [n for n in dict.fromkeys(names) if rule.axis[n] != "head"]


def head_gates(rule: TiledRule, *outputs: str) -> list[str]:
    names = [n for o in outputs for n in rule.arguments.get(o, ()) if rule.axis[n] == "head"]
    return list(dict.fromkeys(names))


class Layout:
    """Pages by number. What has a step repeats for each piece, that many pages further on."""

    def __init__(self, problem: Problem, rule: TiledRule, dtypes: Mapping[str, Any]) -> None:
        parts, pieces = problem.numbers.parts, problem.key_pieces
        each = parts * pieces
        channels = problem.decay == "key"
        made = problem.erases and not problem.direct
        taken = Taken()
        self.step = parts
        self.q, self.k = taken.take(each), taken.take(each)
        self.e = taken.take(each) if made else None
        # log_decay lands as float32 in two pages and stays as an operand in the first; one level's keys lie behind.
        self.scratch_step = 2 * parts
        size = max(2, pieces) * self.scratch_step if channels else 4 * parts
        self.scratch = taken.take(size, even=channels or parts == 2)
        self.ones = self.scratch + parts
        # The operands of the inverse, and P in what is left.
        self.x, self.l, self.lx, self.p = (self.scratch + i * parts for i in (0, 1, 2, 3))
        # name -> (first page, step)
        self.keys: dict[str, tuple[Any, int]] = {"q": (self.q, parts), "k": (self.k, parts)}
        own = made and problem.terms is None
        for index, name in enumerate(channel_gates(rule, "k", *(("e",) if own else ()))):
            size = pages_of(dtypes[name])
            shared = index == 0 and own and size <= parts
            self.keys[name] = (self.e, parts) if shared else (taken.take(size * pieces, size > 1), size)
        self.decay: dict[str, tuple[int, int]] = {}
        if channels:
            for index, name in enumerate(channel_gates(rule, "log_decay")):
                size = pages_of(dtypes[name])
                place = (self.scratch, self.scratch_step) if index == 0 else (taken.take(size * pieces, True), size)
                self.decay[name] = place
        # Nothing lands where Y was unless e does: the inverse may lie there while the next chunk lands.
        self.a = self.x if problem.direct else None if own else self.e
        self.extra = parts if own else 0
        # Tiles of 32 bits begin at even pages, for every worker.
        self.wide = channels or parts == 2 or any(pages_of(dtypes[n]) > 1 for n in self.keys)
        self.pages = taken.count + (taken.count % 2 if self.wide else 0)  # without the extra ones
        # The matrices that sum log_decay lie in shared memory, for all workers, where there is room.
        self.selections = len(selections(parts)) if channels else 0
        if self._workers() == 0:
            self.selections = 0
        self.workers = self._workers()

    def _workers(self) -> int:
        """Chunks that one multiprocessor works on at once; more would leave each too few registers."""
        free = SMEM_LIMIT - RESERVED - self.selections * PAGE
        return min(3, free // ((self.pages + self.extra) * PAGE))
