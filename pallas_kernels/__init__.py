"""GPU kernels for the recurrence of `qdelta_jax`. There are none yet: `qdelta_jax` runs everything through XLA.

This package takes and returns arrays and imports jax only, never `qdelta_jax`.
"""
