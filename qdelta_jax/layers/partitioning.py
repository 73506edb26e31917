"""Where parameters and activations lie on a mesh.

Modules name the axes of their arrays by what they mean ("embed", "heads", ..); this file alone says which
mesh axes those are. Without a mesh nothing happens. Inside `jax.set_mesh(mesh)` new parameters are created
sharded, and `constrain` places activations. The mesh must have Auto axes, so that the compiler propagates
shardings:

    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["LOGICAL_TO_MESH", "constrain", "divisions", "partitioned", "shardings", "spec"]

Axes = tuple[str | None, ...]

LOGICAL_TO_MESH: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": None,
    "mlp": None,
    "vocab": None,
}
"""Logical axis -> mesh axes. "embed" is the hidden width, "heads" is heads times their dimension."""


def spec(axes: Axes, shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """The PartitionSpec of an array of that shape whose axes have these logical names.

    A mesh axis that the mesh lacks, that is Manual (inside `shard_map`), or whose size does not divide the
    array's axis, is left out.

    >>> mesh = jax.sharding.AbstractMesh((1, 2), ("data", "fsdp"))
    >>> tuple(spec(("embed", "heads"), (8, 6), mesh)), tuple(spec(("embed",), (7,), mesh))
    (('fsdp', None), (None,))

    Raises:
        ValueError: a logical name that LOGICAL_TO_MESH lacks, or not one name per axis.
    """
    if len(axes) != len(shape):
        raise ValueError(f"axes: got {axes}, want one name (or None) for each axis of shape {shape}")
    return PartitionSpec(*(_mesh_axes(name, size, mesh) for name, size in zip(axes, shape, strict=True)))


def _mesh_axes(name: str | None, size: int, mesh: Any) -> str | tuple[str, ...] | None:
    if name is None:
        return None
    if name not in LOGICAL_TO_MESH:
        raise ValueError(f"axes: got the logical axis {name!r}, want one of {sorted(LOGICAL_TO_MESH)}")
    target = LOGICAL_TO_MESH[name]
    names = (target,) if isinstance(target, str) else target or ()
    kept: tuple[str, ...] = ()
    manual = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Manual}
    for axis in names:
        if axis in mesh.shape and axis not in manual and size % mesh.shape[axis] == 0:
            kept, size = (*kept, axis), size // mesh.shape[axis]
    return None if not kept else kept if isinstance(target, tuple) else kept[0]


def constrain(x: Array, axes: Axes) -> Array:
    """x placed by its logical axes on the mesh of `jax.set_mesh`; x itself where there is none.

    Raises:
        ValueError: the mesh has axes that are not Auto.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not _auto(mesh):
        return x
    place = lax.with_sharding_constraint if isinstance(x, jax.core.Tracer) else jax.device_put
    return place(x, spec(axes, x.shape, mesh))


def divisions(name: str, size: int) -> int:
    """Equal parts into which `constrain` cuts an array's axis of that logical name and size; 1 without a mesh.

    Raises:
        ValueError: the mesh has axes that are not Auto.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not _auto(mesh):
        return 1
    axes = _mesh_axes(name, size, mesh) or ()
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def _auto(mesh: Any) -> bool:
    """Whether there is an Auto axis to shard over; an Explicit axis that we would use is refused."""
    used = {
        axis for target in LOGICAL_TO_MESH.values() for axis in ((target,) if isinstance(target, str) else target or ())
    }
    types = {name: kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if name in used}
    if AxisType.Explicit in types.values():
        raise ValueError(
            f"mesh: got the axis types {types}, want Auto: "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
        )
    return AxisType.Auto in types.values()


def partitioned(initializer: Callable[..., Array], axes: Axes) -> Callable[..., Any]:
    """The same initializer, its result named by logical axes and, inside `jax.set_mesh`, sharded.

    The parameter carries `out_sharding` (the logical axes) and `sharding_rules`, which
    `nnx.get_partition_spec` and transforms that add an axis understand: the same with and without a mesh.

    >>> kernel = nnx.Param(partitioned(nnx.initializers.zeros, ("embed", None))(jax.random.key(0), (4, 2)))
    >>> tuple(nnx.get_partition_spec({"kernel": kernel})["kernel"].get_value())
    ('fsdp', None)
    """

    def initialize(*args: Any) -> Array:
        return constrain(initializer(*args), axes)

    # Flax itself would refuse to create an annotated variable without a mesh, hence eager_sharding=False.
    return nnx.with_metadata(
        initialize, out_sharding=axes, sharding_rules=tuple(LOGICAL_TO_MESH.items()), eager_sharding=False
    )


def shardings(tree: Any, mesh: Any) -> Any:
    """A tree like `tree` (a module, or a state of variables) with a NamedSharding for each array.

    Arrays without logical axes (counters, random keys) are replicated. For `jax.device_put` and checkpoints.
    """

    def one(x: Any) -> Any:
        if not isinstance(x, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        axes = x.get_metadata("out_sharding", None)
        shape = getattr(x.get_value(), "shape", ())
        return x.replace(NamedSharding(mesh, spec(axes, shape, mesh) if axes else PartitionSpec()))

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
