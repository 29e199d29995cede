# SPDX-License-Identifier: Apache-2.0
"""The private directory of one owner's engine: ``lock``, ``engine.sock``, ``engine.pid``, ``engine.log``.

Whoever holds the flock on ``lock`` is the engine, or is starting it: the engine inherits the locked descriptor from its
starter and keeps it for life, so the kernel itself guarantees that an owner never has two engines and that a killed one
leaves the lock free. The other files are information only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cedar.errors import CedarError, invalid
from cedar.service.owner import Owner

MAX_SOCKET_PATH = 107
"""sockaddr_un.sun_path has 108 bytes, one of them the terminating zero."""
LOG_TAIL_LINES = 20


def private_directory(path: Path) -> Path:
    """Make ``path`` (mode 0700) or verify it: a real directory, ours, closed to others. INVALID_ARGUMENT otherwise."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise invalid(str(path), "is not a directory", "a directory of this user with mode 0700")
    if info.st_uid != os.geteuid():
        raise invalid(str(path), f"belongs to user {info.st_uid}", f"a directory of this user ({os.geteuid()})")
    if info.st_mode & 0o077:
        raise invalid(str(path), f"has mode {stat.S_IMODE(info.st_mode):04o}", "mode 0700")
    return path


def runtime_roots() -> Iterator[Path]:
    """Where engine directories may live, best first: the user's runtime directory, then the temporary directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        yield Path(runtime) / "cedar"
    yield Path(tempfile.gettempdir()) / f"cedar-{os.geteuid()}"


@dataclass(frozen=True)
class EngineDirectory:
    """Paths and lock of one owner's engine."""

    path: Path

    @classmethod
    def create(cls, owner: Owner) -> EngineDirectory:
        """The owner's directory, made when needed, in the first root whose socket path is short enough."""
        for root in runtime_roots():
            directory = cls(root / owner.key)
            if len(os.fsencode(directory.socket)) <= MAX_SOCKET_PATH:
                private_directory(root)
                private_directory(directory.path)
                return directory
        raise invalid(
            "XDG_RUNTIME_DIR, TMPDIR",
            f"{directory.socket} is longer than {MAX_SOCKET_PATH} bytes",
            "a shorter runtime or temporary directory",
        )

    @property
    def socket(self) -> Path:
        return self.path / "engine.sock"

    @property
    def address(self) -> str:
        """gRPC target."""
        return f"unix:{self.socket}"

    @property
    def pid_file(self) -> Path:
        return self.path / "engine.pid"

    @property
    def log(self) -> Path:
        return self.path / "engine.log"

    @property
    def _lock_file(self) -> Path:
        return self.path / "lock"

    def try_lock(self) -> int | None:
        """An open descriptor that holds the lock, or None while an engine (or its starter) has it."""
        while True:
            private_directory(self.path)
            try:
                fd = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # swept since the line above
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            # a sweep may have removed the file between open and lock: a lock on an unlinked file excludes nobody
            if self._lock_file.exists() and os.path.samestat(os.fstat(fd), self._lock_file.stat()):
                return fd
            os.close(fd)

    def engine(self) -> Owner | None:
        """The engine process as it announced itself, or None when it is not there (any more)."""
        try:
            engine = Owner.parse(self.pid_file.read_text().strip())
        except (OSError, CedarError):
            return None
        return engine if engine.alive() else None

    def announce(self) -> None:
        """Write this process into ``engine.pid``."""
        self.pid_file.write_text(f"{Owner.of(os.getpid()).key}\n")

    def clear(self) -> None:
        """Remove what a former engine left. Only the holder of the lock may call it."""
        for path in (self.socket, self.pid_file):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the whole directory. Only the holder of the lock may call it, after the owner's end."""
        shutil.rmtree(self.path, ignore_errors=True)

    def log_tail(self) -> str:
        """The engine's last log lines, for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "(no engine.log)"
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(engine.log is empty)"

    def sweep_siblings(self) -> None:
        """Remove directories of owners that are gone and have no engine (an engine killed with its owner cleans nothing up)."""
        for path in self.path.parent.iterdir():
            with contextlib.suppress(CedarError, OSError):
                if path == self.path or Owner.parse(path.name).alive():
                    continue
                sibling = EngineDirectory(path)
                lock = sibling.try_lock()
                if lock is not None:
                    sibling.remove()
                    os.close(lock)
