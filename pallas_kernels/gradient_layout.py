"""Which pages of shared memory hold what while the gradients of one chunk are made.

One or two warpgroups work on a chunk, each on tiles of 64 channels of its own, of the keys and then of the values. They
share what has all channels, or none: dO, U, dZ, dP and dL.
"""

from collections.abc import Mapping
from typing import Any

from pallas_kernels.layout import RESERVED, channel_gates
from pallas_kernels.linear import keeps_keys, source
from pallas_kernels.pages import PAGE, Taken, pages_of
from pallas_kernels.problem import Problem
from pallas_kernels.rule import TiledRule
from pallas_kernels.tiles import SMEM_LIMIT

ROOM = (SMEM_LIMIT - RESERVED) // PAGE


class Layout:
    """Pages by name: (first page, step), the step from tile to tile or from warpgroup to warpgroup.

    What there is one of for each warpgroup lies in blocks of pages, so that the step is the same for all: registers
    for addresses are scarce.

    Attributes:
        values: dO, U, dZ. keys: q, k, e. gates: as they came, and k where the rule makes another of it.
        state, after: S and D of 64 key and 64 value channels, for each warpgroup; then operands of one level.
        spare: two pages for each warpgroup: a float32 tile on its way out, or two parts of one in a product.
        scores: dP, dL.
        shared_spare: these are where dO and U were.
        u_low: the second part of U, which has more digits than an operand, where there is room for it; otherwise None.
        logs: log_decay as operands.
        d_decay: the gradient of log_decay, float32, for each warpgroup; lands_in_sum: log_decay lands there, and is not
            needed again.
        late: v and its gates, for each warpgroup; early: they have pages of their own and land with all else.
    """

    def __init__(
        self, problem: Problem, rule: TiledRule, dtypes: Mapping[str, Any], warpgroups: int, low: bool = False
    ) -> None:
        parts, channels = problem.numbers.parts, problem.decay == "key"
        even = parts == 2
        blocks, others = Taken(), Taken()
        self.warpgroups = warpgroups
        self.tiles = problem.key_pieces // warpgroups  # of keys, for each warpgroup

        def each(count: int, size: int, wide: bool = False) -> tuple[bool, int, int]:
            """Whether it is in the blocks, the first page there or among the others, and the step there."""
            wide |= even
            if count == warpgroups:
                return True, blocks.take(size, wide), 0
            size += size % 2 if wide else 0
            return False, others.take(count * size, wide), size

        found: dict[str, Any] = {}
        # Two pages of one block, or of all tiles of either.
        together = problem.value_pieces == warpgroups or (problem.value_pieces * parts) % 2 == 0
        self.shared_spare = channels and together and self.tiles == 1
        for name in ("d_out", "u", "d_z"):
            found[name] = each(problem.value_pieces, parts, name == "d_out" and self.shared_spare)
        late = Taken()
        sizes = {name: pages_of(dtypes[name]) for name in ("v", *channel_gates(rule, "z"))}
        offsets = {name: late.take(size, size > 1) for name, size in sizes.items()}
        wide = max(sizes.values()) > 1
        # q, k and e of one tile lie together: what is late lands there.
        names = ("q", "k", *(("e",) if problem.erases else ()))
        found["keys"] = each(problem.key_pieces, max(parts * len(names), -(-late.count // self.tiles)), wide)
        gates = (*(() if keeps_keys(rule) else ("k",)), *channel_gates(rule, "k", "e", "log_decay"))
        log_decay = source(rule, "log_decay") if channels and self.tiles == 1 else None
        log_decay = None if log_decay in channel_gates(rule, "k", "e") else log_decay
        self.lands_in_sum = log_decay is not None
        for name in gates:
            # The rule's function is evaluated again on what came.
            size = pages_of(dtypes[name])
            if name != log_decay:
                found[f"gate {name}"] = each(problem.key_pieces, size, size > 1)
        found["state"], found["after"] = each(warpgroups, parts), each(warpgroups, parts)
        if channels:
            found["logs"] = each(problem.key_pieces, parts)
            if low and blocks.count % 2:
                # Where a page would be lost to alignment.
                found["u_low"] = each(problem.value_pieces, 1)
            found["d_decay"] = each(warpgroups, 2, True)
            found.setdefault(f"gate {log_decay}", found["d_decay"])
        if not self.shared_spare:
            found["spare"] = each(warpgroups, 2, True)
        found["scores"] = each(2, parts)
        if low and "u_low" not in found:
            found["u_low"] = each(problem.value_pieces, 1)

        room = blocks.count + (blocks.count % 2 if wide else 0) + late.count
        self.early = problem.value_pieces == warpgroups and warpgroups * (room + room % 2) + others.count <= ROOM
        if self.early:
            found["late"] = each(warpgroups, late.count, wide)
        block = blocks.count + blocks.count % 2
        base = warpgroups * block
        places = {n: (first, block) if own else (base + first, step) for n, (own, first, step) in found.items()}
        self.values = {name: places[name] for name in ("d_out", "u", "d_z")}
        first, step = places["keys"]
        self.keys = {name: (first + i * parts, step) for i, name in enumerate(names)}
        self.gates = {name: places[f"gate {name}"] for name in gates}
        self.state, self.after = places["state"], places["after"]
        self.scores = places["scores"]
        self.u_low = places.get("u_low")
        if channels:
            self.logs, self.d_decay = places["logs"], places["d_decay"]
        if not self.shared_spare:
            self.spare = places["spare"]
        elif problem.value_pieces == warpgroups:
            self.spare = places["d_out"]
        else:
            self.spare = places["d_out"][0], problem.value_pieces * parts
        first, step = places["late"] if self.early else (first, step * self.tiles)
        self.late = {name: (first + offset, step) for name, offset in offsets.items()}
        self.count = base + others.count + others.count % 2


def choose(problem: Problem, rule: TiledRule, dtypes: Mapping[str, Any]) -> Layout | None:
    """What fits into shared memory, or None."""
    # The forward pass has left U with more digits.
    finer = problem.erases and problem.decay == "key" and problem.numbers.parts == 1
    for warpgroups in (2, 1):
        if problem.key_pieces in (warpgroups, warpgroups * problem.key_pieces):
            layout = Layout(problem, rule, dtypes, warpgroups)
            if layout.count <= ROOM:
                better = Layout(problem, rule, dtypes, warpgroups, low=True) if finer else layout
                return better if better.count <= ROOM and better.early == layout.early else layout
    return None
