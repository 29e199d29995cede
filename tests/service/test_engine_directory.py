# SPDX-License-Identifier: Apache-2.0
"""Whose engine it is and where it lives: reused pids, foreign directories, long paths, races for the lock."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cedar.errors import CedarError
from cedar.service.directory import MAX_SOCKET_PATH, EngineDirectory, private_directory
from cedar.service.owner import Owner
from cedar.service.process import engine_python

ME = Owner.of(os.getpid())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cedar-test-") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


def test_reused_pid_is_taken_for_the_owner() -> None:
    assert ME.alive()
    assert not Owner(ME.pid, ME.start_time + 1).alive()
    assert Owner.parse(ME.key) == ME


@pytest.mark.parametrize("key", ["", "12", "-12", "12-", "a-b", "12-13-14"])
def test_directory_of_something_else_is_read_as_a_key(key: str) -> None:
    with pytest.raises(CedarError, match="INVALID_ARGUMENT: owner"):
        Owner.parse(key)


def test_zombie_is_taken_for_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(child.pid)
    assert owner.alive()
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    assert not owner.alive()
    with pytest.raises(CedarError, match=f"UNAVAILABLE: owner process {child.pid}"):
        Owner.of(child.pid)
    child.wait()


def test_directory_of_another_user_is_used(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EngineDirectory.create(ME)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CedarError, match="belongs to user"):
        EngineDirectory.create(ME)


def test_open_or_linked_directory_is_used(runtime: Path) -> None:
    (runtime / "cedar").mkdir(mode=0o755)
    (runtime / "cedar").chmod(0o755)
    with pytest.raises(CedarError, match="mode 0755; allowed: mode 0700"):
        EngineDirectory.create(ME)
    (runtime / "link").symlink_to(runtime)
    with pytest.raises(CedarError, match="is not a directory"):
        private_directory(runtime / "link")


def test_long_runtime_path_breaks_the_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with tempfile.TemporaryDirectory(prefix="cedar-test-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        directory = EngineDirectory.create(ME)
        assert directory.path.is_relative_to(short)
        assert len(str(directory.socket)) <= MAX_SOCKET_PATH
        assert directory.path.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(CedarError, match=f"longer than {MAX_SOCKET_PATH} bytes"):
            EngineDirectory.create(ME)


def test_missing_runtime_directory_is_fatal(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    assert EngineDirectory.create(ME).path.is_relative_to(runtime)


def test_lock_is_held_twice_or_for_ever(runtime: Path) -> None:
    directory = EngineDirectory.create(ME)
    first = directory.try_lock()
    assert first is not None
    assert directory.try_lock() is None
    keeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(first,))
    os.close(first)
    assert directory.try_lock() is None, "the child that inherited the lock does not hold it"
    keeper.kill()
    keeper.wait()
    keeper.stdin.close()
    again = directory.try_lock()
    assert again is not None
    os.close(again)


def test_lock_on_a_swept_file_excludes_nobody(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep removes the directory between another process's open and flock."""
    directory = EngineDirectory.create(ME)
    real = fcntl.flock
    sweeps = [1]

    def sweep_first(fd: int, operation: int) -> None:
        if sweeps:
            sweeps.pop()
            directory.remove()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    lock = directory.try_lock()
    assert lock is not None
    assert os.path.samestat(os.fstat(lock), (directory.path / "lock").stat())
    assert directory.try_lock() is None
    os.close(lock)


def test_sweep_takes_what_is_alive(runtime: Path) -> None:
    directory = EngineDirectory.create(ME)
    living, dead_but_locked, dead = (
        EngineDirectory.create(Owner(pid, time)) for pid, time in ((os.getppid(), 0), (2, 7), (3, 7))
    )
    living = EngineDirectory.create(Owner.of(os.getppid()))
    foreign = directory.path.parent / "notes"
    foreign.mkdir()
    lock = dead_but_locked.try_lock()
    directory.sweep_siblings()
    assert [path.path.exists() for path in (directory, living, dead_but_locked, dead)] == [True, True, True, False]
    assert foreign.exists()
    os.close(lock)


def test_engine_pid_file_misleads(runtime: Path) -> None:
    directory = EngineDirectory.create(ME)
    assert directory.engine() is None
    directory.pid_file.write_text("garbage")
    assert directory.engine() is None
    directory.pid_file.write_text(Owner(ME.pid, ME.start_time + 1).key)
    assert directory.engine() is None
    directory.announce()
    assert directory.engine() == ME


def test_log_tail_is_the_head_or_the_whole(runtime: Path) -> None:
    directory = EngineDirectory.create(ME)
    assert directory.log_tail() == "(no engine.log)"
    directory.log.write_text("".join(f"line {n} {'é' * 50}\n" for n in range(10_000)))
    lines = directory.log_tail().splitlines()
    assert lines[-1].startswith("line 9999 ")
    assert len(lines) == 20


def test_stub_is_taken_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/tritonserver/backends/python/triton_python_backend_stub")
    monkeypatch.delenv("CEDAR_PYTHON", raising=False)
    output = subprocess.run(
        [engine_python(), "-c", "import grpc, sys; print(sys.version_info[:2])"], capture_output=True, text=True
    )
    assert output.stdout.strip() == str(sys.version_info[:2]), output.stderr
    monkeypatch.setenv("CEDAR_PYTHON", "no-such-python")
    with pytest.raises(CedarError, match="CEDAR_PYTHON: no-such-python is not an executable"):
        engine_python()
