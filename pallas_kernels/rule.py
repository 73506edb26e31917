"""A rule's own function, evaluated on tiles inside a kernel.

The function (q, k, v, **gates) -> (k, e, z, log_decay) is traced once per output to a jaxpr, of which only the
equations that the output needs are kept: `e` then loads no values and `z` no keys. A gate with one number per head is
a vector with one number per row; it is broadcast where an equation widens it.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core as jcore

from pallas_kernels.tiles import C, rows

OUTPUTS = ("k", "e", "z", "log_decay")

ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "clamp",
        "convert_element_type",
        "copy",
        "cos",
        "div",
        "eq",
        "exp",
        "exp2",
        "ge",
        "gt",
        "integer_pow",
        "le",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tanh",
        "xor",
    ]
)
"""What a rule's function may use: each lowers for a GPU, on tiles and on vectors."""

LONGER: dict[str, Callable[[Array], Array]] = {
    "log": lambda x: _log(x, x - 1.0),
    "log1p": lambda x: _log(1.0 + x, x),
    "expm1": lambda x: _expm1(x),
    "one_minus_square": lambda x: 1.0 - x * x,
}
"""Operations made of those: a GPU's own logarithm and exponential are exact to 2^-22 of 1, which is nothing next to a
logarithm of 1 + 1e-6."""


def _log(x: Array, beyond: Array) -> Array:
    """log(x), x = 1 + beyond: near 1 as 2 atanh(beyond / (2 + beyond)), by five terms of its series."""
    near = (beyond > -0.3) & (beyond < 0.5)
    s = jnp.where(near, beyond, 0.0) / (2.0 + jnp.where(near, beyond, 0.0))
    square = s * s
    series = 2.0 * s * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return jnp.where(near, series, jnp.log(x))


def _expm1(x: Array) -> Array:
    """exp(x) - 1, near 0 by its series."""
    near = jnp.abs(x) < 0.5
    small = jnp.where(near, x, 0.0)
    series = jnp.ones_like(x)
    for n in range(8, 1, -1):
        series = 1.0 + series * small / n
    return jnp.where(near, small * series, jnp.exp(x) - 1.0)


def _reciprocal_power(x: Array, power: int) -> Array:
    """x^-power; power: -1 or more. The kernels have powers from the second on."""
    if power < 0:
        return x
    if power == 0:
        return jnp.ones_like(x)
    return 1.0 / (x if power == 1 else lax.integer_pow(x, power))


VIEWS = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
CALLS = frozenset(("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"))


GATE = "gate:"
"""Before the names of gates inside the kernels, where arrays go by name."""


@lru_cache(maxsize=256)
def apart(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The same rule for gates whose names begin with `GATE`: none is taken for one of the kernels' own arrays."""

    def renamed(q: Any, k: Any, v: Any, **gates: Any) -> Any:
        return function(q, k, v, **{n: gates[GATE + n] for n in names})

    return renamed


def gates_apart(gates: Mapping[str, Any]) -> dict[str, Any]:
    return {GATE + n: x for n, x in gates.items()}


class Unsupported(Exception):
    """A rule that cannot run inside a kernel; the message says why."""


def live(jaxpr: Any) -> tuple[list[Any], set[Any]]:
    """The equations that the outputs need, in order, and the variables they need."""
    need = {v for v in jaxpr.outvars if not isinstance(v, jcore.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if need & set(equation.outvars):
            kept.append(equation)
            need |= {v for v in equation.invars if not isinstance(v, jcore.Literal)}
    return kept[::-1], need


def inner(equation: Any) -> Any:
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    return inner if hasattr(inner, "jaxpr") else jcore.ClosedJaxpr(inner, ())


def _thin(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] == 1


def _plain(const: Any) -> Any:
    """A captured number; kernels can capture no arrays."""
    if jnp.ndim(const) or isinstance(const, jax.core.Tracer):
        raise Unsupported(f"its function captures an array of shape {jnp.shape(const)}: pass it as a gate")
    return np.asarray(const)[()]


def check(jaxpr: Any, name: str, sums: bool = False) -> None:
    """Refuses what cannot be evaluated on tiles. sums: over channels are allowed."""
    for equation in live(jaxpr)[0]:
        primitive = equation.primitive.name
        if primitive in CALLS:
            check(inner(equation).jaxpr, name, sums)
            for const in inner(equation).consts:
                _plain(const)
        elif primitive in VIEWS:
            (x,), (out,) = equation.invars, equation.outvars
            kept = x.aval.shape == () or (len(out.aval.shape) in (1, 2) and out.aval.shape[0] == x.aval.shape[0])
            if not kept:
                raise Unsupported(f"its {name} reshapes {x.aval.shape} to {out.aval.shape}")
        elif sums and primitive == "reduce_sum" and equation.params["axes"] == (1,):
            continue
        elif primitive not in ELEMENTWISE and primitive not in LONGER:
            raise Unsupported(f"its {name} uses the operation {primitive!r}, which the kernels do not have")


def bound(jaxpr: Any, consts: list[Any], args: list[Any]) -> dict[Any, Any]:
    """The values of the variables before the first equation."""
    return {
        **dict(zip(jaxpr.constvars, map(_plain, consts), strict=True)),
        **dict(zip(jaxpr.invars, args, strict=True)),
    }


def evaluate(jaxpr: Any, consts: list[Any], args: list[Any], keep: Any = None) -> list[Any]:
    """The outputs on tiles. keep: a mask of the channels that sums go over, all by default."""
    values = bound(jaxpr, consts, args)

    def read(v: Any) -> Any:
        return v.val if isinstance(v, jcore.Literal) else values.get(v)

    for equation in live(jaxpr)[0]:
        name, shape = equation.primitive.name, equation.outvars[0].aval.shape
        inputs = [(read(v), v.aval.shape) for v in equation.invars]
        if name in CALLS:
            called = inner(equation)
            outs = evaluate(called.jaxpr, called.consts, [x for x, _ in inputs], keep)
        elif name in VIEWS:
            outs = [_view(*inputs[0], shape)]
        else:
            outs = [apply(equation, inputs, shape, keep)]
        values.update(zip(equation.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _view(x: Any, was: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    if was == ():
        return lax.broadcast(jnp.asarray(x), (C,) if len(shape) == 1 or _thin(shape) else (C, C))
    if jnp.ndim(x) == 1 and len(shape) == 2 and not _thin(shape):
        return rows(x, C)
    return x


def apply(equation: Any, inputs: list[tuple[Any, tuple[int, ...]]], shape: tuple[int, ...], keep: Any = None) -> Any:
    if equation.primitive.name == "reduce_sum":
        # Over the channels; a vector with one number per row is that sum already.
        ((x, _),) = inputs
        if jnp.ndim(x) != 2:
            return x
        return jnp.sum(x if keep is None else jnp.where(keep, x, 0.0), axis=1)
    wide = [rows(x, C) if _thin(was) and len(shape) == 2 and not _thin(shape) else x for x, was in inputs]
    name = equation.primitive.name
    if name == "add_any":
        return lax.add(*wide)
    if name in ("copy", "stop_gradient"):
        return wide[0]
    if name in LONGER:
        return LONGER[name](wide[0])
    if name == "integer_pow" and equation.params["y"] < 2:
        return _reciprocal_power(wide[0], -equation.params["y"])
    out = equation.primitive.bind(*wide, **equation.params)
    return out[0] if isinstance(out, list | tuple) else out


class TiledRule:
    """The outputs of a rule's function as separate functions of tiles.

    Args:
        function: (q, k, v, **gates) -> (k, e or None, z, log_decay or None), token-wise and channel-wise.
        axes: for each gate, "head", "key" or "value".
        key_dim, value_dim: K and V, for a function that looks at its arguments' shapes.
    Attributes:
        arguments: for each output, the names that it reads.
        absent: the outputs that are None.
        decay_axis: "head", "key" or None.
    Raises:
        Unsupported: the function cannot be evaluated on tiles.
    """

    def __init__(self, function: Callable[..., Any], axes: Mapping[str, str], key_dim: int, value_dim: int) -> None:
        self.names = ["q", "k", "v", *axes]
        self.axis = {"q": "key", "k": "key", "v": "value", **axes}
        if key_dim == 1 or value_dim == 1:
            raise Unsupported("a head of one channel looks like a gate with one number per head")
        if key_dim == value_dim:
            # Two widths that differ tell a rule that mixes key with value channels apart.
            self._trace(function, {"head": 1, "key": key_dim, "value": value_dim + 1})
        self._trace(function, {"head": 1, "key": key_dim, "value": value_dim})

    def _trace(self, function: Callable[..., Any], width: Mapping[str, int]) -> None:
        shapes = [jax.ShapeDtypeStruct((C, width[self.axis[n]]), jnp.float32) for n in self.names]
        self.jaxprs: dict[str, Any] = {}
        self.function, self.shapes = function, shapes
        self.arguments: dict[str, list[str]] = {}
        self.absent = set()
        self.decay_axis = None
        for index, output in enumerate(OUTPUTS):

            def part(*args: Array, index: int = index) -> Any:
                given = dict(zip(self.names, args, strict=True))
                return tuple(function(given.pop("q"), given.pop("k"), given.pop("v"), **given))[index]

            try:
                closed = jax.make_jaxpr(part)(*shapes)
            except (TypeError, ValueError) as error:
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise Unsupported(
                    f"it cannot be traced with K = {width['key']} and V = {width['value']}: {first}"
                ) from error
            if not closed.jaxpr.outvars:
                self.absent.add(output)
                self.arguments[output] = []
                continue
            jaxpr = closed.jaxpr
            for const in closed.consts:
                _plain(const)
            check(jaxpr, output)
            need = live(jaxpr)[1]
            self.jaxprs[output] = closed
            self.arguments[output] = [n for n, v in zip(self.names, jaxpr.invars, strict=True) if v in need]
            shape: Any = jaxpr.outvars[0].aval
            if output == "log_decay":
                self.decay_axis = "head" if shape.shape[-1] == 1 else "key"
            for name in self.arguments[output]:
                allowed = {"z": ("head", "value"), "log_decay": ("head", "key")}.get(output, ("head", "key"))
                if self.axis[name] not in allowed:
                    raise Unsupported(f"its {output} reads {name}, a number per {self.axis[name]} channel")
                if output == "log_decay" and name in ("q", "k"):
                    raise Unsupported(f"its log_decay reads {name}, and the kernels make it of gates alone")
        if self.decay_axis == "head" and any(self.axis[n] != "head" for n in self.arguments["log_decay"]):
            raise Unsupported("its log_decay, one number per head, reads more than gates with one number per head")

    def __call__(self, output: str, tiles: Mapping[str, Array]) -> Array:
        """One output of tiles by name: [C, width] arrays, [C] vectors for gates with one number per head."""
        closed = self.jaxprs[output]
        return evaluate(closed.jaxpr, closed.consts, [tiles.get(n) for n in self.names])[0]
