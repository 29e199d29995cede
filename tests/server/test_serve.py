# SPDX-License-Identifier: Apache-2.0
"""Starting and ending `cedar serve`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cedar_server import Client, Server, eventually

Start = Callable[..., Server]
END_S = 15.0


def endless(**more: Any) -> dict[str, Any]:
    """A request that does not end by itself during a test."""
    return {"text_input": "Hello", "max_tokens": 4000, "ignore_eos": True, "temperature": 0.0, **more}


def ends_cleanly(server: Server, processes: list[psutil.Process]) -> None:
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < END_S
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_running_streams_are_cut_at_the_end(start: Start) -> None:
    server = start()
    processes = server.everything()
    with server.client() as client, server.client() as late:
        answers = [client.submit(**endless(max_tokens=n)) for n in (60, 100, 140)]
        client.wait(lambda: all(answer.ids for answer in answers))
        server.process.terminate()
        eventually(lambda: b"draining" in server.log.read_bytes(), 5, "a drain")
        eventually(lambda: server.status().state == "draining", 5, "an engine that drains")
        refused = late.run(text_input="Hello", max_tokens=1)
        assert "UNAVAILABLE: " in refused.error
        client.wait(lambda: all(answer.done for answer in answers))
        assert [(answer.error, len(answer.ids)) for answer in answers] == [("", 60), ("", 100), ("", 140)]
        ends_cleanly(server, processes)


def after_refusals(client: Client) -> None:
    for _ in range(30):
        assert client.run(text_input="Hello", max_tokens=0).error


def after_cancels(client: Client) -> None:
    for n in range(10):
        answer = client.submit(**endless(request_key=f"k{n}"))
        client.wait(lambda a=answer: a.ids)
        client.run(request_key=f"k{n}", cancel=True)


def after_cancels_at_admission(client: Client) -> None:
    for n in range(10):
        client.submit(**endless(request_key=f"a{n}"))
        client.run(request_key=f"a{n}", cancel=True)
    client.cancel_all()


def after_nothing(client: Client) -> None:
    """An idle stream stays open."""


@pytest.mark.parametrize("traffic", [after_refusals, after_cancels, after_cancels_at_admission, after_nothing])
def test_the_end_takes_too_long(start: Start, traffic: Callable[[Client], None]) -> None:
    server = start()
    processes = server.everything()
    with server.client() as client:
        traffic(client)
        ends_cleanly(server, processes)


def test_a_stream_that_never_ends_blocks_the_drain(start: Start) -> None:
    server = start("--drain-timeout-ms", "1000")
    processes = server.everything()
    with server.client() as client:
        answer = client.submit(**endless())
        client.wait(lambda: answer.ids)
        ends_cleanly(server, processes)
        client.wait(lambda: answer.done)


def serve(*flags: str) -> tuple[int, str, float]:
    """A serve that must fail at once: status, output, seconds."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cedar", "serve", *flags], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def test_a_port_in_use_is_found_late_or_not_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, output, took = serve("--grpc-port", str(port), "--http-port", "0", "--metrics-port", "0")
    assert status == 2
    assert f"grpc_port: 127.0.0.1:{port} cannot be bound" in output.replace("\n", "")
    assert "Traceback" not in output
    assert took < 10


def test_a_missing_model_is_found_late_or_not_named(tmp_path: Path) -> None:
    status, output, took = serve(
        "--model", str(tmp_path / "nothing"), "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"
    )
    assert status == 2
    assert "model: " in output
    assert "Traceback" not in output
    assert took < 10


def test_ports_zero_are_not_told(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "cedar", "serve", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--cpu-threads", "1"], stdout=output, stderr=output)
    try:
        eventually(lambda: b"Cedar is ready\n" in log.read_bytes() or process.poll() is not None, 120, "ready")
        port = int(log.read_text().split("gRPC")[1].split()[0].rsplit(":", 1)[1])
        client = Client(port)
        assert len(client.run(input_ids=[5], max_tokens=1).ids) == 1
        client.close()
    finally:
        process.terminate()
        assert process.wait(40) == 0


def test_a_second_signal_waits_for_the_drain(start: Start) -> None:
    server = start("--drain-timeout-ms", "60000")
    processes = server.everything()
    with server.client() as client:
        answer = client.submit(**endless())
        client.wait(lambda: answer.ids)
        server.process.terminate()
        eventually(lambda: b"draining" in server.log.read_bytes(), 5, "a drain")
        ends_cleanly(server, processes)


def test_a_signal_while_the_model_loads_is_lost(start: Start) -> None:
    server = start(wait=False)
    eventually(lambda: b"loading the model" in server.log.read_bytes(), 30, "a model that loads")
    triton = server.triton()
    assert triton is not None
    ends_cleanly(server, [triton])
