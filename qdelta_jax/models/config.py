"""What a language model is, as one value that can be stored beside its parameters."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from qdelta_jax.checks import check_count, own_values
from qdelta_jax.delta_rule import resolve_implementation
from qdelta_jax.layers.attention import AttentionConfig
from qdelta_jax.layers.embedding import GRADIENTS
from qdelta_jax.layers.inputs import check_conv_implementation, check_conv_width, check_decay_lower_bound, check_number
from qdelta_jax.layers.mixer import MixerConfig
from qdelta_jax.rules import get_rule

__all__ = ["KINDS", "REMAT", "ModelConfig"]

KINDS = ("rule", "attention", "window")
"""What a layer of a pattern may be."""

REMAT = ("none", "full", "activations", "dots", "delta_rule_states")
"""What a cell keeps for the gradient: everything; its input alone; its matrix products and what it holds in its dtype
between two of them (norms, convolutions, normalised keys, gated values: 1.7 times the memory of "dots" at 1.3 billion
parameters); its matrix products; its chunk states."""

COUNTS = (
    *("vocab_size", "width", "layers", "mlp_hidden", "heads", "key_dim", "value_dim"),
    *("chunk_size", "attention_heads", "window", "unroll"),
)
"""Fields that are integers of at least 1."""

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A stack of `layers` blocks, their token mixers following `pattern` over and over.

    vocab_size: tokens are 0 .. vocab_size - 1.
    width: of the hidden state.
    layers: blocks in all; what a whole number of patterns leaves over follows as the start of one more.
    pattern: the repeating cell, of "rule" (a delta rule), "attention" (all of the segment) and "window".
    rule: a name in `qdelta_jax.RULES` (a rule of your own is one entry more in that dict).
    heads, value_heads, key_dim, value_dim: of the rule's memory; value_heads is `heads` by default.
    conv_width, conv_implementation, allow_negative_eigenvalues, decay_lower_bound, chunk_size, implementation,
        residuals: as in `MixerConfig`.
    output_gate, gate_low_rank, gate_bias: of the rule's output, as in `MixerConfig`.
    attention_heads, kv_heads, attention_dim: of attention; `attention_dim` channels a head, by default
        width / attention_heads.
    window, rope_theta, qk_norm, attention_implementation: as in `AttentionConfig`.
    mlp_hidden: of the SwiGLU.
    tie_embeddings: the output layer is the embedding, transposed.
    init_gain: None for LeCun normal projections, else Xavier uniform with this gain.
    norm_eps: of every RMSNorm.
    dtype, param_dtype: of the computation and of the parameters.
    embedding_gradient: "scatter", or "product": the same numbers in every run on a GPU, for a vocabulary of up to some
        ten thousand tokens; see `qdelta_jax.layers.embedding.lookup`.
    remat: what is kept for the gradient, one of `REMAT`.
    unroll: how many patterns one turn of the scan over layers takes. As many as there are: no scan, and nothing is
        copied into and out of stacked arrays, but the program and the time to compile it grow with depth.

    >>> config = ModelConfig(vocab_size=256, width=32, layers=2, mlp_hidden=64, key_dim=16, value_dim=16)
    >>> ModelConfig.from_dict(config.to_dict()) == config
    True
    """

    vocab_size: int
    width: int
    layers: int
    mlp_hidden: int
    pattern: tuple[str, ...] = ("rule",)
    rule: str = "q_delta"
    heads: int = 4
    value_heads: int | None = None
    key_dim: int = 64
    value_dim: int = 64
    conv_width: int = 4
    conv_implementation: str | None = None
    allow_negative_eigenvalues: bool = False
    decay_lower_bound: float | None = None
    chunk_size: int = 64
    implementation: str | None = None
    residuals: str = "recompute"
    output_gate: str | None = "silu"
    gate_low_rank: bool = False
    gate_bias: bool = False
    attention_heads: int = 4
    kv_heads: int | None = None
    attention_dim: int | None = None
    window: int = 2048
    rope_theta: float = 10000.0
    qk_norm: bool = False
    attention_implementation: str | None = None
    tie_embeddings: bool = False
    init_gain: float | None = None
    norm_eps: float = 1e-6
    dtype: str = "float32"
    param_dtype: str = "float32"
    embedding_gradient: str = "scatter"
    remat: str = "none"
    unroll: int = 1

    def __post_init__(self) -> None:
        own_values(self)
        for name in COUNTS:
            check_count(name, getattr(self, name))
        for name in ("value_heads", "kv_heads", "attention_dim"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_conv_width(self.conv_width)
        check_conv_implementation(self.conv_implementation)
        for name in ("rope_theta", "norm_eps"):
            check_number(name, getattr(self, name), positive=True)
        if self.init_gain is not None:
            check_number("init_gain", self.init_gain, "a finite number, or None")
        check_decay_lower_bound(self.decay_lower_bound)
        if not isinstance(self.pattern, tuple) or not self.pattern or any(kind not in KINDS for kind in self.pattern):
            raise ValueError(f"pattern: got {self.pattern}, want a tuple of one or more of {KINDS}")
        for name, choices in (
            ("dtype", DTYPES),
            ("param_dtype", DTYPES),
            ("remat", REMAT),
            ("embedding_gradient", GRADIENTS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, want one of {choices}")
        if not isinstance(self.rule, str):
            raise ValueError(f"rule: got {self.rule!r}, want the name of a rule (the configuration is stored as JSON)")
        get_rule(self.rule)
        resolve_implementation(self.implementation, 1)
        for kind in set(self.pattern):
            self.mixer(kind)

    @property
    def cells(self) -> int:
        """How often the whole pattern repeats."""
        return self.layers // len(self.pattern)

    @property
    def remainder(self) -> tuple[str, ...]:
        """The layers behind the last whole pattern."""
        return self.pattern[: self.layers % len(self.pattern)]

    def mixer(self, kind: str) -> MixerConfig | AttentionConfig:
        """The configuration of a layer of that kind, one of `KINDS`."""
        if kind == "rule":
            names = {f.name for f in fields(MixerConfig)} & {f.name for f in fields(self)}
            return MixerConfig(**{name: getattr(self, name) for name in names})
        head_dim = self.attention_dim
        if head_dim is None:
            if self.width % self.attention_heads:
                raise ValueError(
                    f"attention_heads: got {self.attention_heads}, want a divisor of width {self.width} "
                    "(or set attention_dim)"
                )
            head_dim = self.width // self.attention_heads
        return AttentionConfig(
            self.width,
            self.attention_heads,
            head_dim,
            kv_heads=self.kv_heads,
            window=self.window if kind == "window" else None,
            rope_theta=self.rope_theta,
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
            implementation=self.attention_implementation,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "pattern": list(self.pattern)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`. Fields that are left out take their defaults.

        Raises:
            ValueError: a field that does not exist, or is missing and has no default, or a bad value.
        """
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"ModelConfig: unknown fields {unknown}; it has {sorted(names)}")
        try:
            return cls(**{**values, **({"pattern": tuple(values["pattern"])} if "pattern" in values else {})})
        except TypeError as error:
            raise ValueError(f"ModelConfig: {error}") from None
