"""The models that experiments/language_model.py and experiments/niah.py compare: blocks of one weight, other memories.

A name is that of a rule, of a rule with "+window" (hybrid), of an ablation (`ABLATIONS`), or of a Transformer.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

import qdelta_jax as qd
from experiments.language_training import Plan
from experiments.mqar_models import CONVOLVED, TAPS, WINDOW, state_size, weight
from experiments.outcomes import Cell
from experiments.sweeps import versions
from experiments.training_models import TRANSFORMER, count_blocks, differing, weigh
from qdelta_jax.models import ModelConfig

FEW = 2
"""Layers that are not worth a scan."""


class Ablation(NamedTuple):
    """rule: that is changed. gates: by name, what becomes of their specs. doubled: gates so marked reach 2."""

    rule: str
    gates: Mapping[str, Callable[[qd.Gate], qd.Gate]] = MappingProxyType({})
    doubled: bool = False


def averaged(gate: qd.Gate) -> qd.Gate:
    """One number for all channels of a head: the mean of the gate over them. Its projection stays as it is."""
    assert not isinstance(gate.activation, qd.Decay)
    activation = gate.activation

    def mean(x: Array) -> Array:
        y = activation(x)
        return jnp.broadcast_to(jnp.mean(y, axis=-1, keepdims=True), y.shape)

    return replace(gate, activation=mean)


def fixed(value: float) -> Callable[[qd.Gate], qd.Gate]:
    """The gate is `value`, whatever the hidden state. Its projection stays, and learns nothing."""
    return lambda gate: replace(gate, activation=lambda x: jnp.full_like(x, value))


ABLATIONS = {
    **{f"q_delta:feedback={x:g}": Ablation("q_delta", {"feedback": fixed(x)}) for x in (0.2, 0.5, 0.8, 1.0)},
    "q_delta:no_decay": Ablation("q_delta", {"log_decay": fixed(0.0)}),
    "gated_delta_net2:channel_erase": Ablation("gated_delta_net2", {"write": averaged}),
    "gated_delta_net2:channel_write": Ablation("gated_delta_net2", {"erase": averaged}),
    "gated_delta_net2:erase_to_2": Ablation("gated_delta_net2", doubled=True),
}
"""The two papers' (arXiv 2606.08804, 2605.22791). "channel_erase": the erase gate alone has channels."""


def make_config(model: str, base: ModelConfig) -> ModelConfig:
    """`base` with the memory of that name, and the `mlp_hidden` that makes its blocks weigh what those of base do.

    A rule that an ablation makes is entered into `qdelta_jax.RULES` under the ablation's name.

    Raises:
        ValueError: an unknown name.
    """
    wanted = count_blocks(base)
    # With XLA's deterministic operations (`sweeps.deterministic`) cuDNN's gradient does not compile.
    base = replace(base, attention_implementation="xla")
    if model in (TRANSFORMER, CONVOLVED):
        if model == CONVOLVED and base.layers > FEW:
            raise ValueError(f"models: got {model!r} of {base.layers} layers, want {TRANSFORMER!r} beyond {FEW} layers")
        wanted -= 3 * TAPS * base.width * base.layers if model == CONVOLVED else 0
        return weigh(replace(base, pattern=_pattern(base, "attention")), wanted)
    rule = model.removesuffix(WINDOW)
    kinds = ("rule", "window") if model.endswith(WINDOW) else ("rule",)
    changes: dict[str, Any] = {"rule": rule, "pattern": _pattern(base, *kinds)}
    if rule in ABLATIONS:
        made = ABLATIONS[rule]
        of = qd.RULES[made.rule]
        gates = {name: made.gates.get(name, lambda gate: gate)(gate) for name, gate in of.gates.items()}
        qd.RULES.setdefault(rule, replace(of, name=rule, gates=gates))
        changes["allow_negative_eigenvalues"] = made.doubled
    elif rule not in qd.RULES or ":" in rule:
        known = [TRANSFORMER, CONVOLVED, *(name for name in qd.RULES if ":" not in name), *ABLATIONS]
        raise ValueError(f"models: got {model!r}, want one of {known}, rules with {WINDOW!r} behind them, too")
    return weigh(replace(base, **changes), wanted)


def make_cell(model: str, config: ModelConfig, text: str, runs: Plan, grid: Any, **options: Any) -> Cell:
    """What the cells of a model have in common; options: that the experiment has on top of `runs` and base.

    The rates of the sweep are not among them: more of them later go on with what is stored.
    """
    parameters, block_parameters = weight(model, config)
    return {
        "model": model,
        "options": {
            **{"text": text, "length": runs.length, "rows": runs.rows, "steps": runs.steps},
            **options,
            "base": differing(grid.base),
        },
        "config": differing(config),
        "state": state_size(config, runs.length),
        "parameters": parameters,
        "block_parameters": block_parameters,
        "versions": versions(),
    }


def _pattern(base: ModelConfig, *kinds: str) -> tuple[str, ...]:
    """Longer than a model of few layers: these are its remainder, which compiles and runs faster than a scan."""
    return kinds * (FEW + 1) if base.layers <= FEW else kinds
