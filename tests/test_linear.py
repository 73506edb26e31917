"""Linear layers and partitioning: with and without a mesh, in mixed precision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from tolerances import SAME, assert_close

from qdelta_jax.layers.linear import Linear, LowRank, product, wider, xavier_uniform
from qdelta_jax.layers.partitioning import constrain, shardings, spec


@pytest.fixture
def mesh(cpu_devices):
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=cpu_devices)


def test_is_its_formula():
    layer = Linear(4, 3, use_bias=True, rngs=nnx.Rngs(0))
    layer.bias.set_value(jnp.arange(3.0))
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        y = layer(jnp.asarray(x))
        low = LowRank(4, 3, 2, rngs=nnx.Rngs(1))
        z = low(jnp.asarray(x))
    assert_close(y, x @ np.asarray(layer.kernel.get_value()) + np.arange(3.0), SAME)
    assert_close(z, x @ np.asarray(low.down.kernel.get_value()) @ np.asarray(low.up.kernel.get_value()), SAME)


@pytest.mark.parametrize(
    ("given", "parameters", "asked", "result"),
    [
        (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16, None, jnp.bfloat16),
        (jnp.float32, jnp.bfloat16, None, jnp.float32),
        (jnp.float16, jnp.bfloat16, None, jnp.float32),
    ],
)
def test_dtypes_of_results_and_gradients(given, parameters, asked, result):
    layer = Linear(4, 3, use_bias=True, dtype=asked, param_dtype=parameters, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 4), given)
    assert layer(x).dtype == result
    assert layer(x, out_dtype=jnp.float32).dtype == jnp.float32
    d_layer, d_x = nnx.grad(lambda m, x: jnp.sum(m(x).astype(jnp.float32)), argnums=(0, 1))(layer, x)
    assert d_x.dtype == given
    assert {leaf.dtype for leaf in jax.tree.leaves(d_layer)} == {jnp.dtype(parameters)}


def test_out_dtype_is_not_rounded_on_the_way():
    layer = Linear(2, 1, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray([[256.0], [1.0]]))
    assert float(layer(jnp.ones((1, 2)), out_dtype=jnp.float32)[0, 0]) == 257.0


@pytest.mark.parametrize("axis", [0, 1])
def test_gradient_of_a_wider_sum_is_rounded_first(axis):
    """All three products have 16-bit operands, and the gradients are those of a sum that is rounded afterwards."""
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 5, 4), "kernel": (4, 3) if axis == 0 else (3, 4), "d_y": (2, 5, 3)}
    x, kernel, d_y = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes.values())
    finer = d_y.astype(jnp.float32) * (1 + 2.0**-12)  # rounds to d_y

    def gradients(out_dtype, d_y):
        return jax.vjp(lambda x, kernel: product(x, kernel, axis=axis, out_dtype=out_dtype), x, kernel)[1](d_y)

    assert_close(gradients(jnp.float32, finer), gradients(None, d_y), 0.0)
    found = jax.make_jaxpr(lambda d_y: gradients(jnp.float32, d_y))(finer).jaxpr.eqns
    operands = [
        {v.aval.dtype for v in equation.invars} for equation in found if equation.primitive.name == "dot_general"
    ]
    assert operands == [{jnp.dtype(jnp.bfloat16)}] * 3
    again = jax.hessian(lambda x: jnp.sum(product(x, kernel, axis=axis, out_dtype=jnp.float32) ** 2))(x)
    assert again.shape == (*x.shape, *x.shape)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_small_kernel_on_a_gpu_has_a_gradient_of_each_row(axis, monkeypatch):
    """Value, gradients and their derivative are what they are in one product."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 50, 8), (8, 5)))
    kernel = kernel if axis == 0 else kernel.T

    def numbers(of_rows):
        f = lambda x, kernel: jnp.sum(jnp.sin(product(x, kernel, axis=axis)))  # noqa: E731
        g = lambda x, kernel: sum(jnp.sum(a**2) for a in jax.grad(f, (0, 1))(x, kernel))  # noqa: E731
        made = jax.make_jaxpr(f)(x, kernel)
        assert ("broadcast_in_dim" in str(made)) == of_rows
        return product(x, kernel, axis=axis), jax.grad(f, (0, 1))(x, kernel), jax.grad(g, (0, 1))(x, kernel)

    with jax.default_matmul_precision("highest"):
        want = numbers(False)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert_close(numbers(True), want, SAME)


def test_wider():
    assert wider(jnp.bfloat16, jnp.float32) == jnp.float32
    assert wider(jnp.float32, jnp.float64) == jnp.float64
    assert wider(jnp.float16) == jnp.float16


def test_xavier_uniform_has_its_bound():
    kernel = xavier_uniform(2**-2.5)(jax.random.key(0), (300, 100), jnp.float32)
    bound = 2**-2.5 * (6 / 400) ** 0.5
    assert 0.99 * bound < float(jnp.max(jnp.abs(kernel))) <= bound


def test_spec_leaves_out_what_does_not_fit():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))
    assert spec(("embed", "heads"), (8, 8), mesh) == PartitionSpec("fsdp", None)
    assert spec(("embed", None), (6, 8), mesh) == PartitionSpec(None, None)
    assert spec(("batch", None), (8, 8), mesh) == PartitionSpec(("data", "fsdp"), None)
    assert spec(("batch", None), (6, 8), mesh) == PartitionSpec(("data",), None)
    assert spec(("embed",), (8,), jax.sharding.AbstractMesh((2,), ("data",))) == PartitionSpec(None)
    with pytest.raises(ValueError, match="got the logical axis 'width'"):
        spec(("width",), (8,), mesh)
    with pytest.raises(ValueError, match=r"axes: got \('embed',\)"):
        spec(("embed",), (8, 8), mesh)


def test_parameters_are_sharded_under_a_mesh_and_the_same_without(mesh):
    plain = Linear(8, 6, use_bias=True, rngs=nnx.Rngs(3))
    with jax.set_mesh(mesh):
        sharded = Linear(8, 6, use_bias=True, rngs=nnx.Rngs(3))
        jitted = nnx.jit(lambda: Linear(8, 6, use_bias=True, rngs=nnx.Rngs(3)))()
    for layer in (sharded, jitted):
        kernel = layer.kernel.get_value()
        assert kernel.sharding.spec[0] == "fsdp"
        assert kernel.addressable_shards[0].data.shape == (2, 6)
        np.testing.assert_array_equal(kernel, plain.kernel.get_value())
        assert nnx.graphdef(layer) == nnx.graphdef(plain)


def test_stacked_layers_and_a_move_to_a_mesh(mesh):
    """Layers made by vmap gain an axis without a name; a tree moves to a mesh by its `shardings`."""

    @nnx.split_rngs(splits=3)
    @partial(nnx.vmap, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stack(rngs):
        return Linear(8, 6, rngs=rngs)

    state = nnx.state(stack(nnx.Rngs(0)))
    moved = jax.device_put(state, shardings(state, mesh))
    assert moved["kernel"].get_value().sharding.spec == PartitionSpec(None, "fsdp", None)
    assert nnx.get_partition_spec(state)["kernel"].get_value() == PartitionSpec(None, "fsdp", None)
    with jax.set_mesh(mesh):
        made = nnx.jit(lambda: stack(nnx.Rngs(0)))()
    np.testing.assert_array_equal(made.kernel.get_value(), state["kernel"].get_value())


def test_constrain(mesh):
    x = jnp.zeros((8, 3))
    assert constrain(x, ("batch", None)) is x
    with jax.set_mesh(mesh):
        assert constrain(x, ("batch", None)).addressable_shards[0].data.shape == (1, 3)
    explicit = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="mesh: got the axis types"):
        constrain(x, ("batch", None))
