# SPDX-License-Identifier: Apache-2.0
"""Shared paths and settings. Heavy fixtures live beside the tests that use them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The independent implementation's checkpoints and outputs; its README.md says what each array is."""
    return GOLDEN
