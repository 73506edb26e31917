"""Rules whose e is a sum of q and k, each times a number per row: e = a k + b q.

Then e S = a (k S) + b (q S), and the scores of e are sums of those of k and q: e needs no tile of its own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core as jcore

from pallas_kernels.rule import CALLS, VIEWS, TiledRule, apply, bound, inner, live
from pallas_kernels.tiles import C


class Terms(NamedTuple):
    """What k and q are multiplied with: a vector with one number per row, a number, or None where one is absent."""

    k: Any = None
    q: Any = None


class _NotLinear(Exception):
    pass


def terms(rule: TiledRule) -> tuple[str, ...] | None:
    """Which of k and q make up e, in that order; None if e is not such a sum, or the rule's key is not k itself."""
    if "e" in rule.absent or not keeps_keys(rule):
        return None
    vectors = {n: jax.ShapeDtypeStruct((C,), jnp.float32) for n in rule.names if rule.axis[n] == "head"}
    try:
        made = jax.eval_shape(lambda given: _form(rule, given), vectors)
    except _NotLinear:
        return None
    return tuple(n for n, x in made._asdict().items() if x is not None)


def coefficients(rule: TiledRule, vectors: Mapping[str, Array]) -> Terms:
    """a and b of a rule for which `terms` is not None; vectors: its gates with one number per head, [C]."""
    return _form(rule, vectors)


def keeps_keys(rule: TiledRule) -> bool:
    return source(rule, "k") == "k"


def source(rule: TiledRule, output: str) -> str | None:
    """The argument that an output is, as it came; None if it is made of others."""
    jaxpr = rule.jaxprs[output].jaxpr
    return next((n for n, v in zip(rule.names, jaxpr.invars, strict=True) if v is jaxpr.outvars[0]), None)


def _form(rule: TiledRule, vectors: Mapping[str, Array]) -> Terms:
    closed = rule.jaxprs["e"]
    given: dict[str, Any] = {**vectors, "k": Terms(k=1.0), "q": Terms(q=1.0)}
    (made,) = _evaluate(closed.jaxpr, closed.consts, [given.get(n) for n in rule.names])
    if not isinstance(made, Terms):
        raise _NotLinear
    return Terms(*(None if x is None else jnp.asarray(x, jnp.float32) for x in made))


def _evaluate(jaxpr: Any, consts: list[Any], args: list[Any]) -> list[Any]:
    values = bound(jaxpr, consts, args)

    def read(v: Any) -> Any:
        x = v.val if isinstance(v, jcore.Literal) else values.get(v)
        # What is neither k nor q has one number per row, or one in all; a gate with more is not given.
        if x is None or (not isinstance(x, Terms) and jnp.ndim(x) > 1):
            raise _NotLinear
        return x

    for equation in live(jaxpr)[0]:
        name, inputs = equation.primitive.name, [read(v) for v in equation.invars]
        if name in CALLS:
            called = inner(equation)
            outs = _evaluate(called.jaxpr, called.consts, inputs)
        elif name in VIEWS:
            outs = inputs
        elif any(isinstance(x, Terms) for x in inputs):
            outs = [_combine(name, inputs)]
        else:
            outs = [apply(equation, [(x, ()) for x in inputs], ())]
        values.update(zip(equation.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _combine(name: str, inputs: list[Any]) -> Terms:
    """One operation on a sum."""
    x, y = inputs[0], inputs[-1]
    if name in ("copy", "stop_gradient", "convert_element_type"):
        return x
    if name == "neg":
        return Terms(*(None if a is None else -a for a in x))
    if name in ("add", "add_any", "sub") and isinstance(x, Terms) and isinstance(y, Terms):
        return Terms(*(_add(a, b, name == "sub") for a, b in zip(x, y, strict=True)))
    if name == "mul" and not (isinstance(x, Terms) and isinstance(y, Terms)):
        both, factor = (x, y) if isinstance(x, Terms) else (y, x)
        return Terms(*(None if a is None else _times(a, factor) for a in both))
    if name == "div" and not isinstance(y, Terms):
        return Terms(*(None if a is None else a / y for a in x))
    raise _NotLinear


def _add(a: Any, b: Any, subtract: bool) -> Any:
    if b is None:
        return a
    if a is None:
        return -b if subtract else b
    return a - b if subtract else a + b


def _times(a: Any, factor: Any) -> Any:
    return factor if isinstance(a, float) and a == 1.0 else a * factor
