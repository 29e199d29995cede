# SPDX-License-Identifier: Apache-2.0
"""What an operator runs against a running engine: it must find the right one, and must not claim what did not happen."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator

import pytest
from service_support import GatedRunner, ServiceThread, Stream, encode, request
from typer.testing import CliRunner

from cedar.cli import cache
from cedar.config.engine import EngineConfig
from cedar.errors import CedarError
from cedar.service import drain
from cedar.service.client import EngineClient
from cedar.service.directory import EngineDirectory
from cedar.service.owner import Owner


@pytest.fixture
def engine(short_directory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceThread]:
    """An engine in the place where one of this process would be, on a machine that has no other."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", short_directory)
    monkeypatch.setattr(tempfile, "tempdir", short_directory)
    monkeypatch.delenv("CEDAR_ENGINE_ADDRESS", raising=False)
    directory = EngineDirectory.create(Owner.of(os.getpid()))
    directory.announce()
    thread = ServiceThread(EngineConfig(), directory.address, GatedRunner())
    thread.load()
    yield thread
    thread.stop()


def test_cache_clear_finds_no_engine_or_the_wrong_one(engine: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    assert runner.invoke(cache.app, ["clear"]).output == "0 tokens dropped\n"
    assert runner.invoke(cache.app, ["clear", "--address", engine.address]).output == "0 tokens dropped\n"
    EngineDirectory.create(Owner.of(os.getppid())).announce()
    error = runner.invoke(cache.app, ["clear"]).exception
    assert isinstance(error, CedarError)
    assert str(os.getppid()) in error.message
    assert runner.invoke(cache.app, ["clear", "--server", str(os.getpid())]).output == "0 tokens dropped\n"
    monkeypatch.setenv("CEDAR_ENGINE_ADDRESS", engine.address)
    assert runner.invoke(cache.app, ["clear"]).output == "0 tokens dropped\n"


def test_cache_clear_tells_of_tokens_that_it_did_not_drop(engine: ServiceThread) -> None:
    client, stream, runner = EngineClient(engine.address), Stream(), CliRunner()
    client.attach(encode(client, request("r", (5, 6, 7), max_tokens=4)), stream.on_tokens)
    stream.end()
    assert engine.runner.tokens_cached == 6  # the last token is never computed
    assert runner.invoke(cache.app, ["clear"]).output == "6 tokens dropped\n"
    assert engine.runner.tokens_cached == 0
    assert runner.invoke(cache.app, ["clear"]).output == "0 tokens dropped\n"
    client.close()


def test_cache_clear_of_an_engine_that_failed_claims_success(engine: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("lost device")

    monkeypatch.setattr(engine.runner, "clear_cache", fails)
    error = CliRunner().invoke(cache.app, ["clear"]).exception
    assert isinstance(error, CedarError)
    assert "lost device" in error.message


def test_cache_stats_tell_other_numbers_than_the_engine(engine: ServiceThread) -> None:
    client, stream, runner = EngineClient(engine.address), Stream(), CliRunner()
    client.attach(encode(client, request("r", (5, 6, 7), max_tokens=4)), stream.on_tokens)
    stream.end()
    encode(client, request("held", (5, 6)))
    found = json.loads(runner.invoke(cache.app, ["stats", "--json"]).output)
    assert found == {
        "kv_bytes_total": 1000,
        "kv_bytes_used": 1,
        "kv_bytes_cached": 6,
        "pages_total": 1000,
        "pages_used": 1,
        "sequences": 1,
        "prefix_cache_queries": 5,
        "prefix_cache_hits": 0,
        "replayed_tokens": 0,
    }
    assert "0 of 5 prompt tokens (0.0%)" in runner.invoke(cache.app, ["stats"]).output
    client.close()


def test_drain_claims_success_while_requests_run(engine: ServiceThread, capsys: pytest.CaptureFixture[str]) -> None:
    client, stream = EngineClient(engine.address), Stream()
    handle = encode(client, request("r", max_tokens=50))
    engine.runner.gate.clear()  # before the attach: from here on the request cannot end
    client.attach(handle, stream.on_tokens)
    assert drain.main(["--timeout-ms", "50"]) == 1
    assert "1 requests left" in capsys.readouterr().out
    engine.runner.gate.set()
    assert stream.end().finish_reason == "length"
    assert drain.main(["--timeout-ms", "5000"]) == 0
    assert "drained" in capsys.readouterr().out
    client.close()


def test_drain_claims_success_without_an_answer(short_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEDAR_ENGINE_ADDRESS", f"unix:{short_directory}/nobody.sock")
    assert drain.main(["--timeout-ms", "50"]) == 2
