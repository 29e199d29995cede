# SPDX-License-Identifier: Apache-2.0
"""The one thread that owns the engine: commands in through a bounded queue, updates out through one callback."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from cedar.engine.engine import Engine
from cedar.engine.request import GenerationRequest
from cedar.engine.stats import EngineStats
from cedar.engine.updates import SequenceUpdate
from cedar.errors import CedarError, ErrorCode, unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Sink = Callable[[list[SequenceUpdate]], None]

MAX_REQUESTS_QUEUED = 1024
"""`add` commands between two steps. The engine's own waiting queue is the limit that callers meet."""
MAX_COMMANDS_QUEUED = 16 * MAX_REQUESTS_QUEUED
"""All commands: attaching and cancelling must work when new requests are refused."""
LONGEST_SLEEP_S = 3600.0
"""A deadline may lie beyond what the platform can wait for."""
_SHUTTING_DOWN = "the engine is shutting down"


class LoopState(StrEnum):
    """Of the thread. The words are those of `Status`."""

    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineThread:
    """Runs an `Engine`. Every method may be called from any thread and returns a future; results come between steps.

    ``sink`` is called on the engine's thread with the updates of each step: it must hand them on and return. An exception
    from it, or one that the engine cannot contain, ends everything that is live with INTERNAL and sets state ``failed``.
    """

    def __init__(self, engine: Engine, sink: Sink) -> None:
        self._engine = engine
        self._sink = sink
        self._condition = threading.Condition()
        self._commands: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._drained: list[Future[None]] = []
        self._stopping = False
        self._step_began: float | None = None
        self._state = LoopState.SERVING
        self._error = ""
        self._thread = threading.Thread(target=self._main, name="cedar-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    @property
    def state(self) -> LoopState:
        """Where the loop is."""
        return self._state

    @property
    def error(self) -> str:
        """Why, with state ``failed``."""
        return self._error

    def seconds_in_step(self) -> float:
        """How long the step that runs now has taken; 0 between steps. A device that hangs shows here and nowhere else."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def add(self, request: GenerationRequest) -> Future[str]:
        """`Engine.add`."""
        return self._submit(lambda engine: engine.add(request), MAX_REQUESTS_QUEUED)

    def attach(self, handle: str) -> Future[bool]:
        """`Engine.attach`."""
        return self.call(lambda engine: engine.attach(handle))

    def abort(self, *, handle: str | None = None, key: str | None = None) -> Future[bool]:
        """`Engine.abort`."""
        return self.call(lambda engine: engine.abort(handle=handle, key=key))

    def stats(self) -> Future[EngineStats]:
        """`Engine.stats`."""
        return self.call(lambda engine: engine.stats())

    def drain(self) -> Future[None]:
        """Refuse new requests; the future is done when the last one has ended (the caller bounds its wait)."""
        drained: Future[None] = Future()

        def begin(engine: Engine) -> None:
            engine.drain()
            self._state = LoopState.DRAINING
            self._drained.append(drained)

        begun = self.call(begin)
        begun.add_done_callback(partial(_pass_on_error, drained))
        return drained

    def end_all(self, error: CedarError) -> Future[None]:
        """`Engine.end_all`; the thread goes on."""
        return self.call(lambda engine: self._emit(engine.end_all(error)))

    def call(self, command: Callable[[Engine], T]) -> Future[T]:
        """Run ``command`` with the engine, between two steps. A CedarError it raises is the future's; others are fatal."""
        return self._submit(command, MAX_COMMANDS_QUEUED)

    def stop(self, timeout: float) -> bool:
        """End what is live with UNAVAILABLE and end the thread; False if it is still in a step after ``timeout`` seconds."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # the thread

    def _submit(self, command: Callable[[Engine], T], limit: int) -> Future[T]:
        future: Future[T] = Future()
        with self._condition:
            if self._stopping or self._state in (LoopState.FAILED, LoopState.STOPPED):
                future.set_exception(unavailable(f"the engine failed: {self._error}" if self._error else _SHUTTING_DOWN))
            elif len(self._commands) >= limit:
                future.set_exception(unavailable(f"{limit} commands wait for the engine already"))
            else:
                self._commands.append((command, future))
                self._condition.notify()
        return future

    def _main(self) -> None:
        try:
            while self._wait():
                self._run_commands()
                if self._engine.has_work():
                    self._step_began = time.monotonic()
                    updates = self._engine.step()
                    self._step_began = None
                    self._emit(updates)
                self._report_drained()
            self._close(LoopState.STOPPED, unavailable(_SHUTTING_DOWN))
        except BaseException as error:
            log.exception("the engine's thread failed")
            self._error = f"{type(error).__name__}: {error}"
            self._close(LoopState.FAILED, CedarError(ErrorCode.INTERNAL, f"the engine failed: {self._error}"))

    def _wait(self) -> bool:
        """Sleep until there is something to do. False: stop."""
        with self._condition:
            while not (self._stopping or self._commands or self._engine.has_work()):
                deadline = self._engine.next_deadline()
                seconds = None if deadline is None else max(0, deadline - self._engine.now_ns()) / 1e9
                self._condition.wait(None if seconds is None else min(seconds, LONGEST_SLEEP_S))
            return not self._stopping

    def _run_commands(self) -> None:
        with self._condition:
            commands, self._commands = self._commands, deque()
        while commands:
            command, future = commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command(self._engine))
            except CedarError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(CedarError(ErrorCode.INTERNAL, f"the engine failed: {type(error).__name__}: {error}"))
                with self._condition:
                    self._commands.extendleft(reversed(commands))
                raise

    def _emit(self, updates: list[SequenceUpdate]) -> None:
        if updates:
            self._sink(updates)

    def _report_drained(self) -> None:
        if self._drained and self._engine.num_live == 0:
            for future in self._drained:
                _settle(future, None)
            self._drained.clear()

    def _close(self, state: LoopState, error: CedarError) -> None:
        """The end of the thread: nobody is left waiting."""
        with self._condition:
            self._state = state
            commands, self._commands = self._commands, deque()
        try:
            self._emit(self._engine.end_all(error))
        except Exception:
            log.exception("the last updates could not be handed on")
        for future in [*self._drained, *(future for _, future in commands)]:
            _settle(future, error)


def _pass_on_error(waiting: Future[None], done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        _settle(waiting, error)


def _settle(future: Future[None], error: BaseException | None) -> None:
    """Complete a future, unless whoever waited has cancelled it."""
    if future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
