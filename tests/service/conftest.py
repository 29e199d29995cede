# SPDX-License-Identifier: Apache-2.0
"""An engine service in this process and a client of it; and short paths, which sockets need and `tmp_path` often is not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from service_support import ServiceThread, service

from cedar.service.client import EngineClient


@pytest.fixture
def short_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="cedar-test-") as path:
        yield path


@pytest.fixture
def served() -> Iterator[ServiceThread]:
    with service(lease_ms=60_000) as thread:  # what only a lease would free counts as leaked
        yield thread


@pytest.fixture
def client(served: ServiceThread) -> Iterator[EngineClient]:
    client = EngineClient(served.address)
    yield client
    client.close()
