"""Copying and selective copying: what was read is asked back in order, at the end."""

import numpy as np

from qdelta_jax.checks import check_count
from qdelta_jax.tasks.draws import Seed, distinct, generator
from qdelta_jax.tasks.examples import Examples

__all__ = ["copying", "selective_copying"]


def copying(num_examples: int, *, length: int, tokens: int = 16, vocab_size: int = 16, seed: Seed) -> Examples:
    """inputs = x_1 .. x_N, 0 .. 0, m .. m (N times);  targets = x_1 .. x_N at the markers m, which alone count.

    The data x are uniform on 1 .. vocab - 2, 0 is noise and m = vocab - 1 is the marker. Always at the same places,
    the data are copied by a fixed convolution: no choice is needed. Source: arXiv 2312.00752, figure 2, left.

    Args:
        num_examples: B.
        length: T, the markers included, at least 2N.
        tokens: N.
        vocab_size: noise and marker included, at least 4.
        seed: of the data.
    Returns:
        `Examples` [B, T].
    Raises:
        ValueError: a number out of its range.

    >>> examples = copying(1, length=8, tokens=3, vocab_size=8, seed=0)
    >>> examples.inputs.tolist(), examples.targets.tolist()
    ([[3, 4, 5, 0, 0, 7, 7, 7]], [[0, 0, 0, 0, 0, 3, 4, 5]])
    """
    rows = _check(num_examples, length, tokens, vocab_size)
    data = generator(seed).integers(1, vocab_size - 1, (rows, tokens), dtype=np.int32)
    return _place(data, np.tile(np.arange(tokens), (rows, 1)), length, vocab_size)


def selective_copying(
    num_examples: int, *, length: int, tokens: int = 16, vocab_size: int = 16, seed: Seed
) -> Examples:
    """`copying` with the N data at random places among the first T - N, in order: every choice equally likely.

    What is noise must be told from what is data by its content. In the source T is 4096, N and vocab 16.
    Source: arXiv 2312.00752, figure 2, right, above.

    Args, Returns, Raises: as for `copying`.

    >>> examples = selective_copying(1, length=8, tokens=3, vocab_size=8, seed=0)
    >>> examples.inputs.tolist(), examples.targets.tolist()
    ([[0, 3, 4, 0, 5, 7, 7, 7]], [[0, 0, 0, 0, 0, 3, 4, 5]])
    """
    rows = _check(num_examples, length, tokens, vocab_size)
    rng = generator(seed)
    data = rng.integers(1, vocab_size - 1, (rows, tokens), dtype=np.int32)
    places = np.sort(distinct(rng, rows, length - tokens, tokens), axis=1)
    return _place(data, places, length, vocab_size)


def _check(num_examples: int, length: int, tokens: int, vocab_size: int) -> int:
    if check_count("length", length) < 2 * check_count("tokens", tokens):
        raise ValueError(f"length: got {length}, want at least 2 * tokens = {2 * tokens}")
    if check_count("vocab_size", vocab_size) < 4:
        raise ValueError(f"vocab_size: got {vocab_size}, want at least 4: noise, a marker and two kinds of data")
    return check_count("num_examples", num_examples)


def _place(data: np.ndarray, places: np.ndarray, length: int, vocab_size: int) -> Examples:
    rows, tokens = data.shape
    inputs, targets = np.zeros((2, rows, length), np.int32)
    mask = np.zeros((rows, length), np.bool_)
    np.put_along_axis(inputs, places, data, axis=1)
    inputs[:, -tokens:] = vocab_size - 1
    targets[:, -tokens:] = data
    mask[:, -tokens:] = True
    return Examples(inputs, targets, mask)
