# SPDX-License-Identifier: Apache-2.0
"""A bound on blocking reads: gRPC's synchronous iterators have none of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Wait:
    """One bounded wait. ``expired``: it took too long and was cancelled."""

    def __init__(self, deadline: float, cancel: Callable[[], object]) -> None:
        self.deadline = deadline
        self.cancel = cancel
        self.expired = False


class Watchdog:
    """One thread that cancels waits past their deadline; it sleeps until the earliest one. Made for many short waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: set[Wait] = set()
        self._wakes_at = float("inf")
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def bound(self, seconds: float | None, cancel: Callable[[], object]) -> Iterator[Wait]:
        """``cancel`` is called (once, on the watchdog's thread) if the block takes longer than ``seconds``; None: never."""
        wait = Wait(time.monotonic() + seconds if seconds is not None else float("inf"), cancel)
        if seconds is not None:
            self._add(wait)
        try:
            yield wait
        finally:
            if seconds is not None:
                with self._changed:
                    self._waits.discard(wait)

    def close(self) -> None:
        """End the thread; waits in progress lose their bound."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _add(self, wait: Wait) -> None:
        with self._changed:
            self._waits.add(wait)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="cedar-client-watchdog", daemon=True)
                self._thread.start()
            if wait.deadline < self._wakes_at:
                self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for wait in [wait for wait in self._waits if wait.deadline <= now]:
                    self._waits.discard(wait)
                    wait.expired = True
                    wait.cancel()
                self._wakes_at = min((wait.deadline for wait in self._waits), default=float("inf"))
                self._changed.wait(self._wakes_at - now if self._waits else None)
