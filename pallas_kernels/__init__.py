"""GPU kernels for the recurrence of `qdelta_jax`, for Hopper.

This package takes and returns arrays and imports jax only, never `qdelta_jax`.
"""

from pallas_kernels.backward import Backward, backward, backward_unsupported
from pallas_kernels.convolution import convolution, convolution_unsupported
from pallas_kernels.forward import Forward, batch_axis, forward
from pallas_kernels.inputs import DTYPES
from pallas_kernels.inverse import unit_lower_inverse
from pallas_kernels.supports import GRID, machine, supports

__all__ = [
    "DTYPES",
    "GRID",
    "Backward",
    "Forward",
    "backward",
    "backward_unsupported",
    "batch_axis",
    "convolution",
    "convolution_unsupported",
    "forward",
    "machine",
    "supports",
    "unit_lower_inverse",
]
