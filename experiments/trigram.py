"""How well do two bytes predict the third? An interpolated byte trigram, the yardstick of `experiments.demo`.

    p(c | a b) = l3 n(abc)/n(ab) + l2 n(bc)/n(b) + l1 n(c)/n + l0/256

with weights l that depend on how often the context `ab` was seen, fitted by expectation maximisation on a
slice of the training text that the counts leave out (deleted interpolation, Jelinek and Mercer 1980).
"""

import math

import numpy as np

__all__ = ["Trigram"]

BUCKETS = 24
"""Contexts are told apart by log2 of their count."""


class Trigram:
    """Counts of one, two and three bytes of a text, and the weights between them.

    >>> model = Trigram(b"the cat and the hat and the rat " * 200)
    >>> model.bits_per_byte(b"the rat and the cat ") < 1.0
    True
    """

    def __init__(self, text: bytes, fitted_on: float = 0.1, rounds: int = 30):
        cut = int(len(text) * (1 - fitted_on))
        self._count(text[:cut])
        self.weights = np.full((BUCKETS, 4), 0.25)
        parts, bucket = self._parts(text[cut:])
        for _ in range(rounds):
            shares = self.weights[bucket] * parts
            shares /= shares.sum(axis=1, keepdims=True)
            for b in np.unique(bucket):
                self.weights[b] = shares[bucket == b].mean(axis=0)
        # The weights stay; the counts may now use everything.
        self._count(text)

    def _count(self, text: bytes) -> None:
        x = np.frombuffer(text, np.uint8).astype(np.int64)
        self.three = np.bincount((x[:-2] << 16) | (x[1:-1] << 8) | x[2:], minlength=1 << 24)
        self.two = np.bincount((x[:-1] << 8) | x[1:], minlength=1 << 16)
        self.one = np.bincount(x, minlength=256)

    def _parts(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """The four estimates of each byte from the third on, [N, 4], and the bucket of its context, [N]."""
        x = np.frombuffer(text, np.uint8).astype(np.int64)
        a, b, c = x[:-2], x[1:-1], x[2:]
        context = self.two[(a << 8) | b]
        estimates = [
            self.three[(a << 16) | (b << 8) | c] / np.maximum(context, 1),
            self.two[(b << 8) | c] / np.maximum(self.one[b], 1),
            self.one[c] / self.one.sum(),
            np.full(len(c), 1 / 256),
        ]
        bucket = np.minimum(np.log2(context + 1).astype(np.int64), BUCKETS - 1)
        return np.stack(estimates, axis=1), bucket

    def bits_per_byte(self, text: bytes) -> float:
        """Mean of -log2 p over the bytes from the third on."""
        parts, bucket = self._parts(text)
        return float(-np.log(np.sum(self.weights[bucket] * parts, axis=1)).mean() / math.log(2))
