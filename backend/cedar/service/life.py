# SPDX-License-Identifier: Apache-2.0
"""How long an engine lives: as long as its owner, and as long as somebody is there to use it.

Somebody is there while any call is open; every adapter holds a Generate stream for its whole life. A Status call, which is
how adapters wait for an engine that loads, starts the grace period anew. So an engine outlives the reload of single
models (the others still hold their streams), and of all of them if the first is back within the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator

from cedar.service.owner import Owner

GRACE_S = 5.0
_TICK_S = 0.25


class Presence:
    """Counts open calls. Event loop only."""

    def __init__(self) -> None:
        self._open = 0
        self._idle_s = 0.0

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Somebody is there for the length of this block."""
        self._open += 1
        self._idle_s = 0.0
        try:
            yield
        finally:
            self._open -= 1
            self._idle_s = 0.0

    async def wait_until_left(self) -> None:
        """Returns when nobody has been there for `GRACE_S`."""
        # idle time is summed from ticks, so a loop that was held up does not take the hold-up for idleness
        while self._idle_s < GRACE_S:
            await asyncio.sleep(_TICK_S)
            self._idle_s = 0.0 if self._open else self._idle_s + _TICK_S


async def wait_until_ended(owner: Owner) -> None:
    """Returns as soon as the owner has ended."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(owner.pid)
    except OSError:  # gone already, or a kernel or sandbox without pidfd
        while owner.alive():
            await asyncio.sleep(_TICK_S)
        return
    try:
        ended = asyncio.Event()
        loop.add_reader(fd, ended.set)
        if owner.alive():  # asked after opening: from here on the descriptor stands for the right process
            await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
