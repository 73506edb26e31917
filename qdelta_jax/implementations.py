"""The implementations of `delta_rule`, and which of them a call runs."""

from collections.abc import Mapping
from typing import Any, Literal

from jax import lax

from qdelta_jax import mosaic
from qdelta_jax.checks import check_count, check_precision
from qdelta_jax.rules import Rule, get_rule

__all__ = ["IMPLEMENTATIONS", "Implementation", "resolve_implementation"]

Implementation = Literal["scan", "xla", "mosaic"] | None

IMPLEMENTATIONS = ("scan", "xla", "mosaic")


def resolve_implementation(
    implementation: str | None,
    length: int,
    *,
    rule: str | Rule | None = None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    gates: Mapping[str, Any] | None = None,
    segment_ids: Any = None,
    precision: lax.PrecisionLike = None,
    validate: bool = False,
) -> str:
    """The implementation that a call with this many tokens runs.

    Args:
        implementation: as in `delta_rule`.
        length: tokens, T.
        rule, q, k, v, gates, segment_ids, precision, validate: of the call, `jax.ShapeDtypeStruct` in the place of
            arrays if you like. Whether the kernels ("mosaic") can run depends on them: without q, None never picks
            the kernels, and an explicit name is only checked to be one.

    >>> resolve_implementation(None, 4096), resolve_implementation(None, 1)
    ('xla', 'scan')
    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 512), jnp.bfloat16)
    >>> resolve_implementation(None, 4096, rule="linear_attention", q=x, k=x, v=x)  # "mosaic" takes K, V <= 256
    'xla'

    Raises:
        ValueError: no implementation has that name, or length is no integer of at least 1.
        NotImplementedError: "mosaic" is asked for and cannot run; the message says why.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {implementation!r}, want None or one of {IMPLEMENTATIONS}")
    length = check_count("length", length)
    wanted = implementation == "mosaic" or (implementation is None and length > 1 and not validate)
    if q is None or not wanted:
        return implementation or ("scan" if length == 1 else "xla")
    if rule is None or k is None or v is None:
        raise ValueError("rule, k and v: got None, want those of the call that q belongs to")
    precision = check_precision(precision, q.dtype)
    segmented = segment_ids is not None
    reason = mosaic.unsupported(get_rule(rule), q, k, v, gates or {}, precision=precision, segmented=segmented)
    if reason is not None and implementation == "mosaic":
        raise NotImplementedError(f"implementation='mosaic' cannot run here: {reason}")
    return "mosaic" if reason is None else "xla"
