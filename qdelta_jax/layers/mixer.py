"""The token mixer: one layer for every rule, built from the rule's table entry."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from qdelta_jax.checks import check_count, check_state, compute_dtype, own_values
from qdelta_jax.delta_rule import delta_rule, resolve_implementation, step
from qdelta_jax.layers.convolution import ShortConvolution
from qdelta_jax.layers.gates import Gates, HeadSizes
from qdelta_jax.layers.inputs import (
    check_along,
    check_cache_batch,
    check_conv_implementation,
    check_conv_width,
    check_decay_lower_bound,
    check_dtypes,
    check_hidden,
    check_number,
)
from qdelta_jax.layers.linear import Initializer, Linear, LowRank, wider
from qdelta_jax.layers.norms import GatedRMSNorm, RMSNorm
from qdelta_jax.normalize import l2_normalize
from qdelta_jax.rules import Rule, get_rule

__all__ = ["Mixer", "MixerCache", "MixerConfig", "MixerInputs"]


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """What a `Mixer` is.

    width: hidden width.
    rule: a name in `qdelta_jax.RULES`, or a Rule.
    heads, value_heads: of q and k, and of v (a multiple; equal by default).
    key_dim, value_dim: per head.
    conv_width: taps of the short convolutions of q, k and v; 0 for none.
    conv_implementation: None, "xla" or "mosaic" (a GPU kernel), as in `ShortConvolution`.
    allow_negative_eigenvalues: doubles the gates that the rule marks so.
    decay_lower_bound: b < 0 replaces a "mamba" decay by b * sigmoid(exp(A_log) (x + dt_bias)).
    norm_eps, normalize_eps: of the output norm, and of the L2 norm of q and k.
    output_gate: "silu" or "sigmoid", of the gate on the normed output, or None for no gate.
    gate_low_rank: the output gate's projection passes through value_dim features; gate_bias: it has a bias.
    chunk_size, implementation, residuals: as in `qdelta_jax.delta_rule`.
    """

    width: int
    rule: str | Rule = "q_delta"
    heads: int
    value_heads: int | None = None
    key_dim: int
    value_dim: int
    conv_width: int = 4
    conv_implementation: str | None = None
    allow_negative_eigenvalues: bool = False
    decay_lower_bound: float | None = None
    norm_eps: float = 1e-6
    normalize_eps: float = 1e-6
    output_gate: str | None = "silu"
    gate_low_rank: bool = False
    gate_bias: bool = False
    chunk_size: int = 64
    implementation: str | None = None
    residuals: str = "recompute"

    def __post_init__(self):
        own_values(self)
        get_rule(self.rule)
        resolve_implementation(self.implementation, 1)
        for name in ("width", "heads", "key_dim", "value_dim", "chunk_size"):
            check_count(name, getattr(self, name))
        if self.value_heads is not None:
            check_count("value_heads", self.value_heads)
        check_conv_width(self.conv_width)
        check_conv_implementation(self.conv_implementation)
        for name in ("norm_eps", "normalize_eps"):
            check_number(name, getattr(self, name), positive=True)
        check_decay_lower_bound(self.decay_lower_bound)
        if self.sizes.value_heads < 1 or self.sizes.value_heads % self.heads:
            raise ValueError(f"value_heads: got {self.value_heads}, want a multiple of heads = {self.heads}")
        if self.residuals not in ("recompute", "keep"):
            raise ValueError(f"residuals: got {self.residuals!r}, want 'recompute' or 'keep'")
        if self.output_gate not in ("silu", "sigmoid", None):
            raise ValueError(f"output_gate: got {self.output_gate!r}, want 'silu', 'sigmoid' or None")

    @property
    def sizes(self) -> HeadSizes:
        value_heads = self.heads if self.value_heads is None else self.value_heads
        return HeadSizes(self.width, self.heads, value_heads, self.key_dim, self.value_dim)


class MixerCache(NamedTuple):
    """What a Mixer remembers: constant size, whatever has been read.

    state: [B, HV, K, V] float32.
    convolutions: the last conv_width - 1 inputs of the convolutions of q, k and v; empty without them.
    """

    state: Array
    convolutions: tuple[Array, ...]


class MixerInputs(NamedTuple):
    """What a Mixer gives to `qdelta_jax.delta_rule`.

    q, k: [B, T, H, K].  v: [B, T, HV, V].  gates: those of the rule, by name.
    """

    q: Array
    k: Array
    v: Array
    gates: dict[str, Array]


class Mixer(nnx.Module):
    """q, k, v = silu(conv(x W));  o = delta_rule(q, k, v, gates(x));  y = (norm(o) * act(x W_g)) W_o.

    q and k are L2-normalised per head where the rule says so.

    Args:
        config: the sizes and the rule.
        dtype: of products and results; None for the wider of the input's and the parameters'. Norms, gates
            and the state are float32 in any case.
        param_dtype: of the parameters, except A_log and dt_bias, which stay float32.
        kernel_init, conv_init: initializers of all projections and of the convolutions, as in `Linear` and
            `ShortConvolution`.
        rngs: the stream `params` is used.

    >>> import jax.numpy as jnp
    >>> config = MixerConfig(width=32, rule="q_delta", heads=2, key_dim=8, value_dim=16)
    >>> mixer = Mixer(config, rngs=nnx.Rngs(0))
    >>> y, _ = mixer(jnp.ones((1, 10, 32)))
    >>> y_1, cache = mixer(jnp.ones((1, 10, 32)), cache=mixer.init_cache(1))
    >>> y.shape, cache.state.shape
    ((1, 10, 32), (1, 2, 8, 16))

    Source: the paper of the rule (`get_rule(config.rule).source`).
    """

    def __init__(
        self,
        config: MixerConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None,
        conv_init: Initializer | None = None,
    ):
        check_dtypes(dtype, param_dtype)
        self.config, self.dtype, self.param_dtype = config, dtype, param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        dense: dict[str, Any] = {"kernel_init": kernel_init, **types}
        sizes = config.sizes
        key_width, value_width = sizes.heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        widths = {"q": key_width, "k": key_width, "v": value_width}
        norm = sizes.key_dim if get_rule(config.rule).normalize else None
        self.q_proj, self.k_proj, self.v_proj = (Linear(config.width, n, **dense) for n in widths.values())
        self.convolutions = nnx.Dict(
            {
                name: ShortConvolution(
                    n,
                    config.conv_width,
                    implementation=config.conv_implementation,
                    norm_size=None if name == "v" else norm,
                    norm_eps=config.normalize_eps,
                    kernel_init=conv_init,
                    **types,
                )
                for name, n in widths.items()
                if config.conv_width
            }
        )
        self.gates = Gates(
            get_rule(config.rule),
            sizes,
            allow_negative_eigenvalues=config.allow_negative_eigenvalues,
            decay_lower_bound=config.decay_lower_bound,
            **dense,
        )
        self.gate_proj = None
        if config.output_gate is None:
            self.norm: Any = RMSNorm(sizes.value_dim, config.norm_eps, **types)
        else:
            self.norm = GatedRMSNorm(sizes.value_dim, config.norm_eps, activation=config.output_gate, **types)
            self.gate_proj = nnx.data(
                LowRank(config.width, value_width, sizes.value_dim, use_bias=config.gate_bias, **dense)
                if config.gate_low_rank
                else Linear(config.width, value_width, use_bias=config.gate_bias, **dense)
            )
        self.out_proj = Linear(value_width, config.width, axes=("heads", "embed"), **dense)

    def init_cache(self, batch_size: int, max_length: int | None = None, dtype: Any = None) -> MixerCache:
        """A cache that has read nothing; `dtype` is of its convolution states. `max_length` is unused."""
        sizes = self.config.sizes
        state_dtype = wider(dtype or self.dtype or self.param_dtype, jnp.float32)
        state = jnp.zeros((batch_size, sizes.value_heads, sizes.key_dim, sizes.value_dim), state_dtype)
        return MixerCache(state, tuple(c.init_cache(batch_size, dtype) for c in self.convolutions.values()))

    def __call__(
        self,
        x: Any,
        *,
        segment_ids: Any = None,
        positions: Any = None,
        cache: MixerCache | None = None,
        zeros_last: bool = False,
    ) -> tuple[Float[Array, "b t width"], MixerCache | None]:
        """y [B, T, width] and the cache after the last token (None without a cache).

        Args:
            x: floating [B, T, width], any T >= 1.
            segment_ids: integers [B, T]; 0 is padding: y is 0 there, and whatever stands there, NaN included, reaches
                nothing: no token, no gradient, no cache. Another non-zero id starts afresh.
            positions: not used; the order of the tokens is their position.
            cache: to continue from; the first non-zero segment id of a row continues it. One token with a
                cache is always `qdelta_jax.step`, whatever `config.implementation` says.
            zeros_last: the caller knows that padding stands behind the tokens of its row, that x is 0 there, and that
                the gradient of y will be: nothing is moved or cleared then, and y is 0 there by itself.
        Raises:
            ValueError: an argument has another shape or dtype, or the cache is another layer's or batch size's.
        """
        x = self._checked(x, segment_ids, positions, zeros_last)
        batch, length, _ = x.shape
        if cache is not None:
            self._check_cache(cache, batch)
        inputs, kept = self._project(x, segment_ids, None if cache is None else cache.convolutions, zeros_last)
        out, state = self._recurrence(inputs, segment_ids, None if cache is None else cache.state)

        if self.gate_proj is None:
            out = self.norm(out)
        else:
            gate = self.gate_proj(x)
            out = self.norm(out, gate.reshape(out.shape))
        y = self.out_proj(out.reshape(batch, length, -1))
        if segment_ids is not None and not zeros_last:
            y = jnp.where((segment_ids != 0)[:, :, None], y, 0)
        return y, None if cache is None else MixerCache(state, kept)

    def project(self, x: Any, *, segment_ids: Any = None) -> MixerInputs:
        """q, k, v = silu(conv(x W)), normalised where the rule says so, and gates(x): what the recurrence takes.

        Args:
            x, segment_ids: as in a call without a cache.
        Raises:
            ValueError: an argument has another shape or dtype.
        """
        return self._project(self._checked(x, segment_ids, None), segment_ids, None)[0]

    def _checked(self, x: Any, segment_ids: Any, positions: Any, zeros_last: bool = False) -> Any:
        """x with zeros in its padding."""
        check_hidden(x, self.config.width)
        check_along(x.shape[:2], segment_ids, positions)
        return x if segment_ids is None or zeros_last else jnp.where((segment_ids != 0)[:, :, None], x, 0)

    def _check_cache(self, cache: Any, batch: int) -> None:
        """All of it but what the convolutions and the recurrence check of their own parts."""
        if not isinstance(cache, MixerCache):
            raise ValueError(f"cache: got {type(cache).__name__}, want a MixerCache as from init_cache")
        if not isinstance(cache.convolutions, tuple | list):
            raise ValueError(f"cache.convolutions: got {type(cache.convolutions).__name__}, want a tuple of arrays")
        got, want = len(cache.convolutions), len(self.convolutions)
        if got != want:
            raise ValueError(f"cache: got {got} convolution states, want {want} as from init_cache")
        if getattr(cache.state, "ndim", 0):
            check_cache_batch(cache.state.shape[0], batch)

    def _project(
        self, x: Any, segment_ids: Any, convolutions: tuple[Array, ...] | None, zeros_last: bool = False
    ) -> tuple[MixerInputs, tuple[Any, ...]]:
        """The inputs of the recurrence, and the convolutions' states behind them."""
        config, sizes = self.config, self.config.sizes
        convolved: list[Array] = []
        kept: list[Any] = []
        before = (None,) * 3 if convolutions is None else convolutions
        for i, (name, project) in enumerate((("q", self.q_proj), ("k", self.k_proj), ("v", self.v_proj))):
            y = project(x)
            if config.conv_width:
                options: dict[str, Any] = {"segment_ids": segment_ids, "cache": before[i], "zeros_last": zeros_last}
                y, after = self.convolutions[name](y, **options)
                kept.append(after)
            else:
                y = jax.nn.silu(y)
            heads = sizes.value_heads if name == "v" else sizes.heads
            convolved.append(y.reshape(*x.shape[:2], heads, -1))
        q, k, v = convolved

        if get_rule(config.rule).normalize and not config.conv_width:  # the convolutions have done it
            q, k = l2_normalize(q, config.normalize_eps), l2_normalize(k, config.normalize_eps)
        gates, value_scale = self.gates(x)
        if value_scale is not None:
            value_scale = value_scale.reshape(*value_scale.shape[:3], -1)
            v = (v.astype(value_scale.dtype) * value_scale).astype(v.dtype)
        return MixerInputs(q, k, v, gates), tuple(kept)

    def _recurrence(self, inputs: MixerInputs, segment_ids: Any, state: Array | None) -> tuple[Array, Array]:
        config, (q, k, v, gates) = self.config, inputs
        if state is not None:
            shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
            check_state("cache.state", state, shape, compute_dtype(q.dtype))
        if q.shape[1] == 1 and state is not None:
            q, k, v, gates = jax.tree.map(lambda a: a[:, 0], (q, k, v, gates))
            mask = None if segment_ids is None else segment_ids[:, 0] != 0
            out, state = step(state, q, k, v, rule=config.rule, gates=gates, mask=mask)
            return out[:, None], state
        options: dict[str, Any] = {
            "chunk_size": config.chunk_size,
            "implementation": config.implementation,
            "residuals": config.residuals,
        }
        return delta_rule(q, k, v, config.rule, gates, initial_state=state, segment_ids=segment_ids, **options)
