"""Intervals of means over seeds."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from scipy.stats import t as student


def interval(
    values: Sequence[float], level: float = 0.95, *, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float] | None:
    """mean -+ t s / sqrt(n), Student's t of n - 1 degrees of freedom, cut to low .. high; None of fewer than two.

    >>> [round(x, 3) for x in interval([0.4, 0.5, 0.6])]
    [0.252, 0.748]
    """
    if len(values) < 2:
        return None
    half = student.ppf(0.5 + level / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return float(max(low, mean(values) - half)), float(min(high, mean(values) + half))


def paired(
    mine: Sequence[float], others: Sequence[float], level: float = 0.95
) -> tuple[float, tuple[float, float] | None]:
    """The mean of mine - others, which share seeds and data one by one, and its interval.

    >>> difference, (low, high) = paired([1.0, 2.0, 3.0], [0.8, 1.9, 2.7])
    >>> round(difference, 3), round(low, 3), round(high, 3)
    (0.2, -0.048, 0.448)
    """
    differences = [a - b for a, b in zip(mine, others, strict=True)]
    return mean(differences), interval(differences, level)
