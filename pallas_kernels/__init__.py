"""GPU kernels for the recurrence of `qdelta_jax`, for Hopper.

This package takes and returns arrays and imports jax only, never `qdelta_jax`.
"""

from pallas_kernels.forward import Forward, forward

__all__ = ["Forward", "forward"]
