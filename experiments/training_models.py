"""The models whose training steps experiments/bench_training.py times, and what a step computes."""

from dataclasses import replace
from functools import cache
from math import gcd
from typing import Any

import jax.numpy as jnp

import qdelta_jax as qd
from qdelta_jax.models import ModelConfig, count_parameters, named

TRANSFORMER = "transformer"
"""The name of the model without a rule; all others are those of their rules."""

FAMILIES = ("q_delta", "gated_delta_net2")
"""Of `qdelta_jax.models.SIZES`: 340m and 1.3b each."""

TINY = ModelConfig(
    vocab_size=64,
    width=16,
    layers=1,
    mlp_hidden=24,
    heads=2,
    key_dim=8,
    value_dim=8,
    attention_heads=2,
    dtype="bfloat16",
)
"""For a CPU, compiled in seconds: both families' "tiny"."""

SIZES = ("tiny", "340m", "1.3b")

OUTPUT_GATES: dict[str, dict[str, Any]] = {
    "gated_delta_net": {"output_gate": "silu", "gate_low_rank": False, "gate_bias": False},
    "kda": {"output_gate": "sigmoid", "gate_low_rank": True, "gate_bias": True},
}
"""As the peer's layers have them, which offer no choice; the other rules have their family's."""


@cache
def make_config(model: str, size: str, family: str | None = None) -> ModelConfig:
    """The library's preset of that size with another rule, or with attention alone.

    Args:
        family: one of `FAMILIES`; by default "q_delta" for rules with numbers per head alone (heads of 128 x 256, and
            of 256 x 512 at 1.3b, which are beyond the GPU kernels), and "gated_delta_net2" (heads of 128 x 128) for
            those with a gate per channel and for the Transformer: cuDNN's attention takes no heads beyond 128.

    The hidden width of the feed-forward layers changes, in steps of 64, so that the blocks weigh what the preset's do
    (those of the two families differ by 0.5% at 340m, by 4% at 1.3b).

    Raises:
        ValueError: an unknown name.
    """
    if model != TRANSFORMER:
        qd.get_rule(model)
    for name, value, known in (("size", size, SIZES), ("family", family, (None, *FAMILIES))):
        if value not in known:
            raise ValueError(f"{name}: got {value!r}, want one of {known}")
    preset = TINY if size == "tiny" else named(f"{family or default_family(model)}_{size}")
    changes = {"pattern": ("attention",)} if model == TRANSFORMER else {"rule": model, **OUTPUT_GATES.get(model, {})}
    return weigh(replace(preset, **changes), count_blocks(preset))


def default_family(model: str) -> str:
    per_head = model != TRANSFORMER and all(gate.axis == "head" for gate in qd.RULES[model].gates.values())
    return FAMILIES[0] if per_head else FAMILIES[1]


def weigh(config: ModelConfig, wanted: int) -> ModelConfig:
    """With the `mlp_hidden` that brings the parameters of the blocks nearest to `wanted`."""
    step = gcd(64, config.mlp_hidden)
    missing = wanted - count_blocks(config)
    steps = round(missing / (3 * config.width * config.layers * step))
    return replace(config, mlp_hidden=config.mlp_hidden + step * steps)


@cache
def count_blocks(config: ModelConfig) -> int:
    return count_parameters(config, blocks_only=True)


def differing(config: ModelConfig) -> dict[str, Any]:
    """The fields that are not a plain model's: what a result file says of a model."""
    plain = ModelConfig(vocab_size=1, width=4, layers=1, mlp_hidden=1).to_dict()
    return {name: x for name, x in config.to_dict().items() if x != plain[name]}


def step_flops(config: ModelConfig, length: int, tokens: int) -> dict[str, float]:
    """Floating-point operations that one training step of a model needs, by part; a multiplication and an addition
    are two.

    Backward counts twice forward. What an implementation computes again (remat) or on top (chunks, masked halves)
    isn't counted, nor are elementwise operations, decays among them, and the optimizer.

    parameters: 6 * N * tokens. N: all parameters but the embedding's, the output layer (tied or not) included.
    attention: 12 * heads * head_dim * keys * tokens for each layer, of which scores and their product with the values
        are a half each. keys: that a query sees on average, length / 2 since they are causal (with a window w < length
        it is w - w^2 / (2 length)).
    recurrence: token by token as the equation says it, 6 K V for each layer, value head, token and product: the state
        is written along k and read along q, and where the rule erases it is read along e, too: 12 K V or 18 K V.
    """
    weights = count_blocks(config) + config.width * (1 + config.vocab_size)
    found = {"parameters": 6.0 * weights * tokens, "attention": 0.0, "recurrence": 0.0}
    for layer in range(config.layers):
        kind = config.pattern[layer % len(config.pattern)]
        mixer: Any = config.mixer(kind)
        if kind == "rule":
            per_head = 6 * (3 if erases(config.rule) else 2) * mixer.key_dim * mixer.value_dim
            found["recurrence"] += per_head * mixer.sizes.value_heads * tokens
        else:
            window = min(mixer.window or length, length)
            keys = window - window**2 / (2 * length)
            found["attention"] += 12 * mixer.heads * mixer.head_dim * keys * tokens
    return {**found, "total": sum(found.values())}


def erases(rule: str) -> bool:
    """Whether the state is multiplied by more than a decay."""
    one = jnp.ones(1)
    which = qd.RULES[rule]
    return which.function(one, one, one, **dict.fromkeys(which.gates, one)).e is not None
