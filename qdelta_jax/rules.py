"""The table of rules.

Every memory in this library is one recurrence,

    S_t = (I - k_t e_t^T) Diag(exp(log_decay_t)) S_{t-1} + k_t z_t^T        o_t = scale * S_t^T q_t

and a rule is one small function that says what `e`, `z` and `log_decay` are. Everything else (scan, chunked
solver, gradients, layers, tests, documentation) follows from the entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

__all__ = ["RULES", "Coefficients", "Decay", "Gate", "Rule", "get_rule", "rule"]


class Coefficients(NamedTuple):
    """What a rule makes of one token: S <- (I - k e^T) Diag(exp(log_decay)) S + k z^T.

    k:          [..., K] the key, written along.
    e:          [..., K] the erase vector, read along; None when the rule erases nothing.
    z:          [..., V] the value written.
    log_decay:  [..., 1] (one decay per head) or [..., K] (one per key channel), <= 0; None for no decay.
    """

    k: Array
    e: Array | None
    z: Array
    log_decay: Array | None


@dataclass(frozen=True)
class Decay:
    """How a layer parametrises a log-decay (`layers` builds it; `delta_rule` takes the result as a gate).

    kind: "mamba"    -exp(A_log) softplus(x + dt_bias)                        arXiv 2405.21060
          "sigmoid"  log sigmoid(x) / 16                                      arXiv 2312.06635
          "constant" log(1 - 2^(-5-h)) for head h, not learned                arXiv 2307.08621
    scales_value: the step softplus(x + dt_bias) also multiplies the value, as a discretised input does.
    """

    kind: Literal["mamba", "sigmoid", "constant"]
    scales_value: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("mamba", "sigmoid", "constant"):
            raise ValueError(f"kind: got {self.kind!r}, want 'mamba', 'sigmoid' or 'constant'")


mamba_decay = Decay("mamba")
mamba_step = Decay("mamba", scales_value=True)
sigmoid_decay = Decay("sigmoid")
constant_decay = Decay("constant")
sigmoid = jax.nn.sigmoid


@dataclass(frozen=True)
class Gate:
    """One gate of a rule: its size per head, and how a layer produces it from the hidden state.

    axis: "head" one number per head, `[B,T,H]`; "key" one per key channel, `[B,T,H,K]`; "value" one per value
        channel, `[B,T,H,V]`. A log_decay for "key" may also be given per head.
    activation: elementwise function of the projection, or a `Decay`. Its derivative at 0, where padding is projected,
        has to be finite: NaN times no gradient is NaN.
    bias: constant added before the activation.
    low_rank: the projection passes through a bottleneck of one value head's width.
    doubled: multiplied by 2 in a layer that allows negative eigenvalues.
    """

    axis: Literal["head", "key", "value"]
    activation: Callable[[Array], Array] | Decay = sigmoid
    bias: float = 0.0
    low_rank: bool = False
    doubled: bool = False

    def __post_init__(self) -> None:
        if self.axis not in ("head", "key", "value"):
            raise ValueError(f"axis: got {self.axis!r}, want 'head', 'key' or 'value'")
        if not isinstance(self.activation, Decay) and not callable(self.activation):
            raise ValueError(f"activation: got {self.activation!r}, want a function or a Decay")

    def size(self, key_dim: int, value_dim: int) -> int:
        """Numbers per head: 1, K or V."""
        return {"head": 1, "key": key_dim, "value": value_dim}[self.axis]


def per_head(activation: Callable[[Array], Array] | Decay = sigmoid, **options: Any) -> Gate:
    """One number per head, `[B,T,H]`: `Gate("head", ...)`."""
    return Gate("head", activation, **options)


def per_key_channel(activation: Callable[[Array], Array] | Decay = sigmoid, **options: Any) -> Gate:
    """One number per key channel, `[B,T,H,K]`: `Gate("key", ...)`."""
    return Gate("key", activation, **options)


def per_value_channel(activation: Callable[[Array], Array] | Decay = sigmoid, **options: Any) -> Gate:
    """One number per value channel, `[B,T,H,V]`: `Gate("value", ...)`."""
    return Gate("value", activation, **options)


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule of the recurrence: a function (q, k, v, **gates) -> Coefficients, and what a layer needs to know.

    function: pure and token-wise: q, k `[..., K]`, v `[..., V]`, each gate `[..., 1]`, `[..., K]` or `[..., V]`,
        all float32 (float64 for float64 inputs). It must not mix tokens or heads.
    gates: the gates it takes, by name.
    normalize: layers L2-normalise q and k for this rule (`delta_rule` itself never does).
    source: the paper.
    """

    name: str
    function: Callable[..., Coefficients]
    gates: Mapping[str, Gate]
    normalize: bool = True
    source: str = ""

    def __call__(self, q: Array, k: Array, v: Array, **gates: Array) -> Coefficients:
        return self.function(q, k, v, **gates)

    def __repr__(self) -> str:
        return f"Rule({self.name!r}, gates={list(self.gates)})"


def rule(*, normalize: bool = True, source: str = "", **gates: Gate) -> Callable[[Callable[..., Coefficients]], Rule]:
    """Makes a `Rule` of a function (q, k, v, *, gate, ...) -> Coefficients.

    Args:
        normalize: whether layers L2-normalise q and k for it.
        source: where it was published.
        **gates: one `Gate` for each keyword argument of the function.

    A new memory in your own file, ready for `delta_rule(..., rule=half_erase)`:

    >>> import qdelta_jax as qd
    >>> @qd.rule(beta=qd.Gate("head"), log_decay=qd.Gate("head", qd.Decay("mamba")))
    ... def half_erase(q, k, v, *, beta, log_decay):
    ...     return qd.Coefficients(k, e=0.5 * beta * k, z=beta * v, log_decay=log_decay)
    >>> half_erase
    Rule('half_erase', gates=['beta', 'log_decay'])

    Raises:
        ValueError: the function's keyword arguments are not exactly the gates.
    """

    def decorate(function: Callable[..., Coefficients]) -> Rule:
        parameters = list(signature(function).parameters.values())
        if len([p for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]) != 3:
            raise ValueError(
                f"rule {function.__name__!r}: got the parameters {[p.name for p in parameters]}, want q, k, v and then "
                "the gates as keyword-only arguments"
            )
        for name, gate in gates.items():
            if not isinstance(gate, Gate):
                raise ValueError(f"gate {name!r}: got {type(gate).__name__}, want a Gate (per_head(), ..)")
        if "log_decay" in gates and gates["log_decay"].axis == "value":
            raise ValueError("gate 'log_decay': got the axis 'value', want 'head' or 'key': keys decay, not values")
        wanted = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
        if set(wanted) != set(gates):
            raise ValueError(
                f"rule {function.__name__!r}: the function takes the gates {sorted(wanted)} as keyword-only "
                f"arguments, but @rule declares {sorted(gates)}; the two must be the same"
            )
        ordered = MappingProxyType({name: gates[name] for name in wanted})
        made = Rule(function.__name__, function, ordered, normalize, source)
        object.__setattr__(made, "__doc__", function.__doc__)
        return made

    return decorate


@rule(normalize=False, source="Katharopoulos et al. 2020, arXiv 2006.16236")
def linear_attention(q, k, v):
    """S_t = S_{t-1} + k v^T"""
    return Coefficients(k, e=None, z=v, log_decay=None)


@rule(normalize=False, source="arXiv 2307.08621", log_decay=per_head(constant_decay))
def retnet(q, k, v, *, log_decay):
    """S_t = exp(log_decay) S_{t-1} + k v^T, the decay a constant of the head"""
    return Coefficients(k, e=None, z=v, log_decay=log_decay)


@rule(normalize=False, source="arXiv 2405.21060", log_decay=per_head(mamba_step))
def mamba2(q, k, v, *, log_decay):
    """S_t = exp(log_decay) S_{t-1} + k v^T, the layer's step size folded into v"""
    return Coefficients(k, e=None, z=v, log_decay=log_decay)


@rule(normalize=False, source="arXiv 2312.06635", log_decay=per_key_channel(sigmoid_decay, low_rank=True))
def gla(q, k, v, *, log_decay):
    """S_t = Diag(exp(log_decay)) S_{t-1} + k v^T"""
    return Coefficients(k, e=None, z=v, log_decay=log_decay)


@rule(source="arXiv 2406.06484", beta=per_head(doubled=True))
def delta_net(q, k, v, *, beta):
    """S_t = (I - beta k k^T) S_{t-1} + beta k v^T"""
    return Coefficients(k, e=beta * k, z=beta * v, log_decay=None)


@rule(source="arXiv 2412.06464", beta=per_head(doubled=True), log_decay=per_head(mamba_decay))
def gated_delta_net(q, k, v, *, beta, log_decay):
    """S_t = (I - beta k k^T) exp(log_decay) S_{t-1} + beta k v^T"""
    return Coefficients(k, e=beta * k, z=beta * v, log_decay=log_decay)


@rule(
    source="arXiv 2510.26692",
    beta=per_head(doubled=True),
    log_decay=per_key_channel(mamba_decay, low_rank=True),
)
def kda(q, k, v, *, beta, log_decay):
    """S_t = (I - beta k k^T) Diag(exp(log_decay)) S_{t-1} + beta k v^T"""
    return Coefficients(k, e=beta * k, z=beta * v, log_decay=log_decay)


@rule(
    source="arXiv 2605.22791",
    erase=per_key_channel(doubled=True),
    write=per_value_channel(),
    log_decay=per_key_channel(mamba_decay, low_rank=True),
)
def gated_delta_net2(q, k, v, *, erase, write, log_decay):
    """S_t = (I - k (erase*k)^T) Diag(exp(log_decay)) S_{t-1} + k (write*v)^T"""
    return Coefficients(k, e=erase * k, z=write * v, log_decay=log_decay)


@rule(
    source="arXiv 2606.08804",
    beta=per_head(doubled=True),
    feedback=per_head(bias=-0.9, doubled=True),
    log_decay=per_head(mamba_decay),
)
def q_delta(q, k, v, *, beta, feedback, log_decay):
    """S_t = (I - beta k (k + feedback q)^T) exp(log_decay) S_{t-1} + beta k v^T"""
    return Coefficients(k, e=beta * (k + feedback * q), z=beta * v, log_decay=log_decay)


@rule(
    source="this library",
    erase=per_key_channel(doubled=True),
    write=per_value_channel(),
    feedback=per_head(bias=-0.9, doubled=True),
    log_decay=per_key_channel(mamba_decay, low_rank=True),
)
def q_delta2(q, k, v, *, erase, write, feedback, log_decay):
    """S_t = (I - k (erase*(k + feedback q))^T) Diag(exp(log_decay)) S_{t-1} + k (write*v)^T"""
    return Coefficients(k, e=erase * (k + feedback * q), z=write * v, log_decay=log_decay)


RULES: dict[str, Rule] = {
    entry.name: entry
    for entry in (
        linear_attention,
        retnet,
        mamba2,
        gla,
        delta_net,
        gated_delta_net,
        kda,
        gated_delta_net2,
        q_delta,
        q_delta2,
    )
}


def get_rule(which: str | Rule) -> Rule:
    """The rule of that name, or the rule itself.

    Raises:
        ValueError: no rule has that name.
    """
    if isinstance(which, Rule):
        return which
    if isinstance(which, str) and isinstance(RULES.get(which), Rule):
        return RULES[which]
    raise ValueError(f"rule: got {which!r}, want a Rule or one of {sorted(RULES)}")
