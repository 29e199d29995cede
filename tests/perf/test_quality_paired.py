# SPDX-License-Identifier: Apache-2.0
"""Intervals of paired differences: wide enough, and not a point when nothing changed."""

from __future__ import annotations

from itertools import pairwise
from math import exp, lgamma, log

import numpy as np
import pytest
from perf.quality.paired import Difference, Share, score_interval

CELLS = 90
TAIL = 0.05 / (2 * CELLS)
"""What each end of an interval may miss, when 90 intervals hold together with 95 %."""


def test_lost_and_won_items_are_mixed_up() -> None:
    base, other = [True, True, True, False, False], [True, False, False, True, False]
    found = Difference.of(base, other, 1)
    assert (found.n, found.lost, found.won, found.value) == (5, 2, 1, pytest.approx(-0.2))
    assert found.low < found.value < found.high


def test_an_interval_is_a_point_when_no_item_changed() -> None:
    same = [True] * 200
    few, many = Difference.of(same, same, 1), Difference.of(same * 5, same * 5, 1)
    assert few.low < -0.01 < many.low < 0 < many.high < 0.01 < few.high


def test_more_comparisons_make_an_interval_narrower() -> None:
    base, other = [True] * 90 + [False] * 10, [True] * 80 + [False] * 20
    assert Difference.of(base, other, 50).low < Difference.of(base, other, 1).low


@pytest.mark.parametrize(("lost", "won", "low"), [(0, 0, -1.15), (1, 0, -1.34), (2, 0, -1.51), (5, 1, -1.91), (7, 2, -2.13)])
def test_an_end_is_not_that_of_tangos_interval(lost: int, won: int, low: float) -> None:
    """In points, of 1,024 items, by an implementation of its own. Seven lost and two won are a failure."""
    base = [True] * (1024 - won) + [False] * won
    other = [False] * lost + [True] * (1024 - lost)
    assert 100 * Difference.of(base, other, CELLS).low == pytest.approx(low, abs=0.01)


def test_an_interval_is_not_wilsons_where_nothing_changed_or_leaves_its_range() -> None:
    z2 = 1.959964**2
    assert score_interval(44, 0, 0, 0.975) == pytest.approx((-z2 / (44 + z2), z2 / (44 + z2)), abs=1e-6)
    assert score_interval(44, 44, 0, 0.975)[0] == -1.0
    assert score_interval(44, 0, 44, 0.975)[1] == 1.0


def test_losing_and_winning_are_not_alike() -> None:
    for lost, won in ((0, 0), (3, 1), (20, 0), (7, 40), (0, 60)):
        low, high = score_interval(60, lost, won, 0.99)
        assert (-high, -low) == score_interval(60, won, lost, 0.99)
        assert -1 <= low <= (won - lost) / 60 <= high <= 1


def test_another_lost_item_raises_an_end() -> None:
    ends = [score_interval(200, lost, 4, 1 - TAIL) for lost in range(197)]
    for (low, high), (next_low, next_high) in pairwise(ends):
        assert next_low < low
        assert next_high < high


@pytest.mark.parametrize("won", [0.0, 0.001, 0.005, 0.02])
def test_a_cell_that_costs_two_points_passes_too_often(won: float) -> None:
    """The probability, summed over all results, that the lower end lies above a true difference of -2 points. That of the
    adjusted Wald interval is 13, 8, 3 and 1.3 times what each end may miss."""
    n, lost = 1024, won + 0.02
    missed = sum(
        probability
        for a in range(120)
        for b in range(120)
        if (probability := _probability(n, (a, lost), (b, won))) > 1e-12 and score_interval(n, a, b, 1 - TAIL)[0] > won - lost
    )
    assert 0 < missed < 1.1 * TAIL


def _probability(n: int, *seen: tuple[int, float]) -> float:
    """Of these counts, each with its item's probability, among n items."""
    seen = (*seen, (n - sum(count for count, _ in seen), 1 - sum(share for _, share in seen)))
    if any(count and not share for count, share in seen):
        return 0.0
    return exp(lgamma(n + 1) + sum(count * log(share) - lgamma(count + 1) for count, share in seen if share))


def test_the_interval_misses_the_truth_too_often() -> None:
    """Of 2,000 experiments with a known difference at most about 5 % may miss it."""
    random = np.random.default_rng(0)
    lost, won, n, missed = 0.04, 0.02, 400, 0
    for _ in range(2000):
        draw = random.random(n)
        base = (draw < lost) | (draw > 0.3)
        other = ((draw >= lost) & (draw < lost + won)) | (draw > 0.3)
        found = Difference.of(base.tolist(), other.tolist(), 1)
        missed += not found.low <= won - lost <= found.high
    assert missed < 130


def test_a_share_has_no_error_at_its_ends() -> None:
    assert Share.of([True] * 100).error > 0.003
    assert Share.of([True] * 50 + [False] * 50).error == pytest.approx(0.05, abs=0.001)
