"""How far one token moves the residual: the erase gain, beta * a in the delta rules."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from qdelta_jax.checks import check_segment_ids
from qdelta_jax.dynamics.call import Call, factors, make_call, over_batch_and_time
from qdelta_jax.rules import Rule

__all__ = ["contracting_share", "erase_gain"]


def erase_gain(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    segment_ids: Array | None = None,
) -> Array:
    """gain_t = k_t . e_t, which is beta a with a = k . x where a rule erases along e = beta x.

    Writing multiplies the residual z - S^T e by 1 - gain (see `track`), and 1 - gain is the eigenvalue of
    I - k e^T along k; all others are 1. With a gate per channel the gain is sum_i erase_i k_i x_i.

    Args:
        q, k, v, rule, gates, segment_ids: as in `qdelta_jax.delta_rule`.
    Returns:
        [B, T, HV] float32 (float64 for float64 inputs), 0 in padding.
    Raises:
        ValueError: as `delta_rule`; the rule erases nothing.

    >>> import jax.numpy as jnp
    >>> k = jnp.array([0.6, 0.8]).reshape(1, 1, 1, 2)
    >>> float(erase_gain(k, k, k, "delta_net", {"beta": jnp.full((1, 1, 1), 0.5)})[0, 0, 0])
    0.5

    Source: arXiv 2606.08804 (beta a); 2411.12537 (the eigenvalue 1 - beta |k|^2).
    """
    call, which = make_call(q, k, v, rule, gates, segment_ids=segment_ids, erases=True)
    return _gain(call, which)


@partial(jax.jit, static_argnames=("rule",))
def _gain(call: Call, rule: Rule) -> Array:
    made = factors(call, rule)[1]
    assert made.e is not None
    return jnp.sum(made.k * made.e, axis=-1)


def contracting_share(gain: Array, segment_ids: Array | None = None) -> Array:
    """mean_t [0 < gain_t < 2]: the share of tokens whose write shrinks the residual, |1 - gain| < 1.

    Args:
        gain: [B, T, HV], from `erase_gain`.
        segment_ids: [B, T] int; padding does not count.
    Returns:
        [HV], in gain's dtype; 0 where there is no token.
    Raises:
        ValueError: gain has other axes, or segment_ids do not fit.

    >>> import jax.numpy as jnp
    >>> contracting_share(jnp.array([0.0, 0.1, 1.9, 2.0]).reshape(1, 4, 1)).tolist()
    [0.5]

    Source: arXiv 2606.08804.
    """
    if gain.ndim != 3:
        raise ValueError(f"gain: got shape {gain.shape}, want [B,T,HV]")
    if segment_ids is not None:
        check_segment_ids(segment_ids, gain.shape[:2])
    return _share(gain, segment_ids)


@jax.jit
def _share(gain: Array, segment_ids: Array | None) -> Array:
    valid = jnp.ones(gain.shape[:2], bool) if segment_ids is None else segment_ids != 0
    return over_batch_and_time(((gain > 0) & (gain < 2)).astype(gain.dtype), valid)
