"""One update: loss over a packed batch, gradient, optimizer, and a guard against what is not finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from qdelta_jax.checks import check_count
from qdelta_jax.layers.partitioning import shardings
from qdelta_jax.models.language_model import LanguageModel
from qdelta_jax.training.config import MeshConfig
from qdelta_jax.training.cross_entropy import summed_cross_entropy
from qdelta_jax.training.data import Batch

__all__ = ["Learner", "TrainState", "make_mesh", "shard_batch"]


class TrainState(NamedTuple):
    """Everything a run is made of, save its place in the data.

    params: float32, a nested dict by name.
    constants: the model's variables that are not learned.
    step, skipped, skipped_in_a_row: int32 counts of all updates, of those left out, and of these of late.
    """

    params: Any
    constants: Any
    opt_state: Any
    step: Any
    skipped: Any
    skipped_in_a_row: Any


class Metrics(NamedTuple):
    """loss: nats per token of the batch. gradient_norm: before clipping. tokens: predicted ones, or their weight."""

    loss: Array
    gradient_norm: Array
    tokens: Array
    skipped: Array
    skipped_in_a_row: Array


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh of axes ("data", "fsdp"); over one device it is the trivial mesh.

    Raises:
        ValueError: there are not that many devices, or a -1 would leave some of them unused.
    """
    devices = jax.devices()
    count = len(devices)
    data = count // config.fsdp if config.data == -1 else config.data
    fsdp = count // config.data if config.fsdp == -1 else config.fsdp
    all_of_them = -1 in (config.data, config.fsdp) or jax.process_count() > 1
    if not 0 < data * fsdp <= count or (all_of_them and data * fsdp != count):
        raise ValueError(f"mesh: got data={config.data}, fsdp={config.fsdp}, want a product of {count} (devices)")
    return jax.make_mesh(
        (data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices[: data * fsdp]
    )


def shard_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This process's rows as global arrays, spread over both axes of the mesh.

    Raises:
        ValueError: the rows of all processes together cannot be shared equally by the devices.
    """
    rows = len(batch.tokens) * jax.process_count()
    if rows % mesh.size:
        raise ValueError(f"data.batch_size: got {rows}, want a multiple of the {mesh.size} devices")
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    # A batch without weights has none afterwards.
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(x)), batch)


class Learner:
    """A model and an optimizer as pure functions of a `TrainState`, compiled for a mesh.

    Args:
        build: makes the model, an `nnx.Module` called as model(tokens, segment_ids=..) -> logits.
        optimizer: any optax transformation of the gradient.
        mesh: from `make_mesh`.
        accumulation: microbatches that a batch is cut into.
        loss_chunk: tokens whose logits exist at once on each device; by default `summed_cross_entropy` chooses.

    The loss of a `LanguageModel` comes from its `features` and `readout`, through `summed_cross_entropy`, and the
    logits of a batch never exist. Any other module, and a LanguageModel whose `readout` is None, is called, and
    the loss is taken from all of its logits at once, in float32.

    init(seed) -> TrainState, update(state, batch) -> (TrainState, Metrics), which donates the state that it
    is given, and evaluate(state, batch) -> (summed loss, tokens) are compiled; use them inside
    `jax.set_mesh(mesh)`. init compiles for each seed; `start` is what it compiles, and takes a traced key, too.

    Raises:
        ValueError: accumulation or loss_chunk is not an integer of at least 1.
    """

    graph: Any

    def __init__(
        self,
        build: Callable[[nnx.Rngs], nnx.Module],
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        accumulation: int = 1,
        loss_chunk: int | None = None,
    ):
        for name, x in (("accumulation", accumulation), ("loss_chunk", 1 if loss_chunk is None else loss_chunk)):
            check_count(name, x)
        self.build, self.optimizer, self.mesh = build, optimizer, mesh
        self.accumulation, self.loss_chunk = accumulation, loss_chunk
        self.graph, params, constants = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param, ...)  # type: ignore[misc]
        params_place, constants_place = (nnx.to_pure_dict(shardings(x, mesh)) for x in (params, constants))
        everywhere = NamedSharding(mesh, PartitionSpec())
        opt_state = jax.eval_shape(optimizer.init, nnx.to_pure_dict(params))
        # Moments lie where their parameters lie.
        opt_place = optax.tree_utils.tree_map_params(
            optimizer,
            lambda _, where: where,
            opt_state,
            params_place,
            transform_non_params=lambda _: everywhere,
        )
        self.shardings = TrainState(params_place, constants_place, opt_place, everywhere, everywhere, everywhere)
        self.init = jax.jit(self.start, static_argnums=0, out_shardings=self.shardings)
        self.update = jax.jit(self._update, donate_argnums=0, out_shardings=(self.shardings, None))
        self.evaluate = jax.jit(lambda state, batch: self._sum_loss(state.params, state.constants, batch))

    def start(self, seed: int | Array) -> TrainState:
        """The state before the first update, of a seed or a key. Each device makes its part; the values depend on no
        mesh."""
        _, params, constants = nnx.split(self.build(nnx.Rngs(seed)), nnx.Param, ...)  # type: ignore[misc]
        params = nnx.to_pure_dict(params)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, nnx.to_pure_dict(constants), self.optimizer.init(params), zero, zero, zero)

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for restoring one."""
        shapes = jax.eval_shape(lambda: self.start(0))
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, self.shardings
        )

    def model(self, state: TrainState) -> nnx.Module:
        """The module with these parameters."""
        return nnx.merge(self.graph, state.params, state.constants)

    def _sum_loss(self, params: Any, constants: Any, batch: Batch) -> tuple[Array, Array]:
        """(sum over predicted tokens of -w log p(target), sum of w), both float32; w = 1 without `batch.weights`."""
        model = nnx.merge(self.graph, params, constants)
        counted = _counted(batch)
        tokens = jnp.sum(counted, dtype=jnp.float32)
        readout = model.readout() if isinstance(model, LanguageModel) else None
        if readout is None:
            logits = model(batch.tokens, segment_ids=batch.segment_ids)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch.targets)
            weighted = losses if counted.dtype == jnp.bool_ else losses * counted
            return jnp.sum(jnp.where(counted.astype(jnp.bool_), weighted, 0)), tokens
        kernel, axis = readout
        x, _ = model.features(batch.tokens, segment_ids=batch.segment_ids)
        loss = summed_cross_entropy(x, kernel, batch.targets, counted, axis=axis, chunk=self.loss_chunk)
        return loss.astype(jnp.float32), tokens

    def gradient(self, state: TrainState, batch: Batch) -> tuple[Array, Any, Array]:
        """(mean loss, its gradient, tokens). Sums over microbatches are divided once, by all tokens (or weights).

        Raises:
            ValueError: the rows cannot be cut into `accumulation` microbatches.
        """
        if len(batch.tokens) % self.accumulation:
            raise ValueError(
                f"batch: got {len(batch.tokens)} rows, want a multiple of accumulation = {self.accumulation}"
            )
        value_and_grad = jax.value_and_grad(self._sum_loss, has_aux=True)
        if self.accumulation == 1:
            (loss, tokens), grads = value_and_grad(state.params, state.constants, batch)
        else:
            # Every n-th row, so that each microbatch still has a part on every device.
            parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, self.accumulation, *x.shape[1:]), 1, 0), batch)

            def add(total: Any, part: Batch) -> tuple[Any, None]:
                (loss, tokens), grads = value_and_grad(state.params, state.constants, part)
                return jax.tree.map(jnp.add, total, (loss, tokens, grads)), None

            zero = jnp.zeros((), jnp.float32)
            start = (zero, zero, jax.tree.map(jnp.zeros_like, state.params))
            (loss, tokens, grads), _ = lax.scan(add, start, parts)
        # Weights may add up to less than one token.
        tokens_or_one = jnp.where(tokens > 0, tokens, 1)
        grads = jax.tree.map(lambda g: g / tokens_or_one.astype(g.dtype), grads)
        return loss / tokens_or_one, grads, tokens

    def _update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, grads, tokens = self.gradient(state, batch)
        norm = optax.tree_utils.tree_norm(grads)
        # Optax raises Python floats to integer counts, which strict promotion would refuse.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        left_out = jnp.where(finite, 0, 1).astype(jnp.int32)
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1).astype(jnp.int32)
        new = TrainState(params, state.constants, opt_state, state.step + 1, state.skipped + left_out, in_a_row)
        return new, Metrics(loss, norm, tokens, new.skipped, new.skipped_in_a_row)


def _counted(batch: Batch) -> Array:
    """Which targets count, [B, T] bool, or how much, float32: never those of padding.

    Raises:
        ValueError: weights of another shape or type.
    """
    predicted, weights = batch.segment_ids != 0, batch.weights
    if weights is None:
        return predicted
    kinds = (jnp.bool_, jnp.floating)
    if not hasattr(weights, "dtype"):
        raise ValueError(f"weights: got {type(weights).__name__}, want an array, bool or floating")
    if weights.shape != batch.tokens.shape or not any(jnp.issubdtype(weights.dtype, kind) for kind in kinds):
        raise ValueError(
            f"weights: got {weights.dtype} {weights.shape}, want bool or floating [B,T] = {batch.tokens.shape}"
        )
    if weights.dtype == jnp.bool_:
        return predicted & weights
    return jnp.where(predicted, weights.astype(jnp.float32), 0)
