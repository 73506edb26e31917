"""Training runs of experiments/language_model.py and experiments/niah.py: one program for all rates and seeds."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from qdelta_jax.training import MeshConfig, OptimizerConfig
from qdelta_jax.training.data import Batch
from qdelta_jax.training.optimizer import make_optimizer
from qdelta_jax.training.train_step import Learner, TrainState, make_mesh, shard_batch

PARTS = 20
"""Of a run: of each the mean training loss is stored, and between them the time is checked."""


@dataclass(frozen=True)
class Plan:
    """length: of a row. rows: of a step. steps: of a run. run_minutes: a run that takes longer fails."""

    length: int
    rows: int
    steps: int
    run_minutes: float

    @property
    def tokens(self) -> int:
        return self.length * self.rows * self.steps


def plan(*, length: int, tokens: int, batch_tokens: int, run_minutes: float) -> Plan:
    """A run of about so many tokens, in whole parts.

    Raises:
        ValueError: a batch is no whole number of rows, or the tokens are too few.
    """
    if length < 1 or batch_tokens % length:
        raise ValueError(f"batch_tokens: got {batch_tokens}, want a multiple of the length {length}")
    steps = tokens // batch_tokens // PARTS * PARTS
    if not steps:
        raise ValueError(f"tokens: got {tokens}, want at least {PARTS} * batch_tokens = {PARTS * batch_tokens}")
    return Plan(length, batch_tokens // length, steps, run_minutes)


def plan_of(grid: Any) -> Plan:
    """Of a grid, which has these fields."""
    return plan(**{name: getattr(grid, name) for name in ("length", "tokens", "batch_tokens", "run_minutes")})


class Runner:
    """Trains one model, again and again; compiled once, on one device.

    Args:
        build: makes it from random streams.
        plan: of the runs.
    """

    def __init__(self, build: Callable[[nnx.Rngs], nnx.Module], plan: Plan):
        self.build, self.plan = build, plan

    @cached_property
    def learner(self) -> Learner:
        """Made when something is trained: a run that only goes on has many models with nothing left to do."""
        # Updates of AdamW are proportional to the rate, so that it can be an argument.
        config_of_one = OptimizerConfig(learning_rate=1.0, final_fraction=0.1)
        optimizer = optax.inject_hyperparams(
            lambda rate: optax.chain(make_optimizer(config_of_one, self.plan.steps), optax.scale(rate))
        )(rate=1.0)
        return Learner(self.build, optimizer, make_mesh(MeshConfig(data=1, fsdp=1)))

    @cached_property
    def start(self) -> Callable[[Array], TrainState]:
        return jax.jit(self.learner.start, out_shardings=self.learner.shardings)

    def run(
        self, rate: float, seed: int, data: Iterator[Batch], score: Callable[[TrainState], dict[str, Any]]
    ) -> dict[str, Any]:
        """Trains on the next batches of `data` and returns what `score` says of the end, with the losses on the way.

        The seed is that of the initial parameters.

        Raises:
            TimeoutError: it took longer than `run_minutes`.
            FloatingPointError: updates were left out: a loss or gradient was not finite.
        """
        began = time.perf_counter()
        losses: list[float] = []
        with jax.set_mesh(self.learner.mesh):
            state = self.start(jax.random.key(seed))
            state.opt_state.hyperparams["rate"] = jnp.asarray(rate, jnp.float32)
            for _ in range(PARTS):
                pending = []
                for _ in range(self.plan.steps // PARTS):
                    state, metrics = self.learner.update(state, shard_batch(next(data), self.learner.mesh))
                    pending.append(metrics.loss)
                losses.append(float(np.mean(jax.device_get(pending))))
                if int(state.skipped):
                    raise FloatingPointError(f"{int(state.skipped)} updates had a loss or gradient that is not finite")
                if time.perf_counter() - began > 60 * self.plan.run_minutes:
                    raise TimeoutError(f"not trained after {self.plan.run_minutes:g} minutes (run_minutes)")
            trained = time.perf_counter() - began
            numbers = score(state)
        return {
            **numbers,
            "losses": [round(x, 4) if math.isfinite(x) else None for x in losses],
            "steps": self.plan.steps,
            "seconds": round(trained, 2),
            "score_seconds": round(time.perf_counter() - began - trained, 2),
        }
