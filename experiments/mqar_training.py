"""A training run of experiments/mqar.py: programs that take the learning rate and the seed as arguments."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax

from experiments.mqar_models import build
from qdelta_jax.models import LanguageModel, ModelConfig
from qdelta_jax.tasks import mqar
from qdelta_jax.training.config import OptimizerConfig
from qdelta_jax.training.cross_entropy import summed_cross_entropy
from qdelta_jax.training.optimizer import make_optimizer

PARTS = 10
"""Of a run: a program trains one of them, and between them the time is checked."""


@dataclass(frozen=True)
class Plan:
    """length, pairs, vocab: of the task. examples: to train on. halvings: how often the pairs of some are halved.
    held_out: for validation, and as many for the test. tokens: of a run. batch_tokens: of a step. together: runs that
    are trained at once. run_minutes: a run that takes longer fails."""

    length: int
    pairs: int
    vocab: int
    examples: int
    halvings: int
    held_out: int
    tokens: int
    batch_tokens: int
    together: int
    run_minutes: float

    @property
    def rows(self) -> int:
        return self.batch_tokens // self.length

    @property
    def steps(self) -> int:
        """A whole number in each part."""
        return self.tokens // (self.rows * self.length) // PARTS * PARTS


class Data(NamedTuple):
    """inputs [n, L]; places [n, N] in them, the answers there [n, N], and which of them are counted: the queries."""

    inputs: Any
    places: Any
    answers: Any
    counted: Any


class State(NamedTuple):
    """What training changes, and the model's constants."""

    params: Any
    constants: Any
    opt_state: Any


def training_pairs(pairs: int, halvings: int) -> list[int]:
    """Of the rows that are trained on, in equal parts.

    >>> training_pairs(12, 2), training_pairs(2, 3)
    ([12, 6, 3], [2, 1])
    """
    return [pairs >> i for i in range(min(halvings + 1, pairs.bit_length()))]


@cache
def make_data(plan: Plan) -> tuple[Data, Data, Data]:
    """For training, validation and test: the same for every model and seed."""

    def draw(count: int, seed: tuple[int, ...], pairs: int = plan.pairs) -> Data:
        inputs, targets, mask = mqar(count, seed=seed, length=plan.length, pairs=pairs, vocab_size=plan.vocab)
        # Every row has as many places, the queries first among them: their features alone meet the output layer.
        places = np.sort(np.argsort(~mask, axis=1, stable=True)[:, : plan.pairs], axis=1).astype(np.int32)
        return Data(inputs, places, *(np.take_along_axis(x, places, axis=1) for x in (targets, mask)))

    kinds = training_pairs(plan.pairs, plan.halvings)
    sizes = [len(part) for part in np.array_split(np.arange(plan.examples), len(kinds))]
    parts = [draw(n, (0, 0, i) if i else (0, 0), pairs) for i, (n, pairs) in enumerate(zip(sizes, kinds, strict=True))]
    train = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return jax.tree.map(jnp.asarray, (train, draw(plan.held_out, (0, 1)), draw(plan.held_out, (0, 2))))


def make_order(plan: Plan, seed: int) -> np.ndarray:
    """[steps, rows] examples of each step: every example once an epoch (but for the rest of its last batch)."""
    whole = plan.examples // plan.rows
    epochs = range(-(-plan.steps // whole))
    shuffled = [np.random.default_rng((seed, epoch)).permutation(plan.examples) for epoch in epochs]
    return np.concatenate([x[: whole * plan.rows].reshape(whole, plan.rows) for x in shuffled])[: plan.steps]


class Trainer:
    """Runs of one model on one setting; compiled by the first of them, whatever the rates and seeds.

    Args:
        model: its name.
        config: from `make_config`.
        plan: of the runs.
    """

    def __init__(self, model: str, config: ModelConfig, plan: Plan):
        self.model, self.config, self.plan = model, config, plan
        # Of rate 1: updates of AdamW are proportional to it.
        self.optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, final_fraction=0.0), plan.steps)

    def run(self, rates: list[float], seeds: list[int]) -> list[dict[str, Any]]:
        """Trains at most `together` runs and tests them.

        Raises:
            TimeoutError: they took longer than `run_minutes`.
        """
        plan, count = self.plan, len(rates)
        train, validation, test = make_data(plan)
        # A program has so many runs: the last one fills it up.
        lanes = [min(i, count - 1) for i in range(plan.together)]
        init, advance, score = self.programs
        began = time.perf_counter()
        rate, seed = jnp.asarray([rates[i] for i in lanes], jnp.float32), jnp.asarray([seeds[i] for i in lanes])
        order = np.stack([make_order(plan, seeds[i]) for i in lanes]).astype(np.int32)
        state, losses = init(seed), []
        for part in np.split(order, PARTS, axis=1):
            state, loss = advance(train, state, rate, part)
            losses.append(np.asarray(loss))
            if time.perf_counter() - began > 60 * plan.run_minutes:
                raise TimeoutError(f"not trained after {plan.run_minutes:g} minutes (run_minutes)")
        right = [np.asarray(score(data, state)) for data in (validation, test)]
        seconds = (time.perf_counter() - began) / count
        queries = plan.held_out * plan.pairs
        return [
            {
                "validation": int(right[0][i]) / queries,
                "test": int(right[1][i]) / queries,
                "losses": [round(float(x[i]), 4) if math.isfinite(x[i]) else None for x in losses],
                "steps": plan.steps,
                "epochs": round(plan.steps * plan.rows / plan.examples, 2),
                "seconds": round(seconds, 2),
                "together": count,
                "compile_s": round(self.compile_s, 2),
            }
            for i in range(count)
        ]

    @cached_property
    def graph(self) -> Any:
        """Made when something is trained: a run that only goes on has many models with nothing left to do."""
        return nnx.split(nnx.eval_shape(self._build), nnx.Param, ...)[0]  # type: ignore[misc]

    @cached_property
    def programs(self) -> tuple[Any, Any, Any]:
        """The start of runs, a part of their training, and their right answers, compiled."""
        began = time.perf_counter()
        plan, train, held_out = self.plan, make_data(self.plan)[0], make_data(self.plan)[1]
        some = jax.ShapeDtypeStruct((plan.together,), jnp.float32)
        order = jax.ShapeDtypeStruct((plan.together, plan.steps // PARTS, plan.rows), jnp.int32)

        def compiled(f: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            return jax.jit(f, **options).lower(*arguments).compile()

        seeds = jax.ShapeDtypeStruct((plan.together,), jnp.int32)
        state = jax.eval_shape(self._each(self._init), seeds)
        made = (
            compiled(self._each(self._init), seeds),
            compiled(
                lambda data, *rest: self._each(partial(self._advance, data))(*rest),
                *(train, state, some, order),
                donate_argnums=1,
            ),
            compiled(lambda data, state: self._each(partial(self._score, data))(state), held_out, state),
        )
        self.compile_s = time.perf_counter() - began
        return made

    def _each(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """f along the first axis of all arguments; an axis of 1 is taken off, since products with it are slower."""
        if self.plan.together > 1:
            return jax.vmap(f)
        return lambda *rest: jax.tree.map(lambda x: x[None], f(*jax.tree.map(lambda x: x[0], rest)))

    def _build(self, key: Any = 0) -> LanguageModel:
        return build(self.model, self.config, nnx.Rngs(key))

    def _init(self, seed: Array) -> State:
        model = self._build(jax.random.key(seed))
        _, params, constants = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
        params = nnx.to_pure_dict(params)
        return State(params, nnx.to_pure_dict(constants), self.optimizer.init(params))

    def _advance(self, data: Data, state: State, rate: Array, order: Array) -> tuple[State, Array]:
        """After a step for each row of `order`, and the mean loss of these."""

        def step(state: State, rows: Array) -> tuple[State, Array]:
            batch = jax.tree.map(lambda x: x[rows], data)
            loss, grads = jax.value_and_grad(self.loss)(state.params, state.constants, batch)
            # Optax raises Python floats to integer counts, which strict promotion would refuse.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
                updates = jax.tree.map(lambda x: rate * x, updates)
                params = optax.apply_updates(state.params, updates)
            return State(params, state.constants, opt_state), loss

        state, losses = lax.scan(step, state, order)
        return state, jnp.mean(losses)

    def loss(self, params: Any, constants: Any, batch: Data) -> Array:
        """Nats per query."""
        model = nnx.merge(self.graph, params, constants)
        x = _features(model, batch)
        kernel, axis = model.readout()
        total = summed_cross_entropy(x, kernel, batch.answers, batch.counted, axis=axis)
        return total / jnp.sum(batch.counted, dtype=total.dtype)

    def _score(self, data: Data, state: State) -> Array:
        """How many answers are right, a batch at a time."""
        model = nnx.merge(self.graph, state.params, state.constants)
        count, rows = len(data.inputs), self.plan.rows
        index = jnp.arange(-(-count // rows) * rows, dtype=jnp.int32).reshape(-1, rows)

        def right(rows: Array) -> Array:
            batch = jax.tree.map(lambda x: x[jnp.minimum(rows, count - 1)], data)
            hits = jnp.argmax(model.logits(_features(model, batch)), axis=-1) == batch.answers
            return jnp.sum(hits & batch.counted & (rows < count)[:, None], dtype=jnp.int32)

        return jnp.sum(lax.map(right, index))


def _features(model: LanguageModel, batch: Data) -> Array:
    """[B, N, width] at the queries."""
    x, _ = model.features(batch.inputs)
    rows = jnp.arange(x.shape[0], dtype=batch.places.dtype)[:, None]
    # No place stands twice in a row: the gradient adds nothing, so that its order does not matter.
    return x.at[rows, batch.places].get(indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds")
