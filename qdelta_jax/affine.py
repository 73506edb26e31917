"""States between chunks: S_{n+1} = M_n S_n + added_n, with M_n a matrix, or a diagonal where nothing is erased.

One after the other where that is cheapest (CPU), else as a tree of exact transitions: the pairs (M, added) of
neighbours compose into that of the whole stretch, so stretches of RADIX chunks are composed in parallel until few are
left, and the states in between are recovered on the way down. The same pair serves segments that live on different
devices.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax import products

UNROLL = 8
"""Steps of the sequential form in one turn of its loop: fewer turns and slices, 4% of the gradient's time on a CPU."""

RADIX = 8
"""Chunks composed into one node. Few levels, since each one copies its transitions and states once."""


def affine_states(
    transition: Array,
    added: Array,
    start: Array,
    *,
    parallel: bool,
    precision: lax.PrecisionLike,
    transposed: bool = False,
) -> tuple[Array, Array]:
    """The state before each step, [n, B, H, K, V], and the one after the last.

    Args:
        transition: M [n, B, H, K, K], or its diagonal [n, B, H, K or 1, 1].
        added: [n, B, H, K, V].
        start: [B, H, K, V].
        parallel: by a tree.
        transposed: the recurrence of the gradient: M^T, from the last step to the first; "before" and "after" follow
            that direction.
    """
    diagonal = transition.shape[-1] == 1 and added.shape[-2] != 1

    def apply(m: Array, x: Array) -> Array:
        if diagonal:
            return m * x
        return (products.columns if transposed else products.rows)(m, x, precision)

    if parallel:
        compose = jnp.multiply if diagonal else partial(products.rows, precision=precision)
        return _tree(apply, compose, transition, added, start, transposed)

    def body(state: Array, item: tuple[Array, Array]) -> tuple[Array, Array]:
        return apply(item[0], state) + item[1], state

    after, before = lax.scan(body, start, (transition, added), reverse=transposed, unroll=UNROLL)
    return before, after


Product = Callable[[Array, Array], Array]


def _walk(apply: Product, transition: Array, added: Array, state: Array, reverse: bool) -> tuple[Array, Array]:
    """Steps along axis 1 of transition and added, all rows of axis 0 at once: states before, state after."""
    before = []
    for i in range(added.shape[1])[:: -1 if reverse else 1]:
        before.append(state)
        state = apply(transition[:, i], state) + added[:, i]
    return jnp.stack(before[:: -1 if reverse else 1], axis=1), state


def _tree(
    apply: Product, compose: Product, transition: Array, added: Array, start: Array, reverse: bool
) -> tuple[Array, Array]:
    count = added.shape[0]
    rest = count % RADIX if count > RADIX else count
    # The stretch that does not fill a node stands at the end of time.
    whole = [x[: count - rest].reshape(-1, RADIX, *x.shape[1:]) for x in (transition, added)]
    loose = [x[count - rest :][None] for x in (transition, added)]
    pieces, state = [], start
    if reverse and rest:
        before, state = _walk(apply, loose[0], loose[1], state[None], reverse)
        pieces, state = [before[0]], state[0]
    if count > rest:
        m, b = whole
        node_m = m[:, 0]
        for i in range(1, RADIX):
            node_m = compose(m[:, i], node_m)
        _, node_b = _walk(apply, m, b, jnp.zeros_like(b[:, 0]), reverse)
        known, state = _tree(apply, compose, node_m, node_b, state, reverse)
        before, _ = _walk(apply, m, b, known, reverse)
        pieces = [before.reshape(-1, *before.shape[2:]), *pieces]
    if not reverse and rest:
        before, state = _walk(apply, loose[0], loose[1], state[None], reverse)
        pieces, state = [*pieces, before[0]], state[0]
    return (pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)), state
