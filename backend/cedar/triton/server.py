# SPDX-License-Identifier: Apache-2.0
"""One tritonserver process: starting it, asking it, ending it."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from cedar.config.engine import EngineConfig
from cedar.errors import CedarError, ErrorCode, invalid
from cedar.service.directory import EngineDirectory
from cedar.service.owner import Owner
from cedar.triton.bundle import STUB, Triton, python_environment
from cedar.triton.tensors import ENSEMBLE, INSTANCES

POLL_S = 0.05
REQUEST_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 4
"""Triton waits this long for what it counts as running; we have drained before, and it also counts idle client streams."""
KILL_TIMEOUT_S = 10.0
STUBS_END_S = 2.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def claim_ports(config: EngineConfig) -> tuple[int, int, int]:
    """HTTP, gRPC and metrics port, free now; a 0 becomes a free one. INVALID_ARGUMENT names one that is taken."""
    names = ("http_port", "grpc_port", "metrics_port")
    ports = [getattr(config, name) for name in names]
    named = [port for port in ports if port]
    if len(set(named)) < len(named):
        raise invalid(", ".join(names), f"are {', '.join(map(str, ports))}", "different ports")
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with contextlib.ExitStack() as held:  # all at once, so that free ones differ
        for index, name in enumerate(names):
            probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, ports[index]))
            except OSError as error:
                problem = f"{config.host}:{ports[index]} cannot be bound ({error.strerror})"
                raise invalid(name, problem, "a free port, or 0 for any") from None
            ports[index] = probe.getsockname()[1]
    return ports[0], ports[1], ports[2]


def _die_with_parent() -> None:
    """Runs in the child before exec: the kernel kills the server when this process is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class TritonServer:
    """A running server. Its stubs share its process group; the engine is in a session of its own."""

    def __init__(self, triton: Triton, config: EngineConfig, repository: Path) -> None:
        """Start it, without any model loaded. Must be called on the main thread: the server dies with the calling one."""
        self._address = ("127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host, config.http_port)
        self._external_engine = config.engine_address
        verbose = str(config.log_level == "debug").lower()
        command = [
            str(triton.executable),
            f"--model-repository={repository}",
            "--model-control-mode=explicit",
            "--disable-auto-complete-config",
            *(f"--{name}-address={config.host}" for name in ("http", "grpc", "metrics")),
            *(f"--{name}-port={getattr(config, f'{name}_port')}" for name in ("http", "grpc", "metrics")),
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--log-info={verbose}",
            # tensors are small and stay in host memory
            "--pinned-memory-pool-byte-size=0",
            f"--allow-gpu-metrics={str(Path('/dev/nvidiactl').exists()).lower()}",
            *triton.arguments,
        ]
        environment = os.environ | python_environment() | config.as_env() | triton.environment
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            self.owner = Owner.of(self._process.pid)
        except CedarError:
            status = self._process.wait(KILL_TIMEOUT_S)
            raise CedarError(ErrorCode.INTERNAL, f"{triton.executable} ended at once with status {status}") from None
        self._stubs: dict[psutil.Process, str] = {}
        self._shared_memory: set[Path] = set()

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    # ---- its HTTP interface ----

    def _request(self, method: str, path: str, timeout_s: float = REQUEST_TIMEOUT_S, body: bytes = b"{}") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        try:
            connection.request(method, path, body=body if method == "POST" else None)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise CedarError(ErrorCode.UNAVAILABLE, f"tritonserver does not answer: {error}") from None
        finally:
            connection.close()

    def live(self) -> bool:
        """It answers."""
        try:
            return self._request("GET", "/v2/health/live")[0] == 200
        except CedarError:
            return False

    def ask(self) -> None:
        """Cancel a request that does not exist: goes through every step and costs nothing. Raises when nothing comes back."""
        body = json.dumps({"cancel": True, "request_key": "cedar-canary", "stream": False}).encode()
        status, answer = self._request("POST", f"/v2/models/{ENSEMBLE}/generate", body=body)
        if status != 200 or b"not_found" not in answer:
            raise CedarError(ErrorCode.UNAVAILABLE, f"the ensemble answers with status {status}")

    def load(self, model: str, timeout_s: float) -> None:
        """Returns when the model is ready; an ensemble loads its steps. Raises with Triton's reason."""
        status, body = self._request("POST", f"/v2/repository/models/{model}/load", timeout_s)
        if status != 200:
            with contextlib.suppress(ValueError, KeyError):
                raise CedarError(ErrorCode.INTERNAL, f"model {model} did not load: {json.loads(body)['error']}")
            raise CedarError(ErrorCode.INTERNAL, f"model {model} did not load: HTTP status {status}")

    def unload(self, model: str) -> None:
        """Readiness turns false at once; running requests go on."""
        self._request("POST", f"/v2/repository/models/{model}/unload")

    def states(self) -> dict[str, set[str]]:
        """The states of each model's versions: READY, LOADING, UNLOADING, UNAVAILABLE."""
        states: dict[str, set[str]] = {}
        for entry in json.loads(self._request("POST", "/v2/repository/index")[1]):
            states.setdefault(entry["name"], set()).add(entry.get("state", "UNAVAILABLE"))
        return states

    def wait_unloaded(self, model: str, timeout_s: float) -> bool:
        """Whether the model's last request ended in time."""
        deadline = time.monotonic() + timeout_s
        while not self.states().get(model, set()).isdisjoint({"READY", "LOADING", "UNLOADING"}):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    # ---- its processes ----

    def lost_models(self) -> set[str]:
        """Models that the server takes for ready but whose stubs are not all alive."""
        alive = {process: model for process, model in self._stubs.items() if _alive(process)}
        if _counts(alive) != INSTANCES:
            alive = self._find_stubs()
        self._stubs = alive
        short = {name for name, count in INSTANCES.items() if _counts(alive).get(name, 0) < count}
        if not short:
            return set()
        states = self.states()
        return {name for name in short if states.get(name) == {"READY"}}

    def _find_stubs(self) -> dict[psutil.Process, str]:
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.Error):
                    command = child.cmdline()
                    model = Path(command[1]).parents[1].name if len(command) > 1 and command[0].endswith(STUB) else ""
                    if model and _alive(child):
                        found[child] = model
                        self._shared_memory.add(Path("/dev/shm") / command[2])
        return found

    def engine_directory(self) -> EngineDirectory | None:
        """Where this server's engine lives; None for one that runs elsewhere."""
        return None if self._external_engine else EngineDirectory.create(self.owner)

    def engine_address(self) -> str:
        """gRPC target of the engine."""
        return self._external_engine or EngineDirectory.create(self.owner).address

    def terminate(self) -> None:
        """Ask it to end; returns when it has, or has been killed after its own exit timeout."""
        self._find_stubs()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S + 1)
        self.kill()

    def kill(self) -> None:
        """End the server, its stubs and its engine; returns when they are gone."""
        stubs = self._find_stubs() or self._stubs
        self._process.kill()
        self._process.wait(KILL_TIMEOUT_S)
        # its stubs see that it is gone, tidy up and end; one that cannot is killed
        deadline = time.monotonic() + STUBS_END_S
        while any(map(_alive, stubs)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for region in self._shared_memory:  # left by a stub that was killed, or that had ended before its server was
            region.unlink(missing_ok=True)
        directory = self.engine_directory()
        engine = directory.engine() if directory is not None else None
        if engine is not None:
            end_process(engine, signal.SIGTERM, signal.SIGKILL)


def _counts(stubs: dict[psutil.Process, str]) -> dict[str, int]:
    models = list(stubs.values())
    return {model: models.count(model) for model in models}


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_process(owner: Owner, *signals: signal.Signals) -> None:
    """Send these to a process that is not our child, until it ends; bounded."""
    for sign in signals:
        with contextlib.suppress(ProcessLookupError):
            if owner.alive():
                os.kill(owner.pid, sign)
        deadline = time.monotonic() + KILL_TIMEOUT_S / 2
        while owner.alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)
