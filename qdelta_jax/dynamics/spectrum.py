"""Spectra: of a state, how many directions it uses; of the transitions, what they can do to it."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from qdelta_jax.dynamics.call import Call, factors, make_call
from qdelta_jax.rules import Rule

__all__ = ["effective_rank", "singular_values", "spectral_radius", "stable_rank", "transition_eigenvalues"]


def singular_values(state: Array) -> Array:
    """sigma_1 >= sigma_2 >= .. >= 0 with S = U Diag(sigma) W^T.

    Args:
        state: [..., K, V], float32 or float64.
    Returns:
        [..., min(K, V)] in state's dtype.
    Raises:
        ValueError: state has fewer than two axes or another dtype.
    """
    _check_state(state)
    return _singular_values(state)


def effective_rank(state: Array) -> Array:
    """exp(-sum_i p_i log p_i) with p = sigma / sum(sigma): r for r equal singular values, between 1 and the rank.

    Args:
        state: [..., K, V], float32 or float64.
    Returns:
        [...] in state's dtype; 0 for a state of zeros.
    Raises:
        ValueError: as `singular_values`.

    >>> import jax.numpy as jnp
    >>> effective_rank(jnp.diag(jnp.array([2.0, 2.0, 2.0, 0.0]))).round(4).tolist()
    3.0

    Source: Roy and Vetterli, The effective rank, EUSIPCO 2007.
    """
    _check_state(state)
    return _effective_rank(state)


@jax.jit
def _singular_values(state: Array) -> Array:
    return jnp.linalg.svd(state, compute_uv=False)


@jax.jit
def _effective_rank(state: Array) -> Array:
    sigma = _singular_values(state)
    total = jnp.sum(sigma, axis=-1, keepdims=True)
    p = sigma / jnp.where(total > 0, total, 1)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)
    return jnp.where(total[..., 0] > 0, jnp.exp(entropy), 0)


def stable_rank(state: Array) -> Array:
    """|S|_F^2 / |S|_2^2 = sum_i sigma_i^2 / sigma_1^2.

    Args:
        state: [..., K, V], float32 or float64.
    Returns:
        [...] in state's dtype; 0 for a state of zeros.
    Raises:
        ValueError: as `singular_values`.

    Source: Rudelson and Vershynin, arXiv math/0503442.
    """
    _check_state(state)
    return _stable_rank(state)


@jax.jit
def _stable_rank(state: Array) -> Array:
    sigma = _singular_values(state)
    largest = sigma[..., :1]
    share = sigma / jnp.where(largest > 0, largest, 1)
    return jnp.sum(share**2, axis=-1)


def transition_eigenvalues(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    segment_ids: Array | None = None,
) -> Array:
    """The eigenvalues of A_t = (I - k_t e_t^T) Diag(exp(log_decay_t)), the largest magnitude first.

    With a decay alpha per head they are alpha, K - 1 times, and alpha (1 - k . e). With one per channel they are
    computed (on a CPU in any case; on a GPU where JAX has `jnp.linalg.eigvals`), and may come in complex pairs. Tokens
    do not depend on one another: give every tenth of q, k, v and the gates to look at fewer.

    Args:
        q, k, v, rule, gates, segment_ids: as in `qdelta_jax.delta_rule`.
    Returns:
        [B, T, HV, K] complex64 (complex128 for float64 inputs); 1 in padding, which leaves the state alone.
    Raises:
        ValueError: as `delta_rule`.

    Source: arXiv 2411.12537 (negative eigenvalues).
    """
    call, which = make_call(q, k, v, rule, gates, segment_ids=segment_ids)
    return _eigenvalues(call, which)


def spectral_radius(
    q: Array,
    k: Array,
    v: Array,
    rule: str | Rule,
    gates: Mapping[str, Array] | None = None,
    *,
    segment_ids: Array | None = None,
) -> Array:
    """max |lambda| over the eigenvalues of A_t = (I - k_t e_t^T) Diag(exp(log_decay_t)).

    With a decay alpha per head this is alpha max(1, |1 - k . e|) (alpha |1 - k . e| for K = 1).

    Args:
        q, k, v, rule, gates, segment_ids: as in `qdelta_jax.delta_rule`.
    Returns:
        [B, T, HV] float32 (float64 for float64 inputs); 1 in padding.
    Raises:
        ValueError: as `delta_rule`.

    >>> import jax.numpy as jnp
    >>> k = jnp.array([0.6, 0.8]).reshape(1, 1, 1, 2)
    >>> float(spectral_radius(k, k, k, "delta_net", {"beta": jnp.full((1, 1, 1), 2.5)})[0, 0, 0])
    1.5

    Source: as `transition_eigenvalues`.
    """
    call, which = make_call(q, k, v, rule, gates, segment_ids=segment_ids)
    return _radius(call, which)


@partial(jax.jit, static_argnames=("rule",))
def _radius(call: Call, rule: Rule) -> Array:
    _, (k, e, _, log_decay), _, _ = factors(call, rule)
    if log_decay is not None and _per_channel(k, log_decay):
        if e is not None:
            return jnp.max(jnp.abs(_eigenvalues(call, rule)), axis=-1)
        return jnp.max(jnp.exp(log_decay), axis=-1)
    radius = jnp.ones(k.shape[:-1], k.dtype)
    if e is not None:
        along = jnp.abs(1 - jnp.sum(k * e, axis=-1))
        radius = along if k.shape[-1] == 1 else jnp.maximum(radius, along)
    return radius if log_decay is None else jnp.exp(log_decay[..., 0]) * radius


@partial(jax.jit, static_argnames=("rule",))
def _eigenvalues(call: Call, rule: Rule) -> Array:
    _, (k, e, _, log_decay), _, _ = factors(call, rule)
    decay = jnp.ones_like(k) if log_decay is None else jnp.broadcast_to(jnp.exp(log_decay), k.shape)
    if e is None:
        values = decay
    elif _per_channel(k, log_decay):
        return _sorted(lax.map(lambda row: _eigenvalues_of(*row), (k, e, decay)))
    else:
        along = 1 - jnp.sum(k * e, axis=-1, keepdims=True)
        values = decay * jnp.concatenate([along, jnp.ones_like(k[..., 1:])], axis=-1)
    return _sorted(lax.complex(values, jnp.zeros_like(values)))


def _per_channel(k: Array, log_decay: Array | None) -> bool:
    return log_decay is not None and log_decay.shape[-1] != 1 and k.shape[-1] != 1


def _eigenvalues_of(k: Array, e: Array, decay: Array) -> Array:
    """Of Diag(decay) - k (decay e)^T, a row of the batch: [T, HV, K] to the same, complex; one token at a time."""

    def one(token: tuple[Array, Array, Array]) -> Array:
        k, e, decay = token
        eye = jnp.eye(k.shape[-1], dtype=k.dtype)[None]
        return jnp.linalg.eigvals((eye - k[..., :, None] * e[..., None, :]) * decay[..., None, :])

    return lax.map(one, (k, e, decay))


def _sorted(values: Array) -> Array:
    order = jnp.argsort(-jnp.abs(values), axis=-1)
    return jnp.take_along_axis(values, order, axis=-1)


def _check_state(state: Array) -> None:
    if not hasattr(state, "ndim") or state.ndim < 2:
        got = f"shape {state.shape}" if hasattr(state, "shape") else type(state).__name__
        raise ValueError(f"state: got {got}, want an array [..., K, V]")
    if state.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"state: got dtype {state.dtype}, want float32 or float64")
