# SPDX-License-Identifier: Apache-2.0
"""The process an engine belongs to: a tritonserver, told from a later process of the same number by its start time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cedar.errors import CedarError, ErrorCode, invalid

SERVER_EXECUTABLE = "tritonserver"


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state (field 3) on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the command name (field 2) is in parentheses and may hold spaces and parentheses itself
    return text[text.rindex(")") + 2 :].split()


@dataclass(frozen=True)
class Owner:
    """pid and start time (clock ticks since boot, /proc/<pid>/stat field 22): unique while the machine is up."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        """The living process ``pid``; UNAVAILABLE when there is none."""
        fields = _stat_fields(pid)
        if fields is None or fields[0] in "ZX":
            raise CedarError(ErrorCode.UNAVAILABLE, f"owner process {pid} does not exist (any more)")
        return cls(pid, int(fields[19]))

    @classmethod
    def parse(cls, key: str) -> Owner:
        """The inverse of `key`."""
        pid, _, start = key.partition("-")
        if not (pid.isdecimal() and start.isdecimal()):
            raise invalid("owner", f"is {key!r}", "<pid>-<start time>")
        return cls(int(pid), int(start))

    @property
    def key(self) -> str:
        """Name of the engine's directory."""
        return f"{self.pid}-{self.start_time}"

    def alive(self) -> bool:
        """False also for a zombie and for another process that was given the same number."""
        fields = _stat_fields(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.start_time


def find_owner() -> Owner:
    """The nearest ancestor that runs ``tritonserver``: what a Python model's stub belongs to."""
    pid = os.getppid()
    while pid > 0:
        if _is_server(pid):
            return Owner.of(pid)
        fields = _stat_fields(pid)
        if fields is None:
            break
        pid = int(fields[1])
    raise CedarError(
        ErrorCode.UNAVAILABLE,
        f"no parent of process {os.getpid()} is {SERVER_EXECUTABLE}: the server is gone, or this is not one of its models; "
        "set CEDAR_ENGINE_ADDRESS to use an engine that runs elsewhere",
    )


def _is_server(pid: int) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name.removesuffix(" (deleted)") == SERVER_EXECUTABLE
    except OSError:  # another user's process hides its executable but not its name
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip() == SERVER_EXECUTABLE
        except OSError:
            return False
