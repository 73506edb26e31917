"""The gates of a rule as a layer makes them from the hidden state: projections in, float32 gates out.

A rule's table entry says everything: which gates it takes, their size per head, how they are activated
(`qdelta_jax.Gate`, `qdelta_jax.Decay`). "head" gates have one number for each value head, "key" gates one for
each channel of each key head, "value" gates one for each channel of each value head.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from qdelta_jax.layers.linear import Initializer, Linear, LowRank, project_together, wider
from qdelta_jax.layers.partitioning import partitioned
from qdelta_jax.rules import Decay, Gate, Rule

__all__ = ["GateProjection", "Gates", "HeadSizes", "MambaDecay"]

STEP_RANGE = (1e-3, 1e-1)
"""Range of the first steps softplus(dt_bias)."""

RATE_RANGE = (1.0, 16.0)
"""Range of the first decay rates exp(A_log): inside (0, 16], and far enough from 0 that A_log is finite."""


class HeadSizes(NamedTuple):
    """What gates are made for: the hidden width, key heads, value heads, key and value channels per head."""

    width: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def of(self, gate: Gate) -> tuple[int, int]:
        """Heads of a gate, and its numbers per head."""
        heads = self.heads if gate.axis == "key" else self.value_heads
        return heads, gate.size(self.key_dim, self.value_dim)


def sample_log_rate(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """A_log = log A with A uniform in RATE_RANGE."""
    return jnp.log(jax.random.uniform(key, shape, dtype, *RATE_RANGE))


def sample_step_bias(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """dt_bias = inverse softplus of a step that is log-uniform in STEP_RANGE."""
    low, high = map(math.log, STEP_RANGE)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return step + jnp.log(-jnp.expm1(-step))


class MambaDecay(nnx.Module):
    """log_decay = -exp(A_log) softplus(x + dt_bias), or lower_bound * sigmoid(exp(A_log) (x + dt_bias)).

    The second form, with lower_bound < 0, keeps every decay in [exp(lower_bound), 1].

    Args:
        heads, size: x is [.., heads, size], A_log [heads] and dt_bias [heads * size], both float32 or wider.
        lower_bound: None for the first form.
        param_dtype: float64 makes the two parameters float64.
        rngs: the stream `params` is used.
    Raises:
        ValueError: lower_bound is not negative.

    Source: arXiv 2405.21060; per key channel arXiv 2510.26692.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        lower_bound: float | None = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if lower_bound is not None and not -math.inf < lower_bound < 0:
            raise ValueError(f"decay_lower_bound: got {lower_bound}, want a negative number or None")
        self.lower_bound = lower_bound
        # In bfloat16 an A_log near 0 and small steps would lose what distinguishes the heads.
        dtype = wider(param_dtype, jnp.float32)
        self.A_log = nnx.Param(partitioned(sample_log_rate, ("heads",))(rngs.params(), (heads,), dtype))
        self.dt_bias = nnx.Param(partitioned(sample_step_bias, ("heads",))(rngs.params(), (heads * size,), dtype))

    def __call__(
        self, x: Float[Array, "*lead heads size"]
    ) -> tuple[Float[Array, "*lead heads size"], Float[Array, "*lead heads size"]]:
        """log_decay, and the step softplus(x + dt_bias) that a discretised input is multiplied by."""
        bias = self.dt_bias.get_value().astype(x.dtype).reshape(x.shape[-2:])
        rate = jnp.broadcast_to(jnp.exp(self.A_log.get_value().astype(x.dtype))[:, None], x.shape)
        x = x + jnp.broadcast_to(bias, x.shape)
        step = jax.nn.softplus(x)
        if self.lower_bound is None:
            return -rate * step, step
        return self.lower_bound * jax.nn.sigmoid(rate * x), step


class GateProjection(nnx.Module):
    """One gate: activation(x projection + bias); twice that if it is marked `doubled` and the layer asks.

    Args:
        gate: the rule's entry.
        sizes: of the layer.
        allow_negative_eigenvalues: multiplies gates marked `doubled` by 2.
        decay_lower_bound: for a "mamba" decay, see `MambaDecay`.
        kernel_init, dtype, param_dtype: of the projections, as in `Linear`.
        rngs: the stream `params` is used.
    """

    def __init__(
        self,
        gate: Gate,
        sizes: HeadSizes,
        *,
        allow_negative_eigenvalues: bool = False,
        decay_lower_bound: float | None = None,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.gate, self.sizes = gate, sizes
        self.factor = 2.0 if allow_negative_eigenvalues and gate.doubled else 1.0
        heads, size = sizes.of(gate)
        kind = gate.activation.kind if isinstance(gate.activation, Decay) else None
        self.projection = self.decay = None
        if kind == "constant":
            return
        # A sigmoid decay has no dt_bias, so its projection has the bias.
        options: dict[str, Any] = {
            "use_bias": kind == "sigmoid",
            "kernel_init": kernel_init,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.projection = nnx.data(
            LowRank(sizes.width, heads * size, sizes.value_dim, **options)
            if gate.low_rank
            else Linear(sizes.width, heads * size, **options)
        )
        if kind == "mamba":
            self.decay = nnx.data(
                MambaDecay(heads, size, lower_bound=decay_lower_bound, param_dtype=param_dtype, rngs=rngs)
            )

    def __call__(
        self, x: Float[Array, "b t width"], projected: Float[Array, "b t channels"] | None = None
    ) -> tuple[Array, Array | None]:
        """The gate, [B, T, heads] or [B, T, heads, size], and for a "mamba" decay its step (else None).

        projected: x's projection, if it is there already.
        """
        heads, size = self.sizes.of(self.gate)
        shape = (*x.shape[:2], heads) if self.gate.axis == "head" else (*x.shape[:2], heads, size)
        dtype = wider(x.dtype, jnp.float32)
        if self.projection is None:
            return jnp.broadcast_to(_constant_decay(heads, len(shape), dtype), shape), None
        projected = self.projection(x, out_dtype=dtype) if projected is None else projected
        y = projected.reshape(*x.shape[:2], heads, size)
        y = y + self.gate.bias if self.gate.bias else y
        step = None
        if self.decay is not None:
            y, step = self.decay(y)
            step = step.reshape(shape)
        elif isinstance(self.gate.activation, Decay):
            y = jax.nn.log_sigmoid(y) / 16
        else:
            y = self.gate.activation(y)
        return (self.factor * y).reshape(shape), step


def _constant_decay(heads: int, rank: int, dtype: Any) -> Array:
    """log(1 - 2^(-5-h)) for head h, with two axes before the head axis and `rank` in all."""
    value = np.log1p(-(2.0 ** (-5.0 - np.arange(heads))))
    return jnp.asarray(value, dtype).reshape(1, 1, heads, *[1] * (rank - 3))


class Gates(nnx.Module):
    """Every gate of a rule, by name.

    Args:
        rule: whose gates.
        sizes: of the layer.
        decay_lower_bound: see `MambaDecay`; the rule must have a "mamba" decay that does not scale the value.
        options: as in `GateProjection`.
        rngs: the stream `params` is used.
    Raises:
        ValueError: decay_lower_bound for a rule without such a decay; a step per key channel that should
            scale the value.
    """

    def __init__(
        self,
        rule: Rule,
        sizes: HeadSizes,
        *,
        decay_lower_bound: float | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        decays = {name: g.activation for name, g in rule.gates.items() if isinstance(g.activation, Decay)}
        bounded = [name for name, decay in decays.items() if decay == Decay("mamba")]
        if decay_lower_bound is not None and not bounded:
            raise ValueError(f"decay_lower_bound: rule {rule.name!r} has no Decay('mamba') gate to bound; want None")
        for name, decay in decays.items():
            if decay.scales_value and rule.gates[name].axis == "key":
                raise ValueError(
                    f"rule {rule.name!r}: the step of gate {name!r} scales the value, so the gate must be "
                    "per head or per value channel; it is per key channel"
                )
        self.scales_value = tuple(name for name, decay in decays.items() if decay.scales_value)
        self.projections = nnx.Dict(
            {
                name: GateProjection(
                    gate,
                    sizes,
                    decay_lower_bound=decay_lower_bound if name in bounded else None,
                    rngs=rngs,
                    **options,
                )
                for name, gate in rule.gates.items()
            }
        )

    def __call__(self, x: Float[Array, "b t width"]) -> tuple[dict[str, Array], Array | None]:
        """The gates for `delta_rule`, and what multiplies the value: [B, T, HV], [B, T, HV, V] or None."""
        together = self._together(x)
        made = {name: projection(x, together.get(name)) for name, projection in self.projections.items()}
        scale = None
        for step in (made[name][1] for name in self.scales_value):
            scale = step if scale is None or step is None else scale * step
        return {name: gate for name, (gate, _) in made.items()}, scale

    def _together(self, x: Array) -> dict[str, Array]:
        """The projections to one number per head, by name, as one product where there are several: their gradient is
        one product, too, and not a sum of several as wide as x."""
        found = {name: made.projection for name, made in self.projections.items() if made.gate.axis == "head"}
        small = {name: layer for name, layer in found.items() if type(layer) is Linear and layer.bias is None}
        # A layer that somebody has put here may compute in another precision.
        kinds = {name: (layer.dtype, layer.kernel.get_value().dtype) for name, layer in small.items()}
        small = {name: layer for name, layer in small.items() if kinds[name] == next(iter(kinds.values()))}
        if len(small) < 2:
            return {}
        made = project_together(x, tuple(small.values()), out_dtype=wider(x.dtype, jnp.float32))
        return dict(zip(small, made, strict=True))
