"""What a training run is: a tree of frozen dataclasses, on the command line and inside every checkpoint."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qdelta_jax.checks import own_values
from qdelta_jax.models.config import ModelConfig

__all__ = ["DataConfig", "MeshConfig", "OptimizerConfig", "RunConfig", "TrainConfig"]


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, and how they are laid into rows.

    files: .txt (one document each), .jsonl (one document a line), .npy or .bin (token ids, documents apart by
        `separator`). None at all: the text that ships with the library.
    vocabulary: "bytes", "bpe" (trained on the training split and kept in the run's directory), the path of a
        tokenizer.json, or "none" for token ids whose meaning nobody needs.
    bpe_size: entries of a "bpe" vocabulary.
    text_field: the field of a .jsonl line that holds the text.
    bin_dtype: of .bin files.
    separator: the token id between the documents of .npy and .bin files, and the one that begins and ends a
        document when the vocabulary is "none".
    held_out: fraction kept for evaluation: whole documents, or the end of the text when there is only one.
    held_out_files: evaluate on these instead.
    sequence_length: tokens in a row.
    evaluation_length: tokens in a row of held-out text; `sequence_length` when 0.
    batch_size: rows in a batch, over all processes.
    """

    files: tuple[str, ...] = ()
    vocabulary: str = "bytes"
    bpe_size: int = 4096
    text_field: str = "text"
    bin_dtype: Literal["uint16", "uint32"] = "uint16"
    separator: int = 0
    held_out: float = 0.05
    held_out_files: tuple[str, ...] = ()
    sequence_length: int = 256
    evaluation_length: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "bpe_size", "sequence_length", "batch_size")
        _at_least_zero(self, "separator", "evaluation_length")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out: got {self.held_out}, want a fraction above 0 and below 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine; no weight decay on norms, biases, A_log and dt_bias.

    learning_rate: the peak, reached after `warmup_steps`.
    warmup_steps: by default 50, or a tenth of the run if that is less.
    final_fraction: of the peak, at the last step.
    clip_norm: the gradient's global norm is cut to it.
    accumulation: microbatches a batch is cut into; changes memory, not the gradient.
    loss_chunk: tokens whose logits exist at once on each device; by default as many as have 2^26 logits in all.
        Changes memory, not the gradient.
    """

    learning_rate: float = 3e-3
    warmup_steps: int | None = None
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    accumulation: int = 1
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "learning_rate", "eps", "clip_norm", "accumulation")
        _at_least_zero(self, "weight_decay")
        _finite(self, "learning_rate", "eps", "weight_decay")
        if self.warmup_steps is not None:
            _at_least_zero(self, "warmup_steps")
        if self.loss_chunk is not None:
            _positive(self, "loss_chunk")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction: got {self.final_fraction}, want 0 to 1")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, want 0 or more and below 1")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along the axes "data" and "fsdp"; one of the two may be -1: all that the other leaves.

    Rows of a batch are spread over both axes, parameters over "fsdp". Two explicit sizes may leave devices
    unused (in a run of one process).
    """

    data: int = -1
    fsdp: int = 1

    def __post_init__(self) -> None:
        _check_types(self)
        if any(n < 1 and n != -1 for n in (self.data, self.fsdp)) or self.data == self.fsdp == -1:
            raise ValueError(
                f"mesh: got data={self.data}, fsdp={self.fsdp}, want device counts, at most one of them -1"
            )


@dataclass(frozen=True)
class RunConfig:
    """How long, how often, and where.

    directory: of checkpoints/, metrics.jsonl and tensorboard/.
    seed: of the initial parameters and of the order of the data.
    resume: "auto" continues from the newest checkpoint if there is one, "must" fails without one, "never"
        fails with one.
    stop_at: end after this step (0: at `steps`), the learning-rate schedule still being that of `steps`.
    max_skipped: end with an error after this many updates in a row with a loss or gradient that is not
        finite.
    """

    directory: str = "runs/default"
    steps: int = 1000
    stop_at: int = 0
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 250
    save_every: int = 250
    keep: int = 2
    resume: Literal["auto", "must", "never"] = "auto"
    max_skipped: int = 20
    progress: bool = True
    tensorboard: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "steps", "log_every", "evaluate_every", "save_every", "keep", "max_skipped")
        _at_least_zero(self, "seed", "stop_at")
        if self.stop_at > self.steps:
            raise ValueError(f"stop_at: got {self.stop_at}, want at most steps = {self.steps}")


def _small_model() -> ModelConfig:
    return ModelConfig(
        vocab_size=257,
        width=128,
        layers=3,
        mlp_hidden=320,
        heads=2,
        key_dim=32,
        value_dim=64,
        implementation="xla",
    )


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. A field nobody knows fails, here, on the command line and in a checkpoint."""

    model: ModelConfig = field(default_factory=_small_model)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        _check_types(self)
        rows, parts = self.data.batch_size, self.optimizer.accumulation
        if rows % parts:
            raise ValueError(f"optimizer.accumulation: got {parts}, want a divisor of data.batch_size = {rows}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, all the way down.

        >>> TrainConfig.from_dict(TrainConfig().to_dict()) == TrainConfig()
        True
        """
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: part.to_dict() if isinstance(part, ModelConfig) else _plain(dataclasses.asdict(part))
            for name, part in parts.items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field that does not exist, or a value that does not fit.
        """
        parts = {
            "model": ModelConfig.from_dict,
            "data": lambda v: _build(DataConfig, "data", v),
            "optimizer": lambda v: _build(OptimizerConfig, "optimizer", v),
            "mesh": lambda v: _build(MeshConfig, "mesh", v),
            "run": lambda v: _build(RunConfig, "run", v),
        }
        _check_names("TrainConfig", values, parts)
        for name, value in values.items():
            _check_mapping(name, value)
        return cls(**{name: parts[name](value) for name, value in values.items()})


def _build(cls: type, name: str, values: dict[str, Any]) -> Any:
    _check_names(name, values, [f.name for f in dataclasses.fields(cls)])
    return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def _check_names(where: str, values: dict[str, Any], known: Any) -> None:
    _check_mapping(where, values)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown field {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _check_mapping(where: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: got {values!r}, want a dict of its fields")


def _check_types(config: Any) -> None:
    """Every field against its annotation; a whole number passes as a float, True as no number, NumPy's as Python's."""
    own_values(config)
    for name, wanted in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if wanted == tuple[str, ...] and isinstance(value, str):
            raise ValueError(f"{name}: got a string, want a tuple of paths, as in ({value!r},)")
        if not _fits(value, wanted):
            raise ValueError(f"{name}: got {value!r} ({type(value).__name__}), want {_describe(wanted)}")


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(wanted))
    if typing.get_origin(wanted) is Literal:
        return isinstance(value, str) and value in typing.get_args(wanted)
    if wanted == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    if wanted in (int, float):
        return isinstance(value, (int, wanted)) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _describe(wanted: Any) -> str:
    if isinstance(wanted, types.UnionType):
        return " or ".join(_describe(one) for one in typing.get_args(wanted))
    if typing.get_origin(wanted) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(wanted)))
    if wanted == tuple[str, ...]:
        return "a tuple of paths as strings"
    words = {int: "an integer", float: "a number", str: "a string", bool: "True or False", type(None): "None"}
    return words.get(wanted) or f"a {wanted.__name__}"


def _finite(config: Any, *names: str) -> None:
    for name in names:
        if not math.isfinite(getattr(config, name)):
            raise ValueError(f"{name}: got {getattr(config, name)}, want a finite number")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _positive(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name}: got {getattr(config, name)}, want above 0")


def _at_least_zero(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name}: got {getattr(config, name)}, want 0 or more")
