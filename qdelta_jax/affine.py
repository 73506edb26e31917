"""States between chunks: S_{n+1} = carry_n S_n - left_n^T (right_n S_n) + added_n.

One after the other where that is cheapest (CPU, few chunks), else as a tree of exact transitions: the pair
(M, b) of S -> M S + b composes, so pairs of chunks are combined until few are left, and the states in between are
recovered on the way down. The same pair serves segments that live on different devices.
"""

import jax.numpy as jnp
from jax import Array, lax

SEQUENTIAL = 4
"""A tree stops at this many nodes."""


def affine_states(
    carry: Array,
    left: Array | None,
    right: Array | None,
    added: Array,
    start: Array,
    *,
    parallel: bool,
    precision: lax.PrecisionLike,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """The value before each step, [B, H, n, K, V], and the one after the last.

    Args:
        carry: [B, H, n, K or 1, 1], factor of the rows of the state.
        left, right: [B, H, n, C, K], or None where nothing is erased.
        added: [B, H, n, K, V].
        start: [B, H, K, V].
        reverse: step from the last to the first; "before" and "after" then follow that direction.
    """
    if left is None or right is None:
        left = right = transition = None
    elif parallel:
        transition = -jnp.einsum("...ck,...cd->...kd", left, right, precision=precision)
        transition = transition + carry * jnp.eye(added.shape[-2], dtype=added.dtype)
    if parallel and added.shape[2] > SEQUENTIAL:
        pieces = (carry if left is None else transition, added)
        if reverse:
            pieces = tuple(jnp.flip(x, 2) for x in pieces)
        before, after = _tree(*pieces, start, diagonal=left is None, precision=precision)
        return (jnp.flip(before, 2) if reverse else before), after

    def body(state: Array, item: tuple) -> tuple[Array, Array]:
        c, lt, rt, b = item
        after = c * state + b
        if lt is not None:
            after = after - jnp.einsum("...ck,...cv->...kv", lt, _dot(rt, state, precision), precision=precision)
        return after, state

    items = [None if x is None else jnp.moveaxis(x, 2, 0) for x in (carry, left, right, added)]
    after, before = lax.scan(body, start, tuple(items), reverse=reverse)
    return jnp.moveaxis(before, 0, 2), after


def _dot(a: Array, b: Array, precision: lax.PrecisionLike) -> Array:
    return jnp.matmul(a, b, precision=precision)


def _tree(
    transition: Array, added: Array, start: Array, *, diagonal: bool, precision: lax.PrecisionLike
) -> tuple[Array, Array]:
    def apply(m: Array, x: Array) -> Array:
        return m * x if diagonal else _dot(m, x, precision)

    count = added.shape[2]
    if count <= SEQUENTIAL:
        states, state = [], start
        for i in range(count):
            states.append(state)
            state = apply(transition[:, :, i], state) + added[:, :, i]
        return jnp.stack(states, axis=2), state
    even = count - count % 2
    m_1, m_2 = transition[:, :, 0:even:2], transition[:, :, 1:even:2]
    b_1, b_2 = added[:, :, 0:even:2], added[:, :, 1:even:2]
    first, after = _tree(
        apply(m_2, m_1), apply(m_2, b_1) + b_2, start, diagonal=diagonal, precision=precision
    )
    second = apply(m_1, first) + b_1
    before = jnp.stack([first, second], axis=3).reshape(*added.shape[:2], even, *added.shape[3:])
    if count > even:
        before = jnp.concatenate([before, after[:, :, None]], axis=2)
        after = apply(transition[:, :, -1], after) + added[:, :, -1]
    return before, after
