# SPDX-License-Identifier: Apache-2.0
"""Counting where two runs choose the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from perf.quality.agreement import MARGIN, Agreement, compare, runner_of

from cedar.config.presets import preset
from cedar.model.make import make_checkpoint


def logits(*margins: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """One row a margin: token 2 is first, token 0 so far behind."""
    return np.array([[1.0, -3.0, 1.0 + margin] for margin in margins], np.float32)


def test_a_choice_that_rounding_may_make_counts_as_sure() -> None:
    close, sure = 0.5 * MARGIN, 2 * MARGIN
    expected = logits(sure, close, sure, sure)
    actual = expected.copy()
    actual[1] = [3.0, 0.0, 0.0]
    found = Agreement()
    found.add(expected, actual, answer_from=2)
    assert (found.positions, found.same, found.sure, found.sure_same) == (4, 3, 3, 3)
    assert (found.answers, found.firm, found.kept) == (1, 1, 1)
    found.add(expected, actual, answer_from=1)  # a close choice in the answer: nothing is promised of it
    assert (found.answers, found.firm, found.kept) == (2, 1, 1)
    actual[3] = [3.0, 0.0, 0.0]
    found.add(expected, actual, answer_from=2)
    assert (found.answers, found.firm, found.kept) == (3, 2, 1)
    assert found.as_dict()["agreement"] == pytest.approx(8 / 12)


def test_a_run_disagrees_with_itself_or_agrees_with_another_model(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_checkpoint(preset("tiny"), tmp_path / str(seed), seed=seed)
    reference = runner_of(tmp_path / "1", "reference")
    others = {"itself": reference, "another": runner_of(tmp_path / "2", "reference")}
    found = compare(reference, others, [("text", list(range(3, 43)), None), ("copy", list(range(50, 80)), 20)])
    assert found["itself"]["text"].as_dict()["agreement"] == 1
    assert found["itself"]["copy"].answers == 1
    assert found["another"]["text"].as_dict()["agreement"] < 0.5


def test_noise_changes_no_embedding(tmp_path: Path) -> None:
    make_checkpoint(preset("tiny"), tmp_path / "tiny", seed=1)
    plain, noisy = (runner_of(tmp_path / "tiny", "reference", noise).model.embed for noise in (0.0, 1e-7))
    moved = (plain != noisy).float().mean()
    assert moved > 0.1
    assert (plain - noisy).abs().max() < 1e-5
