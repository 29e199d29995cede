# SPDX-License-Identifier: Apache-2.0
"""Finding the engine of this server, and starting it when there is none.

Every adapter calls `ensure_engine`; whichever gets the lock starts the engine, the others wait for it. The engine is no
child of its starter (double fork), so it outlives the stub that happened to start it; it watches its owner instead
(`cedar.service.life`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc

import cedar
from cedar.config.engine import EngineConfig
from cedar.errors import CedarError, ErrorCode, invalid, unavailable
from cedar.service.convert import parse_error
from cedar.service.directory import EngineDirectory
from cedar.service.owner import Owner, find_owner
from cedar.v1 import engine_pb2 as pb
from cedar.v1 import engine_pb2_grpc

POLL_S = 0.1
PROBE_TIMEOUT_S = 2.0
SPAWN_TIMEOUT_S = 10.0
# the second fork: the starter's child ends at once, so the engine is adopted by init; its output is the log (stderr)
_DETACH = "import os, sys\nif os.fork() == 0:\n    os.dup2(2, 1)\n    os.execv(sys.argv[1], sys.argv[1:])\n"


def ensure_engine(config: EngineConfig, owner_pid: int | None = None, on_progress: Callable[[float], None] | None = None) -> str:
    """Address of an engine that accepts requests; starts one when this owner has none.

    owner_pid: the process that the engine belongs to; None: the tritonserver among this process's parents.
    on_progress: called with the loaded share of the model, 0 to 1, while waiting.
    With ``config.engine_address`` the engine runs elsewhere and is only waited for. Waits ``engine_start_timeout_ms`` at
    most. Raises the engine's own error when its model does not load, INTERNAL with its last log lines when it dies while
    starting, UNAVAILABLE when it is not ready in time.
    """
    deadline = time.monotonic() + config.engine_start_timeout_ms / 1000
    if config.engine_address:
        return _wait_external(config.engine_address, deadline, on_progress)
    owner = find_owner() if owner_pid is None else Owner.of(owner_pid)
    directory = EngineDirectory.create(owner)
    directory.sweep_siblings()
    started = False
    while True:
        lock = directory.try_lock()
        if lock is not None:
            try:
                if started:
                    raise _startup_failure(directory, "ended while starting")
                if not owner.alive():
                    directory.remove()
                    raise unavailable(f"owner process {owner.pid} has ended")
                _spawn(config, owner, directory, lock)
                started = True
            finally:
                os.close(lock)  # the engine keeps its inherited duplicate
        status = probe(directory.address) if directory.socket.exists() else None
        if _is_serving(status, on_progress):
            return directory.address
        if time.monotonic() > deadline:
            raise unavailable(
                f"engine not ready within {config.engine_start_timeout_ms} ms ({_describe(status)}); "
                f"last lines of {directory.log}:\n{directory.log_tail()}"
            )
        time.sleep(POLL_S)


def probe(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> pb.StatusResponse | None:
    """One Status call on a connection of its own; None when nobody answers."""
    with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            return engine_pb2_grpc.EngineStub(channel).Status(pb.StatusRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return None


def _is_serving(status: pb.StatusResponse | None, on_progress: Callable[[float], None] | None) -> bool:
    """True: accepts requests. False: not yet. Raises the engine's error when it has failed to load."""
    if status is None:
        return False
    if status.state == "failed":
        raise parse_error(status.error)
    if on_progress is not None:
        on_progress(status.load_fraction)
    return status.state == "serving"


def _wait_external(address: str, deadline: float, on_progress: Callable[[float], None] | None) -> str:
    while True:
        status = probe(address)
        if _is_serving(status, on_progress):
            return address
        if time.monotonic() > deadline:
            raise unavailable(f"engine at {address} (CEDAR_ENGINE_ADDRESS) is not ready: {_describe(status)}")
        time.sleep(POLL_S)


def _describe(status: pb.StatusResponse | None) -> str:
    return "no answer" if status is None else f"state {status.state}, {status.load_fraction:.0%} loaded"


def _startup_failure(directory: EngineDirectory, what: str) -> CedarError:
    return CedarError(ErrorCode.INTERNAL, f"engine {what}; last lines of {directory.log}:\n{directory.log_tail()}")


def _spawn(config: EngineConfig, owner: Owner, directory: EngineDirectory, lock: int) -> None:
    """Start the engine detached from this process; it inherits ``lock`` and so holds it until it ends."""
    directory.clear()
    python = engine_python()
    command = [python, "-I", "-S", "-c", _DETACH, python, "-m", "cedar.service.main"]
    command += ["--owner", owner.key, "--directory", str(directory.path), "--lock-fd", str(lock)]
    with directory.log.open("ab") as log:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_engine_env(config),
                pass_fds=(lock,),
                start_new_session=True,
                timeout=SPAWN_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CedarError(ErrorCode.INTERNAL, f"engine: cannot start {python} (CEDAR_PYTHON): {error}") from error


def _engine_env(config: EngineConfig) -> dict[str, str]:
    """This environment with the merged settings in place of their sources, and this very package first on the path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}  # of the stub's Python, not the engine's
    env |= config.as_env()
    package_root = str(Path(cedar.__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, env.get("PYTHONPATH"))))
    env["PYTHONUNBUFFERED"] = "1"
    return env


def engine_python() -> str:
    """The interpreter that runs the engine: ``CEDAR_PYTHON``, else the one of the environment that holds our libraries.

    Inside Triton's stub ``sys.executable`` is not Python, so the environment is told from where grpc was imported.
    """
    if chosen := os.environ.get("CEDAR_PYTHON"):
        path = shutil.which(chosen)
        if path is None:
            raise invalid("CEDAR_PYTHON", f"{chosen} is not an executable", "a Python interpreter")
        return path
    site_packages = Path(grpc.__file__).resolve().parents[1]
    candidates = [site_packages.parents[2] / "bin" / "python3", Path(sys.prefix) / "bin" / "python3"]
    if Path(sys.executable or "").name.startswith("python"):
        candidates.insert(0, Path(sys.executable))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("python3")
    if found is None:
        raise invalid("CEDAR_PYTHON", "is not set, and no python3 was found", "a Python interpreter with this package")
    return found
