# SPDX-License-Identifier: Apache-2.0
"""Shared paths and settings. Heavy fixtures live beside the tests that use them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
settings.register_profile("cedar", deadline=None)  # a shared machine's clock proves nothing
settings.load_profile("cedar")

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The independent implementation's checkpoints and outputs; its README.md says what each array is."""
    return GOLDEN
