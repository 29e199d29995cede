# SPDX-License-Identifier: Apache-2.0
"""A step's connection to the engine, its watch over the server it belongs to, and calls that must not wait."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue

from cedar.config.engine import EngineConfig
from cedar.errors import CedarError
from cedar.service.client import EngineClient
from cedar.service.process import ensure_engine

MAX_PENDING_ABORTS = 4096
MAX_REMEMBERED_ABORTS = 16384
JOIN_TIMEOUT_S = 2.0
log = logging.getLogger("cedar.triton")


def end_with_server() -> None:
    """End this process as soon as its parent, the server, is gone.

    A killed server leaves its steps behind, and each step's shared memory: its name is the stub's second argument.
    """
    parent = os.getppid()
    try:
        fd = os.pidfd_open(parent)
    except OSError:  # gone already, or a kernel or sandbox without pidfd; the server's own health check remains
        return
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
        region = Path("/proc/self/cmdline").read_bytes().split(b"\0")[2].decode()
        with contextlib.suppress(OSError):
            (Path("/dev/shm") / region).unlink()
        os._exit(1)

    threading.Thread(target=watch, name="cedar-parent", daemon=True).start()


def run_guarded(turn: Callable[[], bool]) -> None:
    """Call ``turn`` until it returns False. An exception is logged: the one thread that sends must not end for it."""
    again = True
    while again:
        try:
            again = turn()
        except Exception:
            log.exception("a turn of the sending thread failed")


class EngineLink:
    """The engine's client, and the engine's return when it was lost.

    The client reconnects by itself; what is needed beside it is that somebody starts an engine that has died, and that
    nobody waits meanwhile: requests are refused with UNAVAILABLE until it accepts them again.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Blocks until the engine accepts requests; raises its error when it cannot."""
        self._config = config
        self._lock = threading.Lock()
        self._closed = False
        self._recovery: threading.Thread | None = None
        self.client = EngineClient(ensure_engine(config))
        self._aborts: Queue[tuple[str, str] | None] = Queue(MAX_PENDING_ABORTS)
        self._aborted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._aborter = threading.Thread(target=self._run_aborts, name="cedar-abort", daemon=True)
        self._aborter.start()

    def recover(self) -> None:
        """A call failed: if the engine itself is gone, begin to bring it back. Never waits."""
        with self._lock:
            if self._closed or self._recovery is not None or self.client.connected:
                return
            self._recovery = threading.Thread(target=self._recover, name="cedar-recovery", daemon=True)
            self._recovery.start()

    def _recover(self) -> None:
        log.warning("the engine is gone; starting it, or waiting for who does")
        try:
            ensure_engine(self._config)
            log.info("the engine is back")
        except CedarError as error:  # the next request tries again
            log.error("the engine did not come back: %s", error)
        finally:
            with self._lock:
                self._recovery = None

    def abort(self, handle: str, key: str = "") -> None:
        """End a sequence, by handle or (not admitted yet) by key; never waits. Repeats for one handle are ignored."""
        target = (handle, "") if handle else ("", key)
        with self._lock:
            if target == ("", "") or target in self._aborted:
                return
            if handle:  # a key may live again later, a handle never does
                self._aborted[target] = None
                if len(self._aborted) > MAX_REMEMBERED_ABORTS:
                    self._aborted.popitem(last=False)
        try:
            self._aborts.put_nowait(target)
        except Full:  # the engine does not answer; its lease and the end of our stream free the sequence
            log.error("too many aborts wait; dropped that of %s", handle or key)

    def _run_aborts(self) -> None:
        while (target := self._aborts.get()) is not None:
            try:
                self.client.abort(handle=target[0], key=target[1])
            except CedarError as error:
                log.warning("abort of %s: %s", target[0] or target[1], error)
                self.recover()

    def close(self) -> None:
        """Close the client; the engine aborts what it still runs for this process."""
        with self._lock:
            self._closed = True
        self.client.close()
        try:
            self._aborts.put_nowait(None)
        except Full:
            log.error("too many aborts wait at the end")
        self._aborter.join(JOIN_TIMEOUT_S)
