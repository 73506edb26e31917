"""The kernel for (I + L)^-1 against NumPy in float64: random matrices, and keys so correlated that errors add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels import ON_GPU
from tolerances import INVERSE, SAME, assert_close, relative_error

from pallas_kernels import unit_lower_inverse

INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)

COUNTS = {16: 5, 32: 3, 64: 2, 128: 2}
"""Matrices of each size: those of the small ones do not fill a tile of 64."""


def matrices(size: int, kind: str) -> np.ndarray:
    """L [n, C, C] in float32, NaN on and above the diagonal."""
    random, count = np.random.default_rng(size), COUNTS[size]
    if kind == "random":
        lower = 0.3 * random.normal(size=(count, size, size))
    else:
        beta, spread = {"erased 1.9 times": (1.9, 0.1), "erased twice": (2.0, 1.0)}[kind]
        keys = random.normal(size=(count, 1, 32)) + spread * random.normal(size=(count, size, 32))
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        lower = beta * keys @ keys.swapaxes(1, 2)
    return np.where(np.tri(size, k=-1, dtype=bool), lower, np.nan).astype(np.float32)


def inverse(lower: np.ndarray) -> np.ndarray:
    return np.linalg.inv(np.eye(lower.shape[-1]) + np.tril(np.nan_to_num(lower).astype(np.float64), -1))


@pytest.mark.core
@pytest.mark.parametrize(
    ("size", "kind", "accurate"),
    [
        *((size, "erased 1.9 times", True) for size in COUNTS),
        (64, "random", True),
        (128, "erased twice", True),
        (16, "erased 1.9 times", False),
        (128, "erased 1.9 times", False),
    ],
)
def test_inverse(size, kind, accurate):
    lower = matrices(size, kind)
    got = np.asarray(unit_lower_inverse(jnp.asarray(lower), accurate=accurate, interpret=INTERPRET))
    want = inverse(lower)
    error = np.abs(got - want).max() / np.abs(want).max()
    assert got.dtype == np.float32
    assert error <= INVERSE[accurate]
    assert np.all(np.triu(got, 1) == 0)
    np.testing.assert_array_equal(np.diagonal(got, axis1=1, axis2=2), np.ones(got.shape[:2]))


def test_half_precision_and_batches_and_vmap():
    lower = jnp.asarray(matrices(64, "random"), jnp.bfloat16)
    run = lambda x: unit_lower_inverse(x, interpret=INTERPRET)  # noqa: E731
    want = run(lower)
    assert np.abs(want - inverse(np.asarray(lower, np.float32))).max() <= INVERSE[True] * np.abs(want).max()
    assert_close(run(lower[:, None]), want[:, None], SAME)
    assert_close(jax.vmap(run, in_axes=1)(lower[:, None]), want[None], SAME)
    assert run(lower[:0]).shape == (0, 64, 64)


def test_derivatives():
    """Forward and reverse mode."""
    lower = jnp.asarray(np.nan_to_num(matrices(16, "random")))
    direction = jnp.asarray(np.random.default_rng(1).normal(size=lower.shape), jnp.float32)
    f = lambda x: unit_lower_inverse(x, interpret=INTERPRET)  # noqa: E731
    plain = lambda x: jnp.linalg.inv(jnp.eye(16)[None] + jnp.tril(x, -1))  # noqa: E731
    got, want = (jax.jvp(g, (lower,), (direction,))[1] for g in (f, plain))
    assert_close(got, want, INVERSE[True])
    got, want = (jax.vjp(g, lower)[1](direction)[0] for g in (f, plain))
    assert relative_error(got, want) <= INVERSE[True]


@pytest.mark.parametrize(
    ("lower", "message"),
    [
        (
            jnp.zeros((2, 48, 48)),
            r"lower: got shape \(2, 48, 48\), want \[..., C, C\] with C one of \(16, 32, 64, 128\)",
        ),
        (jnp.zeros((16, 32)), "lower: got shape"),
        (jnp.zeros(16), "lower: got shape"),
        (jnp.zeros((16, 16), jnp.int32), "lower: got dtype int32, want float32, bfloat16 or float16"),
    ],
)
def test_bad_input(lower, message):
    with pytest.raises(ValueError, match=message):
        unit_lower_inverse(lower)


@pytest.mark.skipif(ON_GPU, reason="runs there")
def test_another_machine_is_refused():
    with pytest.raises(NotImplementedError, match="unit_lower_inverse: the kernels are for Hopper GPUs"):
        unit_lower_inverse(jnp.zeros((16, 16)))
