"""The conformance table (every rule on every implementation), and the inputs that tests and benchmarks share."""

from typing import NamedTuple

import numpy as np
import pytest

from qdelta_jax import RULES

RULE_NAMES = tuple(RULES)
IMPLEMENTATIONS = ("scan", "xla")

STRUCTURES = ("linear_attention", "mamba2", "gla", "delta_net", "q_delta", "q_delta2")
"""One rule for each way through the chunked solver: with and without e, no decay, one per head, one per channel."""

CORE = ("linear_attention", "q_delta", "q_delta2")
"""The rules whose tests carry the mark `core`."""


def _marked(name: str, *others):
    return pytest.param(name, *others, marks=[pytest.mark.core] if name in CORE else [])


CONFORMANCE = [_marked(name, implementation) for name in RULE_NAMES for implementation in IMPLEMENTATIONS]

conformance = pytest.mark.parametrize(("name", "implementation"), CONFORMANCE)
FEWER = [x for x in CONFORMANCE if x.values[1] != "scan" or x.values[0] in CORE]
"""For what the token-by-token form does alike for every rule."""
every_rule = pytest.mark.parametrize("name", [_marked(name) for name in RULE_NAMES])
every_structure = pytest.mark.parametrize("name", [_marked(name) for name in STRUCTURES])
every_core_rule = pytest.mark.parametrize("name", [_marked(name) for name in CORE])
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


class Shape(NamedTuple):
    """Sizes of one call of `delta_rule`."""

    batch: int
    length: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int


SMALL = Shape(4, 40, 1, 2, 8, 6)
"""Most tests: three chunks of 16, the last one not full, grouped values, K != V."""

CHUNK = 16
"""The chunk size that goes with SMALL."""

SHAPES = {
    "one token": Shape(2, 1, 2, 2, 8, 8),
    "odd": Shape(1, 65, 2, 4, 12, 5),
    "benchmark": Shape(1, 4096, 4, 4, 64, 64),
    "long": Shape(1, 32768, 16, 16, 128, 128),
}

KERNEL_SHAPES = {
    f"{batch}x{length}x{heads}": Shape(batch, length, heads, heads, 128, 128)
    for batch, length, heads in ((8, 4096, 16), (1, 32768, 16), (1, 8192, 96), (4, 4096, 16), (1, 4096, 8))
}
"""What the GPU kernels are timed on: a batch, a long sequence, many heads, and two that fill a GPU less."""


def gate_shape(name: str, gate: str, shape: Shape) -> tuple[int, ...]:
    axis = RULES[name].gates[gate].axis
    last = {"head": (), "key": (shape.key_dim,), "value": (shape.value_dim,)}[axis]
    return (shape.batch, shape.length, shape.value_heads, *last)


def make_inputs(name: str, shape: Shape = SMALL, seed: int = 0) -> dict:
    """Arguments of `delta_rule` as float64 arrays whose numbers are exact in float32; keys have unit norm."""
    random = np.random.default_rng([seed, sum(map(ord, name))])
    batch, length, heads, value_heads, key_dim, value_dim = shape
    q, k = (random.normal(size=(batch, length, heads, key_dim)) for _ in range(2))
    inputs = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.normal(size=(batch, length, value_heads, value_dim)),
        "gates": {gate: make_gate(random, gate, gate_shape(name, gate, shape)) for gate in RULES[name].gates},
        "initial_state": random.normal(size=(batch, value_heads, key_dim, value_dim)),
    }
    return round_to(inputs, np.float32)


def make_gate(random: np.random.Generator, gate: str, size: tuple[int, ...]) -> np.ndarray:
    """log_decay between -1.5 and 0, every other gate between 0 and 1."""
    x = random.uniform(size=size)
    return -1.5 * x**3 if gate == "log_decay" else x


def make_cotangents(shape: Shape = SMALL, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Gradients that arrive at the output and at the final state."""
    random = np.random.default_rng(seed)
    batch, length, _, value_heads, key_dim, value_dim = shape
    out = random.normal(size=(batch, length, value_heads, value_dim))
    state = random.normal(size=(batch, value_heads, key_dim, value_dim))
    return tuple(round_to([out, state], np.float32))


def round_to(tree, dtype):
    """The same float64 numbers, rounded to what dtype can hold."""
    if isinstance(tree, dict):
        return {name: round_to(x, dtype) for name, x in tree.items()}
    if isinstance(tree, list):
        return [round_to(x, dtype) for x in tree]
    return tree.astype(dtype).astype(np.float64)
