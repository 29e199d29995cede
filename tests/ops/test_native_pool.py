# SPDX-License-Identifier: Apache-2.0
"""The threads of the CPU bodies: what a process may do beside them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_support import native_library

from cedar.ops import native


def in_own_process(check: Callable[[], None]) -> None:
    """Run one of the checks below in a process that has no other threads yet."""
    native_library()
    code = f"import sys; sys.path[:] = {sys.path!r}; import {Path(__file__).stem} as here; here.{check.__name__}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def product() -> torch.Tensor:
    """Large enough for threads."""
    x, y = torch.arange(64.0 * 512).view(64, 512) % 7, torch.empty(64, 64)
    torch.ops.cedar.mxfp8_linear.default(x, x, None, None, y, 0, 0.0)
    return y


def forks() -> None:
    native.load()
    native.set_threads(3)
    expected, stop = product(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            product()

    busy = threading.Thread(target=work)
    busy.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                os._exit(0 if torch.equal(product(), expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        busy.join()


def blocked_signals(thread: str) -> set[int]:
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    mask = int(status.split("SigBlk:")[1].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def blocked() -> None:
    native.load()
    before = set(os.listdir("/proc/self/task"))
    native.set_threads(3)
    product()
    workers = set(os.listdir("/proc/self/task")) - before
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    for worker in workers:
        while signal.SIGSEGV in (mask := blocked_signals(worker)):  # every thread starts with all signals blocked
            assert time.monotonic() < deadline
            os.sched_yield()
        assert {signal.SIGTERM, signal.SIGINT} <= mask
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.parametrize("check", [forks, blocked])
def test_threads_hang_a_child_or_take_a_signal(check: Callable[[], None]) -> None:
    """A fork in the middle of another thread's call has none of the threads; SIGTERM is for the engine, not for a worker."""
    in_own_process(check)
