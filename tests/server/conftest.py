# SPDX-License-Identifier: Apache-2.0
"""Servers that tests share, and the log tail of a server whose test failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cedar_server import Client, Server

HERE = Path(__file__).parent
TIGHT = ("--max-num-seqs", "2", "--max-waiting", "2", "--max-model-len", "4096", "--kv-cache-bytes", "680000")
"""Little of everything: queues and preemptions are close."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


def _running(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        print(server.tail())
        assert server.stop() == 0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with default settings."""
    yield from _running(Server(tmp_path_factory.mktemp("server") / "serve.log"))


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Server]:
    """A tiny random model with little memory and short queues."""
    yield from _running(Server(tmp_path_factory.mktemp("tight") / "serve.log", "--model", str(tiny), *TIGHT))


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client of the shared server."""
    with server.client() as client:
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own; whatever still runs at its end is stopped."""
    servers: list[Server] = []

    def make(*flags: str, wait: bool = True) -> Server:
        servers.append(Server(tmp_path / f"serve{len(servers)}.log", *flags, wait=wait))
        return servers[-1]

    yield make
    for each in servers:
        print(each.tail())
        each.stop()
