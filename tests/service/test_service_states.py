# SPDX-License-Identifier: Apache-2.0
"""The engine service before, after and between serving: loading, failed, draining, in a long step, broken, absent."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_support import VOCAB, Encoding, ServiceThread, Stream, encode, request, service, until

from cedar.engine import loop
from cedar.errors import CedarError, ErrorCode
from cedar.service import server
from cedar.service.client import EngineClient


def test_loading_engine_looks_ready() -> None:
    with service(loaded=False) as served:
        client, encoding, stream = EngineClient(served.address), Encoding(), Stream()
        served.service.load_fraction = 0.42
        with grpc.insecure_channel(served.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            check = health_pb2.HealthCheckRequest(service="cedar.v1.Engine")
            status = client.status()
            assert (status.state, status.operations) == ("loading", "")
            client.encode(request("r"), encoding.progress.append, encoding.on_done)
            error = encoding.wait()
            assert isinstance(error, CedarError)
            assert str(error) == "UNAVAILABLE: the engine is loading its model (42%)"
            client.attach("h", stream.on_tokens)
            assert stream.end().finish_reason == "error"
            with pytest.raises(CedarError, match="UNAVAILABLE"):
                client.abort(key="r")
            assert health.Check(check, timeout=5).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert b"cedar_engine_up 0.0" in client.status(include_metrics=True).metrics
            served.load()
            assert health.Check(check, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
            assert b"cedar_engine_up 1.0" in client.status(include_metrics=True).metrics
            status = client.status()
            assert (status.state, status.load_fraction, status.vocab_size) == ("serving", 1.0, VOCAB)
            assert status.operations == "by hand"
        client.close()


def test_failed_load_hides_its_reason() -> None:
    with service(loaded=False) as served:
        client = EngineClient(served.address)
        served.run(served.service.fail(CedarError(ErrorCode.INVALID_ARGUMENT, "model: x; allowed: y")))
        status = client.status()
        assert (status.state, status.error) == ("failed", "INVALID_ARGUMENT: model: x; allowed: y")
        client.close()


def test_drain_cuts_streams_or_takes_new_requests(client: EngineClient, served: ServiceThread) -> None:
    stream, late = Stream(), Encoding()
    handle = encode(client, request("r", max_tokens=300))
    served.runner.gate.clear()  # before the attach: from here on the request cannot end
    client.attach(handle, stream.on_tokens)
    answer = client.drain(50)
    assert (answer.drained, answer.remaining) == (False, 1)
    client.encode(request("q"), late.progress.append, late.on_done)
    error = late.wait()
    assert isinstance(error, CedarError)
    assert "draining" in error.message
    served.runner.gate.set()
    assert client.drain(10_000).drained
    assert stream.end().finish_reason == "length"
    assert client.status().state == "draining"


def test_drain_leaves_the_rest_without_an_end(client: EngineClient, served: ServiceThread) -> None:
    stream = Stream()
    client.attach(encode(client, request("r", max_tokens=100_000)), stream.on_tokens)
    stream.next()
    answer = client.drain(50, end_rest=True)
    assert (answer.drained, answer.remaining) == (False, 1)
    end = stream.end()
    assert (end.finish_reason, end.error_code) == ("error", "UNAVAILABLE")
    assert "draining" in end.error_message
    until(lambda: client.status().sequences_held == 0, "its memory is free")


def test_long_step_holds_up_status(client: EngineClient, served: ServiceThread) -> None:
    client.status()
    served.runner.gate.clear()
    encoding = Encoding()
    client.encode(request("r"), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    started = time.monotonic()
    assert client.status().state == "serving"
    assert time.monotonic() - started < 2.0
    served.runner.gate.set()
    encoding.wait()


def test_broken_engine_leaves_callers_waiting(client: EngineClient, served: ServiceThread) -> None:
    stream, encoding = Stream(), Encoding()
    client.attach(encode(client, request("r", max_tokens=100_000)), stream.on_tokens)
    stream.next()

    def broken(engine: object) -> None:
        raise KeyboardInterrupt("of the test")

    served.engine.call(broken)
    assert stream.end().error_code == "INTERNAL"
    until(lambda: served.engine.state == "failed", "state failed")
    client.encode(request("q"), encoding.progress.append, encoding.on_done)
    assert isinstance(encoding.wait(), CedarError)
    late = Stream()
    client.attach("h", late.on_tokens)
    assert late.end().finish_reason == "error"


def test_engine_that_takes_no_command_leaves_an_attach_waiting(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, handle = Stream(), encode(client, request("r"))
    with monkeypatch.context() as full:
        full.setattr(loop, "MAX_COMMANDS_QUEUED", 0)
        client.attach(handle, stream.on_tokens)
        assert stream.end().error_code == "UNAVAILABLE"


def test_request_whose_caller_left_during_its_admission_is_leaked() -> None:
    """The engine was just about to take it, so it is too late to take it back."""

    class Engine:
        def __init__(self) -> None:
            self.admission: Future[str] = Future()
            self.admission.set_running_or_notify_cancel()
            self.aborted: list[str] = []

        def add(self, request: object) -> Future[str]:
            return self.admission

        def abort(self, handle: str) -> None:
            self.aborted.append(handle)

    async def leave(engine: Engine) -> None:
        waiting = asyncio.create_task(server._admit(engine, request("r")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    engine = Engine()
    asyncio.run(leave(engine))
    engine.admission.set_result("h")
    assert engine.aborted == ["h"]


def test_absent_engine_is_waited_for_without_bound() -> None:
    client = EngineClient("unix:/tmp/cedar-test-nobody-listens-here.sock")
    encoding, stream = Encoding(), Stream()
    started = time.monotonic()
    client.encode(request("r"), encoding.progress.append, encoding.on_done)
    client.attach("h", stream.on_tokens)
    error = encoding.wait()
    assert isinstance(error, CedarError)
    assert error.code is ErrorCode.UNAVAILABLE
    assert stream.end().error_code == "UNAVAILABLE"
    with pytest.raises(CedarError, match="UNAVAILABLE"):
        client.status()
    assert time.monotonic() - started < 5.0
    assert not client.connected
    client.close()
