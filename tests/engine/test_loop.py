# SPDX-License-Identifier: Apache-2.0
"""The engine's thread: commands from anywhere, one sink, clean ends, no waiting without a bound."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from fake_runner import FACTS, FakeClock, FakeRunner, expected_tokens, request

from cedar.config.engine import EngineConfig
from cedar.engine import loop
from cedar.engine.engine import MAX_FAILED_STEPS, Engine
from cedar.engine.loop import EngineThread, LoopState
from cedar.engine.request import FinishReason
from cedar.engine.updates import SequenceUpdate
from cedar.errors import CedarError, ErrorCode

WAIT_S = 20.0
"""Far more than anything takes: a test that hits it has failed."""


class Listener:
    """Collects updates and lets a test wait for what it expects."""

    def __init__(self) -> None:
        self.updates: list[SequenceUpdate] = []
        self.changed = threading.Condition()
        self.fail_with: Exception | None = None

    def __call__(self, updates: list[SequenceUpdate]) -> None:
        if self.fail_with is not None:
            raise self.fail_with
        with self.changed:
            self.updates += updates
            self.changed.notify_all()

    def end_of(self, handle: str) -> SequenceUpdate:
        def ends() -> list[SequenceUpdate]:
            return [u for u in self.updates if u.handle == handle and u.finish_reason is not None]

        with self.changed:
            assert self.changed.wait_for(ends, WAIT_S), f"{handle} does not end"
            assert len(ends()) == 1
            return ends()[0]

    def wait_ready(self, handle: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: any(u.handle == handle and u.ready for u in self.updates), WAIT_S)

    def tokens(self, handle: str) -> list[int]:
        return [token for u in self.updates if u.handle == handle for token in u.token_ids]


class Rig:
    """A running loop over a fake runner and the real clock. ``gate``: cleared, it holds the runner inside a step."""

    def __init__(self, **settings: Any) -> None:
        self.runner = FakeRunner(FakeClock())
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.steps_called = 0
        run = self.runner.step

        def step(work: Any) -> Any:
            self.steps_called += 1
            self.in_step.set()
            assert self.gate.wait(WAIT_S)
            return run(work)

        self.runner.step = step  # type: ignore[method-assign]
        self.listener = Listener()
        self.engine = Engine(self.runner, EngineConfig(**{"max_num_batched_tokens": 32, "max_num_seqs": 4, **settings}), FACTS)
        self.thread = EngineThread(self.engine, self.listener)
        self.thread.start()

    def add(self, *args: Any, **settings: Any) -> str:
        return self.thread.add(request(*args, **settings)).result(WAIT_S)

    def hold(self) -> None:
        """Returns when the thread is inside a step, where it stays."""
        self.in_step.clear()
        self.gate.clear()
        self.add("held", 3, max_tokens=1)
        assert self.in_step.wait(WAIT_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running() as one:
        yield one


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[Rig]:
    one = Rig(**settings)
    try:
        yield one
    finally:
        one.gate.set()
        assert one.thread.stop(WAIT_S)
        assert one.runner.pages_used == 0


def error_of(future: Future[Any]) -> CedarError:
    error = future.exception(WAIT_S)
    assert isinstance(error, CedarError)
    return error


def test_a_request_runs_to_its_end(rig: Rig) -> None:
    handle = rig.add("r")
    rig.listener.wait_ready(handle)
    assert rig.thread.attach(handle).result(WAIT_S)
    assert rig.listener.end_of(handle).finish_reason is FinishReason.LENGTH
    assert rig.listener.tokens(handle) == expected_tokens(request("r").input_ids, 4)


def test_many_threads_at_once_each_get_their_own_answer(rig: Rig) -> None:
    results: dict[str, list[int]] = {}

    def client(key: str) -> None:
        handle = rig.add(key, 3 + len(key), max_tokens=6)
        rig.listener.wait_ready(handle)
        rig.thread.attach(handle).result(WAIT_S)
        rig.listener.end_of(handle)
        results[key] = rig.listener.tokens(handle)

    threads = [threading.Thread(target=client, args=(f"k{'x' * i}",)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == {
        key: expected_tokens(request(key, 3 + len(key)).input_ids, 6) for key in (f"k{'x' * i}" for i in range(16))
    }


def test_a_refused_request_is_the_futures_error_and_the_loop_goes_on(rig: Rig) -> None:
    assert error_of(rig.thread.add(request("bad", [99]))).code is ErrorCode.INVALID_ARGUMENT
    assert rig.add("good")
    assert rig.thread.state is LoopState.SERVING


def test_an_idle_loop_does_not_run(rig: Rig) -> None:
    """Neither with nothing to do, nor while a sequence waits for an attach."""
    handle = rig.add("r")
    rig.listener.wait_ready(handle)
    rig.thread.stats().result(WAIT_S)
    calls = []
    original = rig.engine.has_work

    def has_work() -> bool:
        calls.append(1)
        return original()

    rig.engine.has_work = has_work  # type: ignore[method-assign]
    steps = rig.steps_called
    assert not threading.Event().wait(0.3)
    assert rig.steps_called == steps
    assert len(calls) <= 2


def test_a_lease_ends_without_any_command() -> None:
    with running(lease_ms=50) as rig:
        handle = rig.add("r")
        started = time.monotonic()
        assert rig.listener.end_of(handle).finish_reason is FinishReason.CANCELLED
        assert time.monotonic() - started < WAIT_S / 2


def test_a_lease_longer_than_the_platform_can_wait_ends_the_loop() -> None:
    with running(lease_ms=2**44) as rig:
        handle = rig.add("r")
        rig.listener.wait_ready(handle)
        rig.thread._thread.join(0.1)
        assert rig.thread.attach(handle).result(WAIT_S)
        assert rig.listener.end_of(handle).finish_reason is FinishReason.LENGTH


def test_a_deadline_ends_without_any_command(rig: Rig) -> None:
    handle = rig.add("r", timeout_ms=50)
    assert rig.listener.end_of(handle).finish_reason is FinishReason.DEADLINE


def test_abort_wakes_the_loop(rig: Rig) -> None:
    handle = rig.add("r")
    rig.listener.wait_ready(handle)
    assert rig.thread.abort(key="r").result(WAIT_S)
    assert rig.listener.end_of(handle).finish_reason is FinishReason.CANCELLED
    assert not rig.thread.abort(handle=handle).result(WAIT_S)


def test_new_requests_beyond_the_command_queue_are_refused_but_aborts_are_not(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    monkeypatch.setattr(loop, "MAX_REQUESTS_QUEUED", 3)
    monkeypatch.setattr(loop, "MAX_COMMANDS_QUEUED", 5)
    rig.hold()
    adds = [rig.thread.add(request(f"r{i}")) for i in range(4)]
    assert error_of(adds[3]).code is ErrorCode.UNAVAILABLE
    aborts = [rig.thread.abort(key="held") for _ in range(3)]
    assert error_of(aborts[2]).code is ErrorCode.UNAVAILABLE
    rig.gate.set()
    assert all(isinstance(add.result(WAIT_S), str) for add in adds[:3])
    assert [abort.result(WAIT_S) for abort in aborts[:2]] == [True, False]


def test_a_command_whose_caller_has_left_is_not_run(rig: Rig) -> None:
    rig.hold()
    add = rig.thread.add(request("r"))
    assert add.cancel()
    rig.gate.set()
    assert rig.thread.stats().result(WAIT_S).num_running + rig.engine.stats().num_waiting <= 1
    assert not rig.thread.abort(key="r").result(WAIT_S)


def test_drain_refuses_and_is_done_when_the_last_request_ends(rig: Rig) -> None:
    handle = rig.add("r")
    rig.listener.wait_ready(handle)
    drained, left = rig.thread.drain(), rig.thread.drain()
    assert error_of(rig.thread.add(request("new"))).code is ErrorCode.UNAVAILABLE
    assert rig.thread.state is LoopState.DRAINING
    assert not drained.done()
    assert left.cancel()  # a caller whose patience ended
    rig.thread.attach(handle).result(WAIT_S)
    assert drained.result(WAIT_S) is None
    assert rig.listener.end_of(handle).finish_reason is FinishReason.LENGTH


def test_drain_of_an_idle_engine_is_done_at_once(rig: Rig) -> None:
    assert rig.thread.drain().result(WAIT_S) is None


def test_stop_ends_what_is_live_and_refuses_what_comes(rig: Rig) -> None:
    handle = rig.add("r")
    rig.listener.wait_ready(handle)
    drained = rig.thread.drain()
    assert rig.thread.stop(WAIT_S)
    assert rig.thread.state is LoopState.STOPPED
    end = rig.listener.end_of(handle)
    assert (end.finish_reason, end.error.code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)  # type: ignore[union-attr]
    assert error_of(drained).code is ErrorCode.UNAVAILABLE
    assert error_of(rig.thread.stats()).code is ErrorCode.UNAVAILABLE


def test_stop_does_not_wait_longer_than_asked_for_a_long_step(rig: Rig) -> None:
    rig.hold()
    waiting = rig.thread.stats()
    assert not rig.thread.stop(0.05)
    rig.gate.set()
    assert rig.thread.stop(WAIT_S)
    assert error_of(waiting).code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("where", ["sink", "command", "close"])
def test_a_fatal_error_fails_the_loop_and_leaves_nobody_waiting(where: str) -> None:
    rig = Rig()
    handle = rig.add("r")
    rig.listener.wait_ready(handle)
    others: list[Future[Any]] = []
    if where == "sink":
        rig.listener.fail_with = RuntimeError("sink broke")
        others.append(rig.thread.attach(handle))
    elif where == "command":
        broken = rig.thread.call(lambda engine: 1 // 0)
        assert "ZeroDivisionError" in error_of(broken).message
    else:
        real = rig.runner.close

        def close(memory: Any, *, forget: bool = False) -> None:
            real(memory, forget=forget)
            raise RuntimeError("close broke")

        rig.runner.close = close  # type: ignore[method-assign]
        assert "close broke" in error_of(rig.thread.abort(handle=handle)).message
    rig.thread._thread.join(WAIT_S)
    assert rig.thread.state is LoopState.FAILED
    assert rig.thread.error
    error = error_of(rig.thread.add(request("new")))
    assert error.code is ErrorCode.UNAVAILABLE
    assert rig.thread.error in error.message
    assert rig.runner.pages_used == 0
    assert rig.engine.num_live == 0
    if where != "sink":
        assert rig.listener.end_of(handle).finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED)


def test_commands_behind_a_fatal_one_are_left_waiting() -> None:
    rig = Rig()
    rig.hold()
    broken, behind = rig.thread.call(lambda engine: 1 // 0), rig.thread.stats()
    rig.gate.set()
    assert "ZeroDivisionError" in error_of(broken).message
    assert "ZeroDivisionError" in error_of(behind).message
    rig.thread._thread.join(WAIT_S)
    assert rig.thread.state is LoopState.FAILED


def test_a_failing_step_does_not_fail_the_loop(rig: Rig) -> None:
    rig.runner.fail_with = RuntimeError("step broke")
    end = rig.listener.end_of(rig.add("r"))
    assert end.finish_reason is FinishReason.ERROR
    handle = rig.add("next")
    rig.listener.wait_ready(handle)
    rig.thread.attach(handle).result(WAIT_S)
    assert rig.listener.end_of(handle).finish_reason is FinishReason.LENGTH


def test_a_device_that_is_lost_fails_every_request_for_ever() -> None:
    """The loop ends with the last of a few failing steps in a row, so that the process ends and is started anew."""
    rig = Rig()

    def step(work: Any) -> Any:
        raise RuntimeError("device lost")

    rig.runner.step = step  # type: ignore[method-assign]
    for number in range(MAX_FAILED_STEPS):
        assert rig.thread.state is LoopState.SERVING
        end = rig.listener.end_of(rig.add(f"r{number}"))
        assert (end.finish_reason, end.error.code) == (FinishReason.ERROR, ErrorCode.INTERNAL)  # type: ignore[union-attr]
        assert "the step that ran it failed (RuntimeError: device lost)" in end.error.message  # type: ignore[union-attr]
    rig.thread._thread.join(WAIT_S)
    assert rig.thread.state is LoopState.FAILED
    assert "device lost" in error_of(rig.thread.add(request("new"))).message
    assert rig.runner.pages_used == 0


def test_failing_steps_with_good_ones_between_them_fail_the_loop(rig: Rig) -> None:
    for number in range(2 * MAX_FAILED_STEPS):
        rig.runner.fail_with = RuntimeError("step broke")
        assert rig.listener.end_of(rig.add(f"bad{number}")).finish_reason is FinishReason.ERROR
        rig.listener.wait_ready(rig.add(f"good{number}", 3))
        assert rig.thread.abort(key=f"good{number}").result(WAIT_S)
    assert rig.thread.state is LoopState.SERVING
