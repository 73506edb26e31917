"""The definition: one token at a time. Every other implementation is tested against this file.

S <- Diag(exp(log_decay)) S          forget
r  = S^T e                           read
S <- S + k (z - r)^T                 write
o  = scale * S^T q                   read out
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax.rules import Coefficients


def step(
    state: Array, q: Array, coefficients: Coefficients, scale: float, precision: lax.PrecisionLike = None
) -> tuple[Array, Array]:
    """S_t = (I - k e^T) Diag(exp(log_decay)) S_{t-1} + k z^T;  o_t = scale * S_t^T q_t.

    Args:
        state: [..., K, V].
        q: [..., K].
        coefficients: of this token, from a rule: k, e [..., K], z [..., V], log_decay [..., 1] or [..., K].
        scale: of the output only.
        precision: of the products.
    Returns:
        o_t [..., V] and S_t [..., K, V].
    """
    k, e, z, log_decay = coefficients
    if log_decay is not None:
        state = jnp.exp(log_decay)[..., None] * state
    if e is not None:
        z = z - _read(state, e, precision)
    state = state + k[..., :, None] * z[..., None, :]
    return scale * _read(state, q, precision), state


def _read(state: Array, x: Array, precision: lax.PrecisionLike) -> Array:
    return jnp.einsum("...kv,...k->...v", state, x, precision=precision)


def scan(
    state: Array,
    q: Array,
    coefficients: Coefficients,
    scale: float,
    valid: Array | None = None,
    reset: Array | None = None,
    precision: lax.PrecisionLike = None,
) -> tuple[Array, Array]:
    """`step` along the time axis by `lax.scan`.

    Args:
        state: [B, H, K, V], the state before the first token.
        q: [B, T, H, K], and coefficients with the same leading axes.
        valid: [B, T] bool; where False the state stays and the output is 0.
        reset: [B, T] bool; where True the state is cleared before the token.
    Returns:
        o [B, T, H, V] and the last state [B, H, K, V].
    """

    def body(carry: Array, token: tuple) -> tuple[Array, Array]:
        q_t, coefficients_t, valid_t, reset_t = token
        before = carry
        if reset_t is not None:
            carry = jnp.where(reset_t[:, None, None, None], 0, carry)
        out, after = step(carry, q_t, coefficients_t, scale, precision)
        if valid_t is not None:
            out = jnp.where(valid_t[:, None, None], out, 0)
            after = jnp.where(valid_t[:, None, None, None], after, before)
        return after, out

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, coefficients, valid, reset))
    state, out = lax.scan(body, state, tokens)
    return jnp.moveaxis(out, 0, 1), state
