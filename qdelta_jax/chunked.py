"""The chunked WY solver: C tokens at once, with a hand-written gradient that goes through the rule's own gates.

Per chunk, with the decay factors of decay.py (docs/derivation.md derives it):

    L_ij = sum_d e_id k_jd exp(G_id - G_jd)  (j < i)        A = (I + L)^-1
    P_ij = sum_d q_id k_jd exp(G_id - G_jd)  (j <= i)
    U = A (Z - (Gamma E) S)                                 W = A (Gamma E)
    O = scale ((Gamma q) S + P U)                           S' = gamma S + (tail k)^T U

The sequence is cut into groups of chunks. Within a group everything but the states is computed for all chunks at
once; groups follow one another in a `lax.scan`, so that memory does not grow with more than the inputs, the outputs
and one state per chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from qdelta_jax import products, wy
from qdelta_jax.affine import affine_states
from qdelta_jax.coefficients import coefficients
from qdelta_jax.plan import ChunkOptions, Plan, grouped, make_plan, merge, split, ungrouped
from qdelta_jax.rules import Rule

__all__ = ["ChunkOptions", "chunked", "chunked_backward", "chunked_plain", "coefficients"]


def _setup(options: ChunkOptions, v: Array, valid: Array | None) -> tuple[Plan, Array | None]:
    batch, length, heads, _ = v.shape
    cut = make_plan(options, batch, length, heads)
    if valid is None and cut.groups * cut.chunks * cut.size != length:
        valid = jnp.ones((batch, length), bool)
    return cut, valid


def _forward(
    rule: Rule,
    options: ChunkOptions,
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    state: Array,
    valid: Array | None,
    reset: Array | None,
) -> tuple[tuple[Array, Array], tuple[Array, wy.Solved | None]]:
    """((out, final state), (states between chunks, what "keep" keeps))."""
    q, k, v, gates, state, valid, reset = products.mapped_together((q, k, v, gates, state, valid, reset))
    cut, valid = _setup(options, v, valid)
    precision = options.precision

    def body(start: Array, item: tuple) -> tuple[Array, tuple]:
        q_g, k_g, v_g, gates_g, valid_g, reset_g = item
        chunks = wy.make_chunks(*coefficients(rule, q_g, k_g, v_g, gates_g, valid_g), reset_g, cut)
        solved = wy.solve(chunks, precision)
        added = products.columns(chunks.boundary.tail * chunks.k, solved.u_free, precision)
        transition = wy.transition(chunks, solved, precision)
        states, end = affine_states(transition, added, start, parallel=cut.parallel, precision=precision)
        intra = products.rows(solved.scores, wy.corrected(solved, states, precision), precision)
        out = options.scale * (wy.read_states(chunks, states, precision) + intra)
        return end, (merge(out.astype(q.dtype), cut), states, solved if options.residuals == "keep" else None)

    end, (out, states, kept) = lax.scan(body, state, grouped(cut, (q, k, v, gates, valid, reset)))
    out = ungrouped(out, q.shape[1])
    if valid is not None:
        out = jnp.where(valid[:, :, None, None], out, 0)
    return (out, end), (states, kept)


def chunked_plain(rule: Rule, options: ChunkOptions, *inputs: Any) -> tuple[Array, Array]:
    """`chunked` with the gradient left to JAX: more memory, but checkify can be differentiated through it."""
    return _forward(rule, options, *inputs)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked(
    rule: Rule,
    options: ChunkOptions,
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    state: Array,
    valid: Array | None,
    reset: Array | None,
) -> tuple[Array, Array]:
    """The recurrence over [B, T, H, .] inputs, chunk by chunk; arguments as checked by `delta_rule`.

    Returns:
        out [B, T, HV, V] in q's dtype and the final state [B, HV, K, V].
    """
    return chunked_plain(rule, options, q, k, v, gates, state, valid, reset)


def _chunked_forward(
    rule: Rule, options: ChunkOptions, q: Array, k: Array, v: Array, gates: dict, state: Array, *masks: Any
) -> tuple[tuple[Array, Array], tuple]:
    result, (states, kept) = _forward(rule, options, q, k, v, gates, state, *masks)
    states = checkpoint_name(states, "delta_rule_states")
    kept = checkpoint_name(kept, "delta_rule_kept")
    return result, (q, k, v, gates, *masks, states, kept)


def chunked_backward(rule: Rule, options: ChunkOptions, saved: tuple, cotangents: tuple) -> tuple:
    """Gradients of `chunked`'s arguments, whatever computed the states: the kernels leave theirs to it as well.

    saved: q, k, v, gates, valid, reset, the state before each chunk as `plan.make_plan` cuts the sequence, [groups,
        chunks, B, HV, K, V], and what "keep" keeps, or None. cotangents: of out and of the final state.
    """
    q, k, v, gates, valid, reset, states, kept, d_out, d_end = products.mapped_together((*saved, *cotangents))
    cut, valid = _setup(options, v, valid)
    if valid is not None:
        d_out = jnp.where(valid[:, :, None, None], d_out, 0)

    def body(d_end: Array, item: tuple) -> tuple[Array, tuple]:
        (q_g, k_g, v_g, gates_g, valid_g, reset_g, d_out_g), states_g, kept_g = item
        (q_c, made), pull_back = jax.vjp(
            lambda q, k, v, gates: coefficients(rule, q, k, v, gates, valid_g), q_g, k_g, v_g, gates_g
        )
        chunks = wy.make_chunks(q_c, made, reset_g, cut)
        solved = wy.solve(chunks, options.precision) if kept_g is None else kept_g
        d_out_g = split(d_out_g.astype(chunks.q.dtype), cut)
        d_q, d_made, d_start = wy.group_backward(options, cut.parallel, chunks, solved, states_g, d_out_g, d_end)
        d_made = d_made._replace(log_decay=None if made.log_decay is None else d_made.log_decay)
        return d_start, pull_back(jax.tree.map(partial(merge, plan=cut), (d_q, d_made)))

    items = (grouped(cut, (q, k, v, gates, valid, reset, d_out)), states, kept)
    d_start, grads = lax.scan(body, d_end, items, reverse=True)
    return *ungrouped(grads, q.shape[1]), d_start, None, None


chunked.defvjp(_chunked_forward, chunked_backward)
