# SPDX-License-Identifier: Apache-2.0
"""The sign of life of a whole server."""

from __future__ import annotations

import threading

import pytest

from cedar.errors import unavailable
from cedar.triton.canary import Canary


def test_a_silent_server_is_taken_for_a_living_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedar.triton.canary.INTERVAL_S", 0.01)
    asked, answers = threading.Semaphore(0), True

    def ask() -> None:
        asked.release()
        if not answers:
            raise unavailable("of the test")

    canary = Canary(ask)
    for _ in range(3):
        assert asked.acquire(timeout=5)
    assert canary.silent_for() < 2.0
    answers = False
    before = canary.silent_for()
    for _ in range(20):
        assert asked.acquire(timeout=5)
    assert canary.silent_for() > max(before, 0.1)
    canary.forgive()
    assert canary.silent_for() < 0.1
    canary.stop()
