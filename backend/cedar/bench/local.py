# SPDX-License-Identifier: Apache-2.0
"""A server of our own for the length of a measurement: `cedar serve` on free loopback ports, stopped by its process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from cedar.errors import unavailable
from cedar_client import Client

# Reconnect at once: the default back-off of seconds would be measured as start-up time.
_EAGER = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")]


@dataclass(frozen=True)
class LocalServer:
    """Addresses of a running server and how long it took to be ready, in seconds from the start of the command."""

    grpc: str
    http: str
    metrics: str
    pid: int
    ready_after: float


@contextmanager
def local_server(
    arguments: Sequence[str] = (), ready_timeout: float = 600.0, stop_timeout: float = 60.0
) -> Iterator[LocalServer]:
    """Run ``cedar serve ARGUMENTS`` until the block ends. Raises UNAVAILABLE, with the log's end, if it never gets ready."""
    grpc_port, http_port, metrics_port = free_ports(3)
    ports = ["--grpc-port", str(grpc_port), "--http-port", str(http_port), "--metrics-port", str(metrics_port)]
    with tempfile.TemporaryFile(prefix="cedar-serve-") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "cedar", "serve", "--host", "127.0.0.1", *ports, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C here must not reach it twice, and its process group is known
        )
        try:
            _wait_ready(process, f"127.0.0.1:{grpc_port}", started + ready_timeout, log)
            yield LocalServer(
                grpc=f"127.0.0.1:{grpc_port}",
                http=f"127.0.0.1:{http_port}",
                metrics=f"http://127.0.0.1:{metrics_port}/metrics",
                pid=process.pid,
                ready_after=time.monotonic() - started,
            )
        finally:
            _stop(process, stop_timeout)


def free_ports(count: int) -> list[int]:
    """Loopback ports that the system just handed out, all different; held open together, then released."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _wait_ready(process: subprocess.Popen[bytes], url: str, deadline: float, log: IO[bytes]) -> None:
    with Client(url, channel_args=_EAGER) as client:
        while process.poll() is None and time.monotonic() < deadline:
            if client.ready():
                return
            time.sleep(0.05)
    why = "did not get ready in time" if process.returncode is None else f"ended with status {process.returncode}"
    raise unavailable(f"cedar serve {why}; the end of its log:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes], timeout: float) -> None:
    """SIGTERM drains; what is left of its process group after ``timeout`` is killed."""
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _tail(log: IO[bytes], limit: int = 4000) -> str:
    log.flush()
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), limit, max(0, size - limit)).decode(errors="replace")
