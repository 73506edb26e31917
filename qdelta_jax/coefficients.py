"""From a call's inputs to the factors of the recurrence, with padding made harmless."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from qdelta_jax.checks import compute_dtype
from qdelta_jax.rules import Coefficients, Rule


def coefficients(
    rule: Rule, q: Array, k: Array, v: Array, gates: Mapping[str, Array], valid: Array | None
) -> tuple[Array, Coefficients]:
    """q and the rule's k, e, z, log_decay, [B, T, HV, ...] in float32 (float64), padding made harmless.

    Padding is replaced before the rule and masked after it, so that nothing in it, NaN included, gets into a value
    or a gradient.
    """
    dtype, heads = compute_dtype(q.dtype), v.shape[2]
    gates = {name: x[..., None] if x.ndim == 3 else x for name, x in gates.items()}  # per head [B,T,H] -> [B,T,H,1]

    def prepare(x: Array) -> Array:
        x = x if valid is None else jnp.where(valid[:, :, None, None], x, 0)
        x = x.astype(dtype)
        return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)

    q, k, v, gates = jax.tree.map(prepare, (q, k, v, gates))
    made = rule(q, k, v, **gates)
    _check_coefficients(rule, made, k, v)
    if valid is not None:
        made = jax.tree.map(lambda x: jnp.where(valid[:, :, None, None], x, 0), made)
    return q, made


def _check_coefficients(rule: Rule, made: Any, k: Array, v: Array) -> None:
    if not isinstance(made, Coefficients):
        raise ValueError(f"rule {rule.name!r}: the function returned {type(made).__name__}, want Coefficients")
    head = (*k.shape[:-1], 1)
    wanted = {"k": [k.shape], "e": [k.shape], "z": [v.shape], "log_decay": [head, k.shape]}
    for name, x in made._asdict().items():
        if x is None and name in ("e", "log_decay"):
            continue
        if getattr(x, "shape", None) not in wanted[name] or x.dtype != k.dtype:
            raise ValueError(
                f"rule {rule.name!r}: {name} has shape {getattr(x, 'shape', None)} and dtype "
                f"{getattr(x, 'dtype', None)}, want {' or '.join(map(str, wanted[name]))} and {k.dtype}"
            )
