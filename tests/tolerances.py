"""Every tolerance of the tests, in one place. All are relative errors |got - want| / |want| in the 2-norm.

A reference that is zero is compared absolutely, by the same number.
"""

import numpy as np

FLOAT64 = 1e-10
"""Golden vectors and everything computed in float64."""

FLOAT32 = 2e-5
"""Golden vectors in float32 (measured worst: about 2e-6)."""

FLOAT32_DECAY = 1e-4
"""The gradient of log_decay under extreme decays in float32: sums that cancel."""

TRIANGULAR = 2e-5
"""The inverse of I + L in float32, its largest error relative to its largest entry, keys nearly equal."""

SAME = 1e-6
"""Two float32 programs of the same sums in another order (vmap against a loop, a split against the whole)."""

BF16 = {"output": 0.005, "state": 0.005, "gradient": 0.008, "decay": 0.02}
"""bfloat16 inputs against float64 on the same rounded inputs, by what is compared."""

KERNEL = {"float32": 1e-4, "bfloat16": 0.005, "float16": 0.005}
"""Output and final state of the GPU kernels, by the dtype of the inputs, against float64 on the same rounded inputs
(measured worst in the interpreter: float32 2e-5, bfloat16 3.3e-3)."""

KERNEL_CORRELATED = {"float32": 3e-4, "bfloat16": 0.01}
"""The same for nearly equal keys that are erased 1.9 times, where errors grow tenfold (measured 1.2e-4 and 5.7e-3).
float32 numbers are two bfloat16 there, 16 bits; two float16 hold 22 bits (5.9e-6) but lose values below 1e-4."""

KERNEL_GRADIENT = 1e-4
"""float32 gradients through the kernels: their states, and the XLA form's backward (measured worst 2.6e-6)."""

KERNEL_GRADIENT_16 = 0.008
"""bfloat16 gradients of the gradient kernels against float64 on the same rounded inputs (measured worst in the
interpreter 5.4e-3)."""

KERNEL_FINER_U = 0.005
"""The same in the interpreter where U is kept in two parts, a rule with a decay per channel that may grow (measured
4.5e-3, and 5.5e-3 with one part)."""

KERNEL_GRADIENT_16_DECAY = 0.02
"""The same for log_decay, whose gradient is a sum of products of both signs (measured 8.8e-3)."""

KERNEL_GROWING = 0.05
"""bfloat16 inputs whose transitions grow to 1e9: what rounds a number early on grows, too (measured in the interpreter:
values 1.8e-2, gradients 2.8e-2)."""

INVERSE = {True: 2e-5, False: 0.02}
"""The kernel for (I + L)^-1, accurate or not: its largest error relative to its largest entry, for keys nearly equal
(measured worst in the interpreter 8.2e-6 and 1.1e-2: float16 parts hold 22 and 11 bits)."""

LAYER = 1e-4
"""float32 layers against the released modules."""

SHARDED = 1e-5
"""Losses on eight devices against one."""


def assert_same_numbers(got, want) -> None:
    """Bit for bit on a CPU. A GPU's matrix library may choose another algorithm for each program: FLOAT32 there."""
    import jax

    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(got, want)
    else:
        assert relative_error(got, want) <= FLOAT32


def relative_error(got, want) -> float:
    """|got - want| / |want|, or |got - want| where want is 0."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    scale = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (scale if scale > 0 else 1.0))


def assert_close(got, want, tolerance: float, name: str = "") -> None:
    """Compares two arrays, or two pytrees of the same structure, leaf by leaf."""
    import jax

    got_leaves, got_tree = jax.tree.flatten_with_path(got)
    want_leaves, want_tree = jax.tree.flatten_with_path(want)
    assert got_tree == want_tree, f"{name}: structure {got_tree}, want {want_tree}"
    for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
        error = relative_error(a, b)
        assert error <= tolerance, f"{name}{jax.tree_util.keystr(path)}: relative error {error:.2e} > {tolerance:.0e}"
