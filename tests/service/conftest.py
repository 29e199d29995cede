# SPDX-License-Identifier: Apache-2.0
"""Sockets need short paths, shorter than `tmp_path` often is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def short_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="cedar-test-") as path:
        yield path
