# SPDX-License-Identifier: Apache-2.0
"""`cedar bench`, its own server, and draining a server before it is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cedar_client
from cedar.bench.local import LocalServer, free_ports, local_server
from cedar.cli import bench
from cedar.errors import CedarError
from cedar.service import drain
from cedar.service.directory import EngineDirectory


@pytest.mark.parametrize("text", ["", "0", "1,two", "-1", "1,300"])
def test_wrong_concurrency_accepted(text: str) -> None:
    with pytest.raises(CedarError, match="--concurrency"):
        bench.command(concurrency=text)


def test_port_handed_out_twice() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20


def test_dead_server_ends_in_a_traceback() -> None:
    (port,) = free_ports(1)
    with pytest.raises(CedarError, match=f"UNAVAILABLE: no connection to 127.0.0.1:{port}"):
        bench.command(url=f"127.0.0.1:{port}", max_tokens=4, runs=1)


@pytest.mark.server
def test_server_that_cannot_start_waited_for_or_left_behind(tmp_path: Path) -> None:
    started = time.monotonic()
    wrong = local_server(["--model", str(tmp_path / "no-such-checkpoint")], ready_timeout=120)
    with pytest.raises(CedarError, match=r"(?s)cedar serve ended with status \d+.*no-such-checkpoint"), wrong:
        pytest.fail("it got ready")
    assert time.monotonic() - started < 100
    assert not [p for p in psutil.process_iter(["cmdline"]) if "no-such-checkpoint" in " ".join(p.info["cmdline"] or ())]


@pytest.fixture
def private_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    """A server whose engine directory nobody else shares: draining must not reach another one."""
    with tempfile.TemporaryDirectory(prefix="cedar-drain-") as runtime:
        for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
            monkeypatch.setenv(name, runtime)
        with local_server(["--cpu-threads", "1"]) as running:
            yield running


@pytest.mark.slow
@pytest.mark.server
def test_drain_cuts_a_stream_or_lets_a_new_request_in(private_server: LocalServer) -> None:
    with cedar_client.Client(private_server.grpc, stall_timeout=60) as client:
        stream = client.generate("a cedar", max_tokens=200, temperature=0.0, ignore_eos=True)
        tokens = next(stream).num_output_tokens
        command = [sys.executable, "-m", "cedar.service.drain", "--timeout-ms", "120000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        refused = ""
        while not refused and process.poll() is None:
            tokens += next(stream).num_output_tokens
            try:
                client.complete("another", max_tokens=1)
            except cedar_client.Unavailable as error:
                refused = str(error)
        tokens += sum(delta.num_output_tokens for delta in stream)
        out, _ = process.communicate(timeout=120)
    assert "drain" in refused
    assert tokens == 200
    assert process.returncode == 0
    assert out == "drained\n"


@pytest.mark.slow
@pytest.mark.server
def test_bench_writes_no_result_or_leaves_its_server(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    options = ["--runs", "2", "--concurrency", "1,3", "--max-tokens", "8", "--output", str(output)]
    done = subprocess.run([sys.executable, "-m", "cedar", "bench", *options], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert result["ready_after_s"] > 0
    counts = [(level["concurrency"], level["requests"], level["output_tokens"]) for level in result["levels"]]
    assert counts == [(1, 2, 16), (3, 6, 48)]
    assert all(level["ttft_ms"]["min"] > 0 for level in result["levels"])
    assert result["command"].startswith("cedar bench --runs 2")


@pytest.mark.parametrize(("arguments", "words"), [([], "--server: is needed"), (["--server", "9"], "9 is no tritonserver")])
def test_drain_reaches_another_server(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CEDAR_ENGINE_ADDRESS", raising=False)
    monkeypatch.setattr(drain, "engines", lambda: {11: EngineDirectory(Path("a")), 12: EngineDirectory(Path("b"))})
    assert drain.main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "11, 12" in message


def test_drain_without_an_engine_reports_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CEDAR_ENGINE_ADDRESS", raising=False)
    monkeypatch.setattr(drain, "engines", dict)
    assert drain.main([]) == 2
