# SPDX-License-Identifier: Apache-2.0
"""Intervals of paired differences: wide enough, and not a point when nothing changed."""

from __future__ import annotations

import numpy as np
import pytest
from perf.quality.paired import Difference, Share


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
