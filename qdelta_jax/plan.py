"""How a sequence is cut into groups of chunks, and the layouts that follow from it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class ChunkOptions:
    """What is fixed at compile time."""

    scale: float
    chunk_size: int = 64
    precision: Any = None
    residuals: str = "recompute"
    group_tokens: int | None = None
    parallel_states: bool | None = None


class Plan(NamedTuple):
    """How a sequence is cut: groups of `chunks` chunks of `size` tokens; parallel: states by a tree."""

    groups: int
    chunks: int
    size: int
    parallel: bool


CPU_GROUP = 2048
OTHER_GROUP = 2**19
"""Token-heads of a group: as many as fit the caches of a CPU, or as fill an accelerator."""


def make_plan(options: ChunkOptions, batch: int, length: int, heads: int) -> Plan:
    """Cuts a sequence; on a CPU into small groups with states one after the other, else into few large ones."""
    on_cpu = jax.default_backend() == "cpu"
    size = 1 << (min(options.chunk_size, length) - 1).bit_length()
    total = -(-length // size)
    budget = options.group_tokens or (CPU_GROUP if on_cpu else OTHER_GROUP)
    groups = -(-total // max(1, budget // (batch * heads * size)))
    parallel = not on_cpu if options.parallel_states is None else options.parallel_states
    return Plan(groups, -(-total // groups), size, parallel)


def grouped(plan: Plan, x: Any) -> Any:
    """[B, T, ...] -> [groups, B, tokens of a group, ...], zeros (False) behind the end."""
    tokens = plan.chunks * plan.size

    def cut(x: Array) -> Array:
        behind = plan.groups * tokens - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, behind), *[(0, 0)] * (x.ndim - 2))) if behind else x
        return jnp.moveaxis(x.reshape(x.shape[0], plan.groups, tokens, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, x)


def ungrouped(x: Any, length: int) -> Any:
    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, x)


def grouped_states(plan: Plan, x: Array) -> Array:
    """[chunks of the sequence, ...] -> [groups, chunks of a group, ...], zeros behind the end."""
    behind = plan.groups * plan.chunks - x.shape[0]
    x = jnp.pad(x, ((0, behind), *[(0, 0)] * (x.ndim - 1))) if behind else x
    return x.reshape(plan.groups, plan.chunks, *x.shape[1:])


def split(x: Array, plan: Plan) -> Array:
    """[B, tokens of a group, H, D] -> [n, B, H, C, D]."""
    x = x.reshape(x.shape[0], plan.chunks, plan.size, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, 4)


def merge(x: Array, plan: Plan) -> Array:
    """[n, B, H, C, D] -> [B, tokens of a group, H, D]."""
    x = x.transpose(1, 0, 3, 2, 4)
    return x.reshape(x.shape[0], plan.chunks * plan.size, *x.shape[3:])
