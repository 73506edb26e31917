"""Derivatives that do not exist, refused by name rather than by an error from deep inside JAX.

Both functions are the identity of a pytree of arrays, for the arguments of something that cannot be differentiated so.
"""

from functools import partial
from typing import Any

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def no_derivative(tree: Any, message: str) -> Any:
    """Raises NotImplementedError when it is differentiated."""
    return jax.tree.map(partial(_value.bind, message=message), tree)


def reverse_mode_only(tree: Any, message: str) -> Any:
    """Raises NotImplementedError when it is differentiated in forward mode: its tangents can be transposed, for a
    gradient, but not computed."""
    return jax.tree.map(lambda x: _with_tangent(message, x), tree)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_tangent(message: str, x: Array) -> Array:
    return x


@_with_tangent.defjvp
def _(message: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], _tangent.bind(tangents[0], message=message)


def _refuse(*_: Any, message: str) -> Any:
    raise NotImplementedError(message)


_tangent = Primitive("reverse_mode_only")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x, message: x)
ad.deflinear2(_tangent, lambda cotangent, *_, message: [cotangent])
batching.defvectorized(_tangent)
mlir.register_lowering(_tangent, _refuse)

_value = Primitive("no_derivative")
_value.def_impl(lambda x, message: x)
_value.def_abstract_eval(lambda x, message: x)
ad.primitive_jvps[_value] = _refuse
batching.defvectorized(_value)
mlir.register_lowering(_value, lambda context, x, message: [x])
