# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_triton import SCRIPTS, FakeTriton

from cedar_client import Client


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    fake = FakeTriton()
    fake.scripts = {script.__name__: script for script in SCRIPTS}
    yield fake
    fake.stop()


@pytest.fixture
def client(server: FakeTriton) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
