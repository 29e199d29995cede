# SPDX-License-Identifier: Apache-2.0
"""Comparing two ways to answer the same items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist


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

    low, high: an interval that all of ``cells`` comparisons keep together with probability 95 % (Bonferroni), by the
    adjusted Wald method of Bonett and Price (2012), which does not shrink to a point when no item changed.
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
        p_lost, p_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
        width = NormalDist().inv_cdf(1 - 0.05 / (2 * cells)) * sqrt((p_lost + p_won - (p_won - p_lost) ** 2) / (n + 2))
        centre = p_won - p_lost
        return cls(n, lost, won, (won - lost) / n, max(-1.0, centre - width), min(1.0, centre + width))
