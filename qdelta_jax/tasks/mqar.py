"""Multi-query associative recall: many keys, each asked once, near ones more often than far ones."""

import math

import numpy as np

from qdelta_jax.checks import check_count
from qdelta_jax.tasks.draws import Seed, distinct, distinct_by_weight, generator
from qdelta_jax.tasks.examples import Examples

__all__ = ["mqar"]

FILLERS = ("zero", "random")


def mqar(
    num_examples: int,
    *,
    length: int,
    pairs: int,
    seed: Seed,
    vocab_size: int = 8192,
    power: float = 0.01,
    filler: str = "zero",
) -> Examples:
    """inputs = k_1 v_1 .. k_N v_N, then k_n at position 2N + 2 gap_n for each n; the target at a query is v_n.

    Keys are drawn from [1, vocab/2) and values from [vocab/2, vocab), both without replacement. The gaps of a row
    are drawn one after the other without replacement from the S = (L - 2N)/2 slots, slot i = gap + 1 of 1 .. S with
    probability proportional to power * i^(power - 1). Only queries count. Source: arXiv 2312.04927.

    The usual grid: (L, N) = (64, 4), (128, 8), (256, 16), (512, 64) with 100,000 examples for training and 3,000
    of another seed for testing; `accuracy` is its score.

    Args:
        num_examples: B.
        length: L = T, even, at least 4N.
        pairs: N.
        seed: of everything that is drawn.
        vocab_size: more than L.
        power: 1 makes all slots equally likely, less prefers early ones.
        filler: every input that is neither of a pair nor a query is 0 ("zero") or drawn from [0, vocab) ("random"),
            as in the source: keys and values may be among them. Nothing else depends on it.
    Returns:
        `Examples` [B, L].
    Raises:
        ValueError: a number out of its range, or an unknown filler.

    >>> examples = mqar(1, length=12, pairs=2, seed=0, vocab_size=16)
    >>> examples.inputs[0, :4].tolist(), int(examples.mask.sum())
    ([4, 14, 5, 15], 2)
    """
    rows, length, pairs = (
        check_count(name, x) for name, x in (("num_examples", num_examples), ("length", length), ("pairs", pairs))
    )
    if length % 2 or length < 4 * pairs:
        raise ValueError(f"length: got {length}, want an even number of at least 4 * pairs = {4 * pairs}")
    if check_count("vocab_size", vocab_size) <= length:
        raise ValueError(f"vocab_size: got {vocab_size}, want more than length = {length}")
    if isinstance(power, bool) or not isinstance(power, int | float | np.number) or not 0 < power < math.inf:
        raise ValueError(f"power: got {power!r}, want a finite number above 0")
    if filler not in FILLERS:
        raise ValueError(f"filler: got {filler!r}, want one of {FILLERS}")
    rng = generator(seed)
    half = vocab_size // 2
    keys = 1 + distinct(rng, rows, half - 1, pairs)
    values = half + distinct(rng, rows, vocab_size - half, pairs)
    # The factor `power` is the same for all slots: only their ratios matter.
    log_weights = (power - 1) * np.log(np.arange(1, (length - 2 * pairs) // 2 + 1))
    queries = 2 * pairs + 2 * distinct_by_weight(rng, rows, log_weights, pairs)

    inputs, targets = np.zeros((2, rows, length), np.int32)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(inputs, queries, keys.astype(np.int32), axis=1)
    np.put_along_axis(targets, queries, values.astype(np.int32), axis=1)
    # No key is 0, and no value: what is 0 is free.
    if filler == "random":
        free = inputs == 0
        inputs[free] = rng.integers(0, vocab_size, int(free.sum()), dtype=np.int32)
    return Examples(inputs, targets, targets != 0)
