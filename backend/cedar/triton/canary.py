# SPDX-License-Identifier: Apache-2.0
"""A request of our own, again and again: the one sign that a server which looks alive still answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cedar.errors import CedarError

INTERVAL_S = 5.0


class Canary:
    """``ask`` goes through the whole ensemble and raises `CedarError` when it fails; it bounds its own time.

    A server can hang behind healthy probes: every process alive, every model ready, no request ever answered.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._stop = threading.Event()
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="cedar-canary", daemon=True)
        self._thread.start()

    def silent_for(self) -> float:
        """Seconds since the last answer, or since the last `forgive`."""
        return time.monotonic() - self._answered

    def forgive(self) -> None:
        """No answer is expected now."""
        self._answered = time.monotonic()

    def stop(self) -> None:
        """Ask no more; returns at once."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self._ask()
            except CedarError:
                continue  # silence counts by itself
            self._answered = time.monotonic()
