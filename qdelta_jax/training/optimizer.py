"""AdamW, with weight decay on matrices alone, a warm-up and a cosine."""

from typing import Any

import jax
import optax

from qdelta_jax.training.config import OptimizerConfig

__all__ = ["decay_mask", "make_optimizer", "schedule"]

UNDECAYED = frozenset({"bias", "A_log", "dt_bias", "scale"})
"""Parameter names without weight decay, whatever their shape: scanned layers stack vectors into matrices."""


def decay_mask(params: Any) -> Any:
    """True where weight decay applies: arrays with two axes or more, no part of whose path is in `UNDECAYED`.

    >>> import jax.numpy as jnp
    >>> matrix, vector = jnp.ones((2, 3)), jnp.ones(3)
    >>> decay_mask({"norm": {"scale": matrix}, "out": {"kernel": matrix, "bias": vector}})
    {'norm': {'scale': False}, 'out': {'bias': False, 'kernel': True}}
    """

    def decays(path: tuple, x: Any) -> bool:
        names = {str(getattr(part, "key", getattr(part, "name", part))) for part in path}
        return x.ndim >= 2 and not names & UNDECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from 0 to the peak at `warmup_steps`, then a cosine to `final_fraction` of it at `steps`.

    >>> rate = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_fraction=0.1), 110)
    >>> [round(float(rate(step)), 2) for step in (0, 5, 10, 60, 110, 200)]
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]

    Raises:
        ValueError: the warm-up is not shorter than the run.
    """
    warmup = min(50, steps // 10) if config.warmup_steps is None else config.warmup_steps
    if warmup >= steps:
        raise ValueError(f"optimizer.warmup_steps: got {warmup}, want less than run.steps = {steps}")
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=config.final_fraction * config.learning_rate,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """clip(global norm) -> AdamW (arXiv 1711.05101) with `schedule` and `decay_mask`."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
