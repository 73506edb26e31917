"""Checkpoints: model, optimizer, step, place in the data, and what they belong to; whole or not at all."""

from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp
from flax import nnx

from qdelta_jax.models.config import ModelConfig
from qdelta_jax.models.language_model import LanguageModel
from qdelta_jax.training.config import TrainConfig
from qdelta_jax.training.train_step import TrainState
from qdelta_jax.training.vocabulary import ByteVocabulary, Vocabulary, load_vocabulary

__all__ = ["FORMAT_VERSION", "Checkpoints", "load_model"]

FORMAT_VERSION = 1
"""Of what is stored under which name; a checkpoint of another version is refused."""


class Checkpoints:
    """The checkpoints of one directory, by step.

    A checkpoint has four items: "model" (parameters and constants), "optimizer" (its state and the
    counters), "input" (the position of every process in the data) and "about" (the format version and the
    `TrainConfig`). Orbax writes into a temporary folder and renames it, so that an interrupted write leaves
    nothing that looks like a checkpoint.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        self.directory = Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, state: TrainState, data: grain.DatasetIterator, config: TrainConfig) -> None:
        """Stores everything under the state's step; does nothing when that step is stored already."""
        step = int(state.step)
        if step in self.manager.all_steps():
            return
        about = {"format_version": FORMAT_VERSION, "config": config.to_dict()}
        model, optimizer = _items(state)
        self.manager.save(
            step,
            args=ocp.args.Composite(
                model=ocp.args.StandardSave(model),
                optimizer=ocp.args.StandardSave(optimizer),
                input=grain.checkpoint.CheckpointSave(data),
                about=ocp.args.JsonSave(about),
            ),
        )

    def restore(
        self, abstract: TrainState, data: grain.DatasetIterator, config: TrainConfig, step: int | None = None
    ) -> TrainState:
        """The state of that step (the newest by default); puts `data` where it was.

        Args:
            abstract: shapes, dtypes and shardings wanted; they may lie on another mesh than the stored ones.
            data: an iterator over the same data, from `batches`.
            config: of the run that continues.
        Raises:
            ValueError: there is no such checkpoint, it is damaged, its format has another version, or it was
                made with another model, other data or another seed.
        """
        step = self._existing(step)
        _check_same(self.config(step), config, self.directory / str(step))
        model, optimizer = _items(abstract)
        stored = self._read(
            step,
            model=ocp.args.StandardRestore(model),
            optimizer=ocp.args.StandardRestore(optimizer),
            input=grain.checkpoint.CheckpointRestore(data),
        )
        return TrainState(**stored["model"], **stored["optimizer"])

    def config(self, step: int | None = None) -> TrainConfig:
        """What the checkpoint was made with.

        Raises:
            ValueError: as `restore`.
        """
        step = self._existing(step)
        about = self._read(step, about=ocp.args.JsonRestore())["about"]
        version = about.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"checkpoint {self.directory / str(step)}: format version {version}, want {FORMAT_VERSION}; "
                "continue it with the release that wrote it, or start in another directory"
            )
        return TrainConfig.from_dict(about["config"])

    def restore_model(self, abstract: dict[str, Any], step: int | None = None) -> dict[str, Any]:
        """The item "model" alone: {"params": .., "constants": ..}."""
        return self._read(self._existing(step), model=ocp.args.StandardRestore(abstract))["model"]

    def close(self) -> None:
        self.manager.close()

    def _existing(self, step: int | None) -> int:
        steps = sorted(self.manager.all_steps())
        if step is None and steps:
            return steps[-1]
        if step is None or step not in steps:
            raise ValueError(
                f"checkpoint: {self.directory} has {'the steps ' + str(steps) if steps else 'none'}, "
                f"want {'one' if step is None else step}"
            )
        return step

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # a damaged checkpoint fails in as many ways as it has parts
            raise ValueError(f"checkpoint {self.directory / str(step)} cannot be read: {error}") from error


def has_checkpoint(directory: Path) -> bool:
    """Whether the directory of a run has a whole checkpoint; creates nothing."""
    folder = directory / "checkpoints"
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


def _items(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = state._asdict()
    model = {name: parts.pop(name) for name in ("params", "constants")}
    return model, parts


COMPUTED = (
    *("implementation", "conv_implementation", "attention_implementation", "embedding_gradient"),
    *("residuals", "remat", "unroll"),
)
"""Fields of `ModelConfig` that say how a model is computed and not what: a run may go on with others, on another
machine say, though not bit for bit."""


def _check_same(stored: TrainConfig, wanted: TrainConfig, where: Path) -> None:
    """Model, data and seed decide what the arrays mean. Steps, optimizer numbers and the mesh may change, and how the
    model is computed (`COMPUTED`)."""
    differences = []
    pairs = [(name, getattr(stored, name), getattr(wanted, name)) for name in ("model", "data")]
    for name, old, new in [*pairs, ("run", {"seed": stored.run.seed}, {"seed": wanted.run.seed})]:
        old, new = (x if isinstance(x, dict) else vars(x) for x in (old, new))
        keys = [key for key in old if old[key] != new[key] and not (name == "model" and key in COMPUTED)]
        differences += [f"{name}.{key}: {old[key]!r}, now {new[key]!r}" for key in keys]
    if differences:
        raise ValueError(f"checkpoint {where} does not fit this run ({'; '.join(differences)})")


def load_model(directory: str | Path, step: int | None = None) -> tuple[LanguageModel, TrainConfig, Vocabulary | None]:
    """The model of a run's directory, with its config and its vocabulary (None for bare token ids).

    Raises:
        ValueError: there is no checkpoint, or it does not fit this release.
    """
    directory = Path(directory)
    if not (directory / "checkpoints").is_dir():
        raise ValueError(f"checkpoint: {directory} is not the directory of a run (no checkpoints/ in it)")
    checkpoints = Checkpoints(directory / "checkpoints")
    try:
        config = checkpoints.config(step)
        graph, params, constants = nnx.split(_abstract_model(config.model), nnx.Param, ...)  # type: ignore[misc]
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = {"params": nnx.to_pure_dict(params), "constants": nnx.to_pure_dict(constants)}
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), abstract)
        stored = checkpoints.restore_model(abstract, step)
    finally:
        checkpoints.close()
    model = nnx.merge(graph, stored["params"], stored["constants"])
    return model, config, stored_vocabulary(config, directory)


def _abstract_model(config: ModelConfig) -> LanguageModel:
    return nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


def stored_vocabulary(config: TrainConfig, directory: Path) -> Vocabulary | None:
    """The vocabulary that a run used."""
    if config.data.vocabulary == "none":
        return None
    if config.data.vocabulary == "bytes":
        return ByteVocabulary()
    return load_vocabulary(directory / "tokenizer.json" if config.data.vocabulary == "bpe" else config.data.vocabulary)
