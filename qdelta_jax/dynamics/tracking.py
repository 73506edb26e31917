"""The residual of the online regression that a delta rule solves: how writes shrink it and drift renews it.

In units of v, with w = dz/dv (beta, or the write gate per channel) and x = e / w, a token's residual is v - S^T x:

    after_t  = (1 - gain_t) before_t                            the write: the contraction lemma
    before_t = after_{t-1} + r_t                                the drift
    r_t = (v_t - v_{t-1}) - S_{t-1}^T (x_t - x_{t-1}) - (Diag(exp(log_decay_t)) S_{t-1} - S_{t-1})^T x_t

r is the target's drift less the prediction's and less what forgetting adds; without decay the last part is 0 and r is
that of arXiv 2606.08804. Hence |after_t| <= rho^t |after_0| + rho (1 - rho^t) / (1 - rho) r for suprema rho of
|1 - gain| and r of |r_t|, with decay too.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qdelta_jax.dynamics.call import Call, Visit, factors, make_call, read, walk
from qdelta_jax.rules import Rule

__all__ = ["Tracking", "track", "tracking_bound"]


class Tracking(NamedTuple):
    """The residual along time, norms over the value channels, all [B, T, HV].

    gain: k . e, beta a in the delta rules.
    before: |v - S^T x|, S the decayed state that the token reads.
    after: |v - S_t^T x|, which is |1 - gain| before.
    drift: |r_t|.  target, prediction, forgetting: the norms of its three parts. All 0 where a segment begins.
    bound: of `after`: `tracking_bound` of the segment's first `after` and the suprema of |1 - gain| and of the drift
        over the tokens behind the first, up to this one; inf where it overflows.
    counted: bool; False in padding and where nothing is written (w = 0), where all others are 0.
    """

    gain: Array
    before: Array
    after: Array
    drift: Array
    target: Array
    prediction: Array
    forgetting: Array
    bound: Array
    counted: Array


def track(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
) -> Tracking:
    """|v_t - S_t^T x_t| = |1 - gain_t| |v_t - S^T x_t|, its drift, and the bound that follows.

    x = e / w, w = dz/dv: k + feedback q for q_delta, k for the rules before it. With a write gate per value channel
    each channel of v has an x of its own, and everything holds channel by channel.

    Args:
        q, k, v, rule, gates, initial_state, segment_ids: as in `qdelta_jax.delta_rule`.
    Returns:
        A `Tracking` in float32 (float64 for float64 inputs).
    Raises:
        ValueError: as `delta_rule`; the rule erases nothing; its z is not w * v for a w that does not depend on v
            (seen where values are known, outside of transformations).

    One key rewritten: what the second token finds is the distance of the two values, and nothing is left of it.

    >>> import jax.numpy as jnp
    >>> k, v = jnp.ones((1, 2, 1, 1)), jnp.array([3.0, 5.0]).reshape(1, 2, 1, 1)
    >>> seen = track(k, k, v, "delta_net", {"beta": jnp.ones((1, 2, 1))})
    >>> seen.before.ravel().tolist(), seen.after.ravel().tolist(), seen.drift.ravel().tolist()
    ([3.0, 2.0], [0.0, 0.0], [0.0, 2.0])

    Source: arXiv 2606.08804.
    """
    call, which = make_call(q, k, v, rule, gates, initial_state=initial_state, segment_ids=segment_ids, erases=True)
    proportional = _writes_in_proportion(call, which)
    if not isinstance(proportional, jax.core.Tracer) and not bool(proportional):
        raise ValueError(
            f"rule: got {which.name!r}, whose z is no multiple of v, want z = w * v with a w that does not depend on v"
        )
    return _track(call, which)


def _strength(call: Call, rule: Rule) -> Array:
    """w with z = w * v, [B, T, HV, V]."""
    return factors(call._replace(v=jnp.ones_like(call.v)), rule)[1].z


@partial(jax.jit, static_argnames=("rule",))
def _writes_in_proportion(call: Call, rule: Rule) -> Array:
    _, made, valid, _ = factors(call, rule)
    v, wrote = _values(call, valid), _strength(call, rule)
    slack = 16 * jnp.finfo(v.dtype).eps
    fits = jnp.abs(made.z - wrote * v) <= slack * (jnp.abs(made.z) + jnp.abs(wrote * v))
    # NaN in the inputs is not the rule's fault.
    return jnp.all(fits | jnp.isnan(made.z))


def _values(call: Call, valid: Array) -> Array:
    return jnp.where(valid[:, :, None, None], call.v.astype(call.state.dtype), 0)


class _Held(NamedTuple):
    """What the last counted token left: its v [B, HV, V], S^T x after its write, |1 - gain| and drift so far."""

    target: Array
    prediction: Array
    first: Array
    rate: Array
    drift: Array
    steps: Array
    started: Array


@partial(jax.jit, static_argnames=("rule",))
def _track(call: Call, rule: Rule) -> Tracking:
    batch, heads, _, value_dim = call.state.shape
    vectors, numbers = (jnp.zeros((batch, heads, *tail), call.state.dtype) for tail in ((value_dim,), ()))
    held = _Held(vectors, vectors, numbers, numbers, numbers, numbers, jnp.zeros((batch, heads), bool))
    values = _values(call, factors(call, rule)[2])
    return walk(call, rule, _visit, held, (values, _strength(call, rule)))[1]


def _visit(held: _Held, visit: Visit) -> tuple[_Held, Tracking]:
    v, wrote = visit.extra
    k, e = visit.made.k, visit.made.e
    assert e is not None
    counted = visit.valid[:, None] & jnp.all(wrote != 0, axis=-1)
    per_value = jnp.where(wrote != 0, 1 / jnp.where(wrote != 0, wrote, 1), 0)

    def predict(state: Array) -> Array:
        return read(state, e) * per_value

    started = held.started & ~visit.reset[:, None]
    found, decayed, left = predict(visit.before), predict(visit.decayed), predict(visit.after)
    moved = counted & started
    parts = [_where(moved, x) for x in (v - held.target, found - held.prediction, decayed - found)]
    drift = _norm(parts[0] - parts[1] - parts[2])
    gain = jnp.sum(k * e, axis=-1)
    after = _norm(v - left)

    rate = jnp.where(started, jnp.maximum(jnp.abs(1 - gain), held.rate), 0)
    most = jnp.where(started, jnp.maximum(drift, held.drift), 0)
    steps = jnp.where(started, held.steps + 1, 0)
    first = jnp.where(started, held.first, after)
    target, prediction, forgetting = (_norm(x) for x in parts)
    bound = tracking_bound(first, rate, most, steps)
    before = _norm(v - decayed)
    seen = Tracking(gain, before, after, drift, target, prediction, forgetting, bound, counted)
    now = _Held(v, left, first, rate, most, steps, jnp.ones_like(counted))
    # A segment that has begun without a counted token has not started.
    last = held._replace(started=started)
    kept = jax.tree.map(lambda new, old: jnp.where(_like(counted, new), new, old), now, last)
    return kept, jax.tree.map(lambda x: x & counted if x.dtype == jnp.bool_ else jnp.where(counted, x, 0), seen)


def _where(mask: Array, x: Array) -> Array:
    return jnp.where(mask[..., None], x, 0)


def _like(mask: Array, x: Array) -> Array:
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


def _norm(x: Array) -> Array:
    return jnp.linalg.norm(x, axis=-1)


def tracking_bound(first: Array, rate: Array, drift: Array, steps: Array) -> Array:
    """bound = rho^t first + rho (1 - rho^t) / (1 - rho) drift, and first + t drift for rho = 1.

    Args:
        first: |v_0 - S_0^T x_0|, the residual after the first write.
        rate: rho, the supremum of |1 - gain|; below 1 while every gain is in (0, 2).
        drift: the supremum of |r_t|.
        steps: t, writes since the first; floating. All of one floating dtype, and of shapes that broadcast.
    Returns:
        The bound of |v_t - S_t^T x_t|, in that dtype; inf where it overflows.
    Raises:
        ValueError: rate, drift, first or steps is known to have a negative value.

    >>> import jax.numpy as jnp
    >>> bounds = [tracking_bound(*map(jnp.asarray, (4.0, rate, 1.0, 2.0))) for rate in (0.5, 1.0, 0.0)]
    >>> [float(x) for x in bounds]
    [1.75, 6.0, 0.0]

    Source: arXiv 2606.08804.
    """
    for name, x in (("first", first), ("rate", rate), ("drift", drift), ("steps", steps)):
        if not isinstance(x, jax.core.Tracer) and np.any(np.asarray(x) < 0):
            raise ValueError(f"{name}: got a value of {np.nanmin(np.asarray(x))}, want none below 0")
    return _bound(first, rate, drift, steps)


@jax.jit
def _bound(first: Array, rate: Array, drift: Array, steps: Array) -> Array:
    # rho^t - 1 without cancellation where rho is near 1.
    grown = jnp.expm1(jnp.where(steps > 0, steps, 1) * jnp.log1p(rate - 1))
    grown = jnp.where(steps > 0, grown, 0)
    series = rate * jnp.where(rate == 1, steps, grown / jnp.where(rate == 1, 1, rate - 1))
    # Infinity times an error of 0 is 0.
    return jnp.where(first > 0, grown + 1, 0) * first + jnp.where(drift > 0, series, 0) * drift
