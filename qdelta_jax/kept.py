"""The name under which a checkpoint policy finds what is worth keeping."""

from jax import Array
from jax.ad_checkpoint import checkpoint_name

__all__ = ["ACTIVATION", "activation"]

ACTIVATION = "activation"


def activation(x: Array) -> Array:
    """x, marked: `remat="activations"` keeps it, other policies compute it again.

    For what a pass over memory makes and the gradient reads: results (and weights) in the model's dtype, and the
    inverse root mean squares of norms. The float32 numbers between two of them fuse with the gradient and are never
    marked.
    """
    return checkpoint_name(x, ACTIVATION)
