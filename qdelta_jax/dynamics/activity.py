"""How much the gates forget, erase and write, channel by channel."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from qdelta_jax.checks import check_segment_ids
from qdelta_jax.dynamics.call import Call, Visit, factors, make_call, over_batch_and_time, read, walk
from qdelta_jax.rules import Rule

__all__ = ["ChannelActivity", "GateStatistics", "channel_activity", "gate_statistics"]


class ChannelActivity(NamedTuple):
    """Mean norms of the three parts of S_t - S_{t-1}: rows of the state are key channels, columns value channels.

    key_forgotten, key_erased, key_written: [B, HV, K].  value_forgotten, value_erased, value_written: [B, HV, V].
    The erased parts are None for a rule that erases nothing, the forgotten ones for one without a decay.
    """

    key_forgotten: Array | None
    key_erased: Array | None
    key_written: Array
    value_forgotten: Array | None
    value_erased: Array | None
    value_written: Array


def channel_activity(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
) -> ChannelActivity:
    """S_t - S_{t-1} = (Diag(exp(log_decay)) - I) S_{t-1} - k (S^T e)^T + k z^T: forgotten, erased, written.

    S is Diag(exp(log_decay)) S_{t-1}. Of each part, the norm of every row and of every column, averaged over the
    tokens: |k_i| |S^T e| is what a token erases from key channel i, |k| |(S^T e)_j| what it erases from value
    channel j, and the same with z for what it writes.

    Args:
        q, k, v, rule, gates, initial_state, segment_ids: as in `qdelta_jax.delta_rule`.
    Returns:
        A `ChannelActivity` in float32 (float64 for float64 inputs); padding does not count.
    Raises:
        ValueError: as `delta_rule`.

    >>> import jax.numpy as jnp
    >>> k, v = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), jnp.array([3.0, 4.0]).reshape(1, 1, 1, 2)
    >>> seen = channel_activity(k, k, v, "delta_net", {"beta": jnp.ones((1, 1, 1))})
    >>> seen.key_written.ravel().tolist(), seen.value_written.ravel().tolist(), seen.key_forgotten
    ([5.0, 0.0], [3.0, 4.0], None)

    Source: the gates' roles, arXiv 2605.22791.
    """
    call, which = make_call(q, k, v, rule, gates, initial_state=initial_state, segment_ids=segment_ids)
    return _activity(call, which)


@partial(jax.jit, static_argnames=("rule",))
def _activity(call: Call, rule: Rule) -> ChannelActivity:
    def amounts(visit: Visit) -> ChannelActivity:
        k, e, z, log_decay = visit.made
        forgotten = None if log_decay is None else visit.before - visit.decayed
        erased = None if e is None else read(visit.decayed, e)
        made = ChannelActivity(
            None if forgotten is None else jnp.linalg.norm(forgotten, axis=-1),
            None if erased is None else jnp.abs(k) * _norm(erased),
            jnp.abs(k) * _norm(z),
            None if forgotten is None else jnp.linalg.norm(forgotten, axis=-2),
            None if erased is None else _norm(k) * jnp.abs(erased),
            _norm(k) * jnp.abs(z),
        )
        return jax.tree.map(lambda x: jnp.where(visit.valid[:, None, None], x, 0), made)

    def body(sums: tuple[ChannelActivity, Array], visit: Visit) -> tuple[tuple[ChannelActivity, Array], None]:
        total, count = sums
        return (jax.tree.map(jnp.add, total, amounts(visit)), count + visit.valid.astype(count.dtype)), None

    start = _zeros(call, rule)
    (total, count), _ = walk(call, rule, body, (start, jnp.zeros(call.q.shape[0], call.state.dtype)))
    return jax.tree.map(lambda x: x / jnp.maximum(count, 1)[:, None, None], total)


def _zeros(call: Call, rule: Rule) -> ChannelActivity:
    made = jax.eval_shape(lambda c: factors(c, rule)[1], call)
    row, column = jnp.zeros_like(call.state[..., 0]), jnp.zeros_like(call.state[..., 0, :])
    decays, erases = made.log_decay is not None, made.e is not None
    return ChannelActivity(
        row if decays else None,
        row if erases else None,
        row,
        column if decays else None,
        column if erases else None,
        column,
    )


def _norm(x: Array) -> Array:
    return jnp.linalg.norm(x, axis=-1, keepdims=True)


class GateStatistics(NamedTuple):
    """Over batch and time, [H] for a gate per head and [H, channels] for one per channel; H is the gate's own."""

    mean: Array
    std: Array


def gate_statistics(gates: Mapping[str, Array], *, segment_ids: Array | None = None) -> dict[str, GateStatistics]:
    """mean_t(g) and sqrt(mean_t((g - mean)^2)) of every gate g; log_decay as the decay exp(log_decay) in [0, 1].

    Args:
        gates: as in `qdelta_jax.delta_rule`: [B, T, H] or [B, T, H, channels] each.
        segment_ids: [B, T] int; padding does not count.
    Returns:
        A `GateStatistics` for each name, in float32 (float64 for float64 gates).
    Raises:
        ValueError: a gate has other axes or is not floating, or segment_ids do not fit.

    >>> import jax.numpy as jnp
    >>> gate_statistics({"beta": jnp.array([0.25, 0.75]).reshape(1, 2, 1)})["beta"].mean.tolist()
    [0.5]
    """
    for name, x in gates.items():
        if x.ndim not in (3, 4) or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"gates[{name!r}]: got shape {x.shape} and dtype {x.dtype}, want floating [B,T,H] or [B,T,H,channels]"
            )
        if segment_ids is not None:
            check_segment_ids(segment_ids, x.shape[:2])
    return _statistics(dict(gates), segment_ids)


@jax.jit
def _statistics(gates: dict[str, Array], segment_ids: Array | None) -> dict[str, GateStatistics]:
    found = {}
    for name, x in gates.items():
        valid = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids != 0
        x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
        x = jnp.exp(x) if name == "log_decay" else x
        mean = over_batch_and_time(x, valid)
        square = over_batch_and_time((x - mean[None, None]) ** 2, valid)
        found[name] = GateStatistics(mean, jnp.sqrt(square))
    return found
