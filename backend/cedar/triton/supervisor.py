# SPDX-License-Identifier: Apache-2.0
"""`cedar serve`: starts a server, watches over its stubs and its engine, drains and ends it.

A server of 24.10 neither announces nor replaces a dead stub, and requests that ran in it never end. So the supervisor takes
readiness away, reloads what was lost, and where requests hang it starts the server anew: their clients get an error at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import py_compile
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cedar.config.engine import SHIPPED_REPOSITORY, EngineConfig
from cedar.errors import CedarError, ErrorCode, invalid
from cedar.service.client import EngineClient
from cedar.service.owner import Owner
from cedar.service.process import ensure_engine, probe
from cedar.triton import pbtxt
from cedar.triton.bundle import Triton, cache_directory, find_triton
from cedar.triton.canary import Canary
from cedar.triton.checkpoint import model_directory
from cedar.triton.server import TritonServer, claim_ports, end_process
from cedar.triton.tensors import ENSEMBLE, INSTANCES
from cedar.v1 import engine_pb2 as pb

WATCH_S = 0.25
LIVE_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 120.0
HANG_TIMEOUT_S = 2.0
"""A lost stub's model that has not unloaded by then (per instance: it ends them one by one) holds requests that never end."""
LAST_RESPONSES_S = 1.0
MAX_RESTARTS = 10
RESTART_WINDOW_S = 300.0
MAX_SILENCE_S = 30.0
"""The ensemble answers nothing although all its processes are there."""
PROBE_S = 2.0
MAX_MISSES = 5
"""An engine that leaves so many probes unanswered is stuck: its loop answers in milliseconds, also while it computes."""
READINESS_MODEL = "decoder_generate"
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
log = logging.getLogger("cedar.serve")


class Stopped(Exception):
    """SIGTERM or SIGINT arrived while something was waited for."""


class Ended(Exception):
    """The server is gone. ``crashed``: by a fault of its own."""

    def __init__(self, status: int) -> None:
        self.crashed = -status in _CRASHES
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        super().__init__(f"tritonserver {how}")


class Supervisor:
    """Runs on the main thread. ``on_progress``: loaded share of the model; ``on_ready``: requests are accepted."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[float], None],
        on_ready: Callable[[EngineConfig, pb.StatusResponse], None],
    ) -> None:
        """Checks everything that can be checked before a process is started."""
        self._triton: Triton = find_triton(config)
        self._repository = repository_of(config)
        compile_models(self._repository)
        model = check_model(config)
        http, grpc, metrics = claim_ports(config)
        self._config = dataclasses.replace(config, model=str(model), http_port=http, grpc_port=grpc, metrics_port=metrics)
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._stop = threading.Event()
        self._server: TritonServer | None = None
        self._engine: Owner | None = None
        self._restarts: list[float] = []
        self._next_probe = 0.0
        self._misses = 0
        self._was_ready = False

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit status. Raises what kept it from serving at all."""
        previous = {number: signal.signal(number, lambda *_: self._stop.set()) for number in _STOP_SIGNALS}
        try:
            self._serve()
        except Stopped:
            self._drain()
            return 0
        except (Ended, CedarError) as end:
            if isinstance(end, CedarError) and not self._was_ready:
                raise
            log.error("%s", end)
            return 1
        finally:
            if self._server is not None:
                self._server.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _serve(self) -> NoReturn:
        while True:
            self._server = TritonServer(self._triton, self._config, self._repository)
            try:
                self._start(self._server)
                self._watch(self._server)
            except Ended as end:
                if not end.crashed:
                    raise
                log.error("%s; starting it again", end)
            except CedarError as error:  # whoever served once is brought back; what never served is the caller's to mend
                if not self._was_ready:
                    raise
                log.error("%s; starting tritonserver again", error)
            self._count_restart()
            self._server.kill()

    def _count_restart(self) -> None:
        now = time.monotonic()
        self._restarts = [then for then in self._restarts if now - then < RESTART_WINDOW_S] + [now]
        if len(self._restarts) > MAX_RESTARTS:
            raise CedarError(ErrorCode.INTERNAL, f"{MAX_RESTARTS} restarts in {RESTART_WINDOW_S:.0f} s did not help")

    def _pause(self) -> None:
        """One turn of waiting; raises when there is nothing to wait for any more."""
        if self._stop.wait(WATCH_S):
            raise Stopped
        assert self._server is not None
        status = self._server.exit_status
        if status is not None:
            raise Ended(status)

    def _await(self, work: Callable[[], object]) -> None:
        """Do ``work`` on a thread, while this one goes on to watch. Raises the `CedarError` that it raised."""
        failures: list[CedarError] = []

        def run() -> None:
            try:
                work()
            except CedarError as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="cedar-work", daemon=True)
        thread.start()
        while thread.is_alive():
            self._pause()
            if not self._config.engine_address:  # an engine elsewhere is simply waited for
                self._end_stuck_engine()
        if failures:
            raise failures[0]

    # ---- start ----

    def _start(self, server: TritonServer) -> None:
        deadline = time.monotonic() + LIVE_TIMEOUT_S
        while not server.live():
            self._pause()
            if time.monotonic() > deadline:
                raise CedarError(ErrorCode.INTERNAL, f"tritonserver did not answer within {LIVE_TIMEOUT_S:.0f} s")
        status = self._load(server, ENSEMBLE)
        self._was_ready = True
        self._on_ready(self._config, status)

    def _load(self, server: TritonServer, *models: str) -> pb.StatusResponse:
        """Bring the engine, then load models; the engine's status.

        The models could start the engine themselves. Doing it first gives its error once and in its own words.
        """

        def work() -> None:
            client = EngineClient(ensure_engine(self._config, server.owner.pid, self._on_progress))
            try:  # an open client keeps the engine until the models are there
                for model in models:
                    server.load(model, LOAD_TIMEOUT_S)
            finally:
                client.close()

        self._await(work)
        self._remember_engine()
        status = probe(server.engine_address())
        if status is None:
            raise CedarError(ErrorCode.INTERNAL, "the engine does not answer although the models are loaded")
        return status

    # ---- watch ----

    def _watch(self, server: TritonServer) -> None:
        """Returns when the server has to be started anew."""
        canary = Canary(server.ask)
        try:
            self._watch_with(server, canary)
        finally:
            canary.stop()

    def _watch_with(self, server: TritonServer, canary: Canary) -> None:
        broken: set[str] = set()
        while True:
            self._pause()
            if canary.silent_for() > MAX_SILENCE_S:
                log.error("requests have not been answered for %.0f s; starting tritonserver again", canary.silent_for())
                return
            try:
                lost = server.lost_models()
                if not broken and not lost and not self._engine_lost():
                    continue
                log.error("lost the process of %s", ", ".join(sorted(lost)) or "the engine")
                broken |= lost or {READINESS_MODEL}
                if not self._unload(server, broken):
                    log.error("requests hang; starting tritonserver again")
                    return
            except CedarError as error:  # it does not answer, perhaps because it has just ended
                log.error("%s; starting it again", error)
                self._pause()
                return
            self._count_restart()
            try:
                self._load(server, *(broken - {READINESS_MODEL}), READINESS_MODEL, ENSEMBLE)
            except CedarError as error:  # something was lost again meanwhile
                log.error("%s; trying again", error)
            else:
                broken.clear()
                log.info("serving again")
            canary.forgive()

    def _unload(self, server: TritonServer, models: set[str]) -> bool:
        """Take readiness away and unload what was lost; False when requests hang in it."""
        for model in {READINESS_MODEL, *models}:
            server.unload(model)
        return all(server.wait_unloaded(model, HANG_TIMEOUT_S * INSTANCES[model]) for model in models)

    def _remember_engine(self) -> None:
        assert self._server is not None
        directory = self._server.engine_directory()
        self._engine = directory.engine() if directory is not None else None

    def _engine_lost(self) -> bool:
        """It ended, whether or not another has taken its place since, or it has not answered for a long time."""
        assert self._server is not None
        if self._server.engine_directory() is not None and (self._engine is None or not self._engine.alive()):
            return True
        return self._end_stuck_engine()

    def _end_stuck_engine(self) -> bool:
        """Whether the engine, which listens, has not answered for a long time; ours is killed for it."""
        assert self._server is not None
        now = time.monotonic()
        if now < self._next_probe:
            return False
        self._next_probe = now + PROBE_S
        directory = self._server.engine_directory()
        engine = directory.engine() if directory is not None and directory.socket.exists() else None
        if directory is not None and engine is None:
            return False
        self._misses = 0 if probe(self._server.engine_address()) is not None else self._misses + 1
        if self._misses < (1 if engine is None else MAX_MISSES):
            return False
        self._misses = 0
        log.error("the engine does not answer")
        if engine is not None:
            end_process(engine, signal.SIGKILL)
        return True

    # ---- end ----

    def _drain(self) -> None:
        """Refuse new requests, let the running ones end, then end the server."""
        server = self._server
        if server is None or server.exit_status is not None:
            return
        log.info("draining (up to %d ms)", self._config.drain_timeout_ms)
        self._stop.clear()

        def work() -> None:
            client = EngineClient(server.engine_address())
            try:
                left = client.drain(self._config.drain_timeout_ms, end_rest=True).remaining
            finally:
                client.close()
            if left:
                log.warning("%d requests were still running at the end of the drain and were ended", left)
            # the engine is done, but the last responses may still be on their way through the steps
            server.unload(ENSEMBLE)
            server.wait_unloaded(ENSEMBLE, LAST_RESPONSES_S)

        try:
            self._await(work)
        except Stopped:
            log.warning("asked to end again: not waiting any longer")
        except (Ended, CedarError) as end:
            log.warning("nothing to drain: %s", end)
        else:
            server.terminate()


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def repository_of(config: EngineConfig) -> Path:
    """The model repository to serve: the configured one, the checkout's, or (an installed wheel) one written to the cache."""
    if config.model_repository:
        path = Path(config.model_repository).resolve()
        if not (path / ENSEMBLE / "config.pbtxt").is_file():
            raise invalid("model_repository", f"{path} has no {ENSEMBLE}/config.pbtxt", "a directory with Cedar's five models")
        return path
    if SHIPPED_REPOSITORY.is_dir():
        return SHIPPED_REPOSITORY
    path = cache_directory() / "model_repository"
    pbtxt.write(path)
    return path


def compile_models(repository: Path) -> None:
    """Write every model's __pycache__ now. A stub that writes it (no variable keeps it from that) changes the model's
    directory: the server takes the model for modified and reloads it, under traffic, when the ensemble is loaded again."""
    for model in repository.glob("*/1/model.py"):
        with contextlib.suppress(OSError):  # read-only: then a stub cannot write it either
            py_compile.compile(str(model))


def check_model(config: EngineConfig) -> Path:
    """The checkpoint's directory; one that is not there is told at once, not after the server has started."""
    if config.engine_address and not config.model:
        raise invalid("model", "is empty although engine_address is set", "the checkpoint that the engine serves")
    directory = model_directory(config)
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise invalid("model", f"{directory} has no {name}", "a checkpoint directory in the released layout")
    return directory.resolve()
