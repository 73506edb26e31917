"""Kernels inside `jax.shard_map`, where the type of an array says over which mesh axes it varies."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun


def varying(tree: Any) -> frozenset[Any]:
    """The mesh axes over which any of the arrays varies; none outside `shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))


def vary(x: Array, axes: frozenset[Any]) -> Array:
    """The same array, typed as one that varies over these axes too."""
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def without_axes(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), traced without those axes, which a kernel cannot do with; its results get them all."""
    axes = varying(arguments)
    if not axes:
        return function(*arguments)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    # Within one jit: what is evaluated below is that call, not the equations inside, which would see the types again.
    jaxpr, out = jax.make_jaxpr(jax.jit(function), return_shape=True)(*shapes)
    results = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(out), [vary(x, axes) for x in results])
