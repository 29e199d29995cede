# SPDX-License-Identifier: Apache-2.0
"""Comparing two ways to answer the same items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

BISECTIONS = 50
"""Halvings of an interval no longer than 2."""


@dataclass(frozen=True)
class Share:
    """Of n items, the share that is right, and its standard error (Agresti and Coull's, which is not 0 at 0 % or 100 %)."""

    n: int
    value: float
    error: float

    @classmethod
    def of(cls, right: Sequence[bool]) -> Share:
        n, count = len(right), sum(right)
        centre = (count + 0.5) / (n + 1)
        return cls(n, count / n, sqrt(centre * (1 - centre) / (n + 1)))


@dataclass(frozen=True)
class Difference:
    """other - base on the same items, in shares of 1. lost, won: items that only the base, only the other got right.

    low, high: an interval that all of ``cells`` comparisons keep together with probability 95 % (Bonferroni): the score interval
    of Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample design",
    Statistics in Medicine 17 (1998). Unlike Wald's, adjusted or not, it holds in the far tail that the correction needs when few
    answers change; where none does it is Wilson's.
    """

    n: int
    lost: int
    won: int
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, base: Sequence[bool], other: Sequence[bool], cells: int) -> Difference:
        n = len(base)
        lost = sum(b and not o for b, o in zip(base, other, strict=True))
        won = sum(o and not b for b, o in zip(base, other, strict=True))
        return cls(n, lost, won, (won - lost) / n, *score_interval(n, lost, won, 1 - 0.05 / (2 * cells)))


def score_interval(n: int, lost: int, won: int, confidence: float) -> tuple[float, float]:
    """Ends of Tango's interval for P(won) - P(lost); each is missed with probability 1 - ``confidence``."""
    z = NormalDist().inv_cdf(confidence)
    return _low(n, lost, won, z), -_low(n, won, lost, z)


def _low(n: int, lost: int, won: int, z: float) -> float:
    """The difference below the one that was seen whose score is z: the score falls as the difference grows."""
    low, high = -1.0, (won - lost) / n
    if high == low:
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _score(n, lost, won, middle) > z:
            low = middle
        else:
            high = middle
    return low


def _score(n: int, lost: int, won: int, difference: float) -> float:
    """(won - lost - n D) / its standard deviation, were D the true difference. P(lost) is then at its maximum likelihood, the
    larger root of 2n q^2 + b q + c. D: above -1, below (won - lost) / n."""
    b = (2 * n - won + lost) * difference - won - lost
    c = -lost * difference * (1 - difference)
    q = (sqrt(b * b - 8 * n * c) - b) / (4 * n)
    return (won - lost - n * difference) / sqrt(n * (2 * q + difference * (1 - difference)))
