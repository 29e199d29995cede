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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of preset ``tiny``: window 8, 12 layers, and quick."""
    from cedar.config.presets import preset
    from cedar.model.make import make_checkpoint

    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(preset("tiny"), directory)
    return directory
