"""One call's arguments, checked as `delta_rule` checks them, and the walk along its states that others build on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax import recurrence
from qdelta_jax.checks import check_inputs, check_log_decay, check_segment_ids, check_state, compute_dtype
from qdelta_jax.coefficients import coefficients
from qdelta_jax.rules import Coefficients, Rule, get_rule
from qdelta_jax.segments import segment_masks

__all__ = ["PRECISION", "Call", "Visit", "factors", "make_call", "masks", "over_batch_and_time", "read", "walk"]

PRECISION = lax.Precision.HIGHEST
"""Of every product here: a diagnostic that rounds measures itself."""


class Call(NamedTuple):
    """The arrays of a call of `delta_rule`; state is never None."""

    q: Array
    k: Array
    v: Array
    gates: dict[str, Array]
    state: Array
    segment_ids: Array | None


def make_call(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    erases: bool = False,
) -> tuple[Call, Rule]:
    """The arguments as a `Call`, and the rule.

    Args:
        erases: refuse a rule that erases nothing.
    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    which, gates = get_rule(rule), {} if gates is None else gates
    check_inputs(q, k, v, which, gates, ("B", "T"))
    dtype, shape = compute_dtype(q.dtype), (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    if initial_state is None:
        initial_state = jnp.zeros(shape, dtype)
    check_state("initial_state", initial_state, shape, dtype)
    if segment_ids is not None:
        check_segment_ids(segment_ids, q.shape[:2])
    check_log_decay(gates, None if segment_ids is None else segment_ids != 0)
    call = Call(q, k, v, dict(gates), initial_state, segment_ids)
    if erases and jax.eval_shape(lambda c: factors(c, which)[1], call).e is None:
        raise ValueError(f"rule: got {which.name!r}, which erases nothing, want a rule with an erase vector e")
    return call, which


def factors(call: Call, rule: Rule) -> tuple[Array, Coefficients, Array, Array]:
    """q and the rule's k, e, z, log_decay, [B, T, HV, ...], zero in padding; valid and reset, [B, T] bool."""
    valid, reset = masks(call)
    q, made = coefficients(rule, call.q, call.k, call.v, call.gates, None if call.segment_ids is None else valid)
    return q, made, valid, reset


def masks(call: Call) -> tuple[Array, Array]:
    """valid and reset, both [B, T] bool."""
    if call.segment_ids is not None:
        return segment_masks(call.segment_ids)
    return jnp.ones(call.q.shape[:2], bool), jnp.zeros(call.q.shape[:2], bool)


class Visit(NamedTuple):
    """One token of a walk, and the state around it.

    before: [B, HV, K, V] what the token finds: zeros where it opens a segment.
    decayed: Diag(exp(log_decay)) before, what it reads.  after: what it leaves; `before` where it is padding.
    q [B, HV, K]; made: its coefficients; valid, reset: [B] bool; extra: its part of what was passed along.
    """

    before: Array
    decayed: Array
    after: Array
    q: Array
    made: Coefficients
    valid: Array
    reset: Array
    extra: Any


def walk(
    call: Call, rule: Rule, body: Callable[[Any, Visit], tuple[Any, Any]], carry: Any = (), extra: Any = ()
) -> tuple[Any, Any]:
    """body(carry, visit) -> (carry, output) for each token in turn; one state is held at a time.

    Args:
        extra: arrays [B, T, ...] that travel along.
    Returns:
        The last carry, and the outputs [B, T, ...].
    """
    q, made, valid, reset = factors(call, rule)

    def token(held: tuple[Array, Any], item: tuple) -> tuple[tuple[Array, Any], Any]:
        state, carry = held
        q_t, made_t, valid_t, reset_t, extra_t = item
        before = jnp.where(_per_state(reset_t), 0, state)
        decayed = before if made_t.log_decay is None else jnp.exp(made_t.log_decay)[..., None] * before
        _, after = recurrence.step(before, q_t, made_t, 1.0, PRECISION)
        after = jnp.where(_per_state(valid_t), after, state)
        carry, out = body(carry, Visit(before, decayed, after, q_t, made_t, valid_t, reset_t, extra_t))
        return (after, carry), out

    items = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, made, valid, reset, extra))
    (_, carry), outputs = lax.scan(token, (call.state, carry), items)
    return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)


def _per_state(mask: Array) -> Array:
    return mask[:, None, None, None]


def read(state: Array, x: Array) -> Array:
    """S^T x: [..., K, V] and [..., K] to [..., V]."""
    return jnp.einsum("...kv,...k->...v", state, x, precision=PRECISION)


def over_batch_and_time(x: Array, valid: Array) -> Array:
    """The mean of x [B, T, ...] over the tokens of `valid` [B, T] or [B, T, 1 ..]; 0 where there are none."""
    valid = jnp.broadcast_to(valid.reshape(*valid.shape, *[1] * (x.ndim - valid.ndim)), x.shape)
    count = jnp.sum(valid, axis=(0, 1)).astype(x.dtype)
    return jnp.sum(jnp.where(valid, x, 0), axis=(0, 1)) / jnp.maximum(count, 1)
