"""Whether the query and the key read the same from a state."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from qdelta_jax.dynamics.call import Call, Visit, make_call, read, walk
from qdelta_jax.rules import Rule

__all__ = ["cosine", "readout_cosine"]


def readout_cosine(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    after_write: bool = False,
) -> Array:
    """cos_t = <S^T q_t, S^T k_t> / (|S^T q_t| |S^T k_t|), S what the token reads: Diag(exp(log_decay_t)) S_{t-1}.

    These are the two parts of the prediction S^T (k + feedback q) of the rules with feedback; the cosine is defined
    for every rule.

    Args:
        q, k, v, rule, gates, initial_state, segment_ids: as in `qdelta_jax.delta_rule`.
        after_write: S is S_t, from which the output is read.
    Returns:
        [B, T, HV] float32 (float64 for float64 inputs); 0 in padding, and where one of the two is zero (the first
        token of a segment).
    Raises:
        ValueError: as `delta_rule`.

    Source: arXiv 2606.08804.
    """
    call, which = make_call(q, k, v, rule, gates, initial_state=initial_state, segment_ids=segment_ids)
    return _readout(call, which, bool(after_write))


@partial(jax.jit, static_argnames=("rule", "after_write"))
def _readout(call: Call, rule: Rule, after_write: bool) -> Array:
    def body(carry: tuple, visit: Visit) -> tuple[tuple, Array]:
        state = visit.after if after_write else visit.decayed
        cos = cosine(read(state, visit.q), read(state, visit.made.k))
        return carry, jnp.where(visit.valid[:, None], cos, 0)

    return walk(call, rule, body)[1]


def cosine(a: Array, b: Array) -> Array:
    """<a, b> / (|a| |b|) along the last axis; 0 where one of them is zero."""
    # Unit vectors first: the product of two small norms may underflow.
    lengths = [jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b)]
    units = [x / jnp.where(n > 0, n, 1) for x, n in zip((a, b), lengths, strict=True)]
    return jnp.sum(units[0] * units[1], axis=-1)
