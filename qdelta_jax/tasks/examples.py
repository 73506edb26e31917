"""What every synthetic task returns, and how it is scored."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

__all__ = ["Examples", "accuracy"]


class Examples(NamedTuple):
    """At position t of a row, having read inputs[0..t], a model is asked for targets[t] where mask[t] is true.

    inputs [B, T] int32 and targets [B, T] int32 are token ids; targets are already in place (nothing is to be
    shifted), and 0 where nothing is asked. mask [B, T] bool says which positions count, in a loss and in
    `accuracy`. A NamedTuple is a pytree: `jax.tree.map(lambda x: x[rows], examples)` takes rows of all three.
    """

    inputs: Int32[np.ndarray, "b t"]
    targets: Int32[np.ndarray, "b t"]
    mask: Bool[np.ndarray, "b t"]


def accuracy(predictions: Any, examples: Examples) -> float:
    """sum(mask * (predictions == targets)) / sum(mask): the fraction of the positions that count.

    Args:
        predictions: [B, T] integers, NumPy or JAX (`logits.argmax(-1)`).
        examples: with the same [B, T].
    Raises:
        ValueError: the shapes differ, or no position counts.

    >>> examples = Examples(np.array([[5, 6]], np.int32), np.array([[1, 2]], np.int32), np.array([[True, True]]))
    >>> accuracy(np.array([[1, 3]]), examples)
    0.5
    """
    predictions, mask = np.asarray(predictions), np.asarray(examples.mask)
    if predictions.shape != mask.shape:
        raise ValueError(f"predictions: got shape {predictions.shape}, want [B,T] = {mask.shape} as in examples")
    if not mask.any():
        raise ValueError("examples: got a mask without any true position, want at least one")
    return float(np.mean((predictions == np.asarray(examples.targets))[mask]))
