"""Every kernel lowers for a GPU, which needs none: its shared memory fits, and it uses nothing that Hopper lacks.

What runs in the interpreter need not lower, and the other way round.
"""

from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import pytest
from cases import CORE, RULE_NAMES, Shape, gate_shape
from kernels import any_machine

import pallas_kernels
from qdelta_jax import RULES, delta_rule

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16

SIZES = {
    BF16: [(64, 64), (16, 128), (32, 256), (96, 32), (128, 96), (192, 16), (256, 192), (128, 128)],
    F32: [(192, 64), (96, 192), (64, 128), (128, 96), (16, 256)],
    F16: [(256, 256), (192, 32)],
}
"""K and V. In float32 the kernels that erase go up to K = 128."""

NAMES = {BF16: RULE_NAMES, F32: ("linear_attention", "gla", "q_delta", "q_delta2"), F16: ("gla", "q_delta")}
"""In float32, rules whose kernels hold what those of the other rules do."""

CASES = [
    pytest.param(
        name,
        dtype,
        *size,
        marks=[pytest.mark.core] if name in CORE else [],
        id=f"{name}-{jnp.dtype(dtype).name}-{size[0]}-{size[1]}",
    )
    for dtype, sizes in SIZES.items()
    for name, size in zip(NAMES[dtype], cycle(sizes), strict=False)
]


def arguments(name, shape: Shape, dtype):
    """Shapes and dtypes of q, k, v and the gates; log_decay in float32."""
    batch, length, heads, value_heads, key_dim, value_dim = shape
    q = jax.ShapeDtypeStruct((batch, length, heads, key_dim), dtype)
    v = jax.ShapeDtypeStruct((batch, length, value_heads, value_dim), dtype)
    dtypes = {gate: F32 if gate == "log_decay" else dtype for gate in RULES[name].gates}
    return q, q, v, {n: jax.ShapeDtypeStruct(gate_shape(name, n, shape), d) for n, d in dtypes.items()}


def lower(f, *arguments) -> str:
    text = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


def run(name, segmented, *arguments):
    *tensors, ids = arguments
    return delta_rule(*tensors[:3], name, tensors[3], segment_ids=ids if segmented else None, implementation="mosaic")


@pytest.mark.parametrize(("name", "dtype", "key_dim", "value_dim"), CASES)
def test_every_rule(name, dtype, key_dim, value_dim):
    """With segments every other time."""
    shape = Shape(1, 200, 1, 2, key_dim, value_dim)
    segmented = (key_dim + value_dim) % 3 == 0
    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    with any_machine():
        lower(partial(run, name, segmented), *arguments(name, shape, dtype), ids)


@pytest.mark.parametrize("name", ["q_delta"])
def test_gradient_of_a_batch_of_calls(name):
    """The kernels that save states, under vmap, with 64-bit numbers switched on around them."""
    shape = Shape(2, 4096, 2, 2, 128, 128)
    loss = lambda *a: jnp.sum(run(name, False, *a, None)[0].astype(F32))  # noqa: E731
    with any_machine(), jax.enable_x64(True):
        lower(jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3))), *arguments_of_a_stack(name, shape))


def arguments_of_a_stack(name, shape):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), arguments(name, shape, BF16))


@pytest.mark.parametrize(("size", "dtype"), [(16, F32), (16, BF16), (32, BF16), (64, F32), (128, F32)])
def test_inverse(size, dtype):
    with any_machine():
        lower(pallas_kernels.unit_lower_inverse, jax.ShapeDtypeStruct((3, 5, size, size), dtype))
