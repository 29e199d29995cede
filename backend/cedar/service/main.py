# SPDX-License-Identifier: Apache-2.0
"""The engine process: ``python -m cedar.service.main``.

Started by `cedar.service.process` it belongs to an owner and lives in that owner's directory; started by hand with
``--address`` it serves until SIGTERM (adapters reach it by CEDAR_ENGINE_ADDRESS).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.handlers
import os
import signal
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import prometheus_client

from cedar.config.engine import EngineConfig
from cedar.errors import CedarError, ErrorCode, invalid
from cedar.model.embedded import embedded_model_dir
from cedar.service.directory import EngineDirectory
from cedar.service.life import Presence, wait_until_ended
from cedar.service.metrics import EngineMetrics
from cedar.service.owner import Owner
from cedar.service.server import EngineService, Serving, start_server

log = logging.getLogger("cedar.service")

FAILED_LINGER_S = 10.0
"""How long an engine that could not load its model stays to tell why."""
ENGINE_STOP_S = 2.0
SERVER_STOP_S = 0.5
"""Both together stay well below the 5 s in which an engine must follow its owner."""
_ENGINE_POLL_S = 0.25
_LOG_BYTES = 8 << 20


@dataclass(frozen=True)
class Place:
    """Where this process serves and to whom it belongs; no directory and no owner when it was started by hand."""

    address: str
    directory: EngineDirectory | None = None
    owner: Owner | None = None


class EngineProcess:
    """Loads, serves, and ends for one of five reasons: signal, owner gone, everybody gone, engine failed, load failed."""

    def __init__(self, config: EngineConfig, place: Place) -> None:
        self._config = config
        self._place = place
        self._metrics = EngineMetrics()
        self._presence = Presence()
        self._service = EngineService(config, self._metrics, self._presence)
        self._serving: Serving | None = None
        self._asked_to_end = asyncio.Event()

    async def run(self) -> int:
        """Until the end; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end.set)
        server, address = await start_server(self._service, self._place.address)
        log.info("engine %d listens on %s", os.getpid(), address)
        pulse = asyncio.create_task(self._service.pulse())
        reasons = {
            asyncio.create_task(self._asked_to_end.wait()): "asked to end",
            asyncio.create_task(self._load_and_watch()): "engine failed",
        }
        if self._place.owner is not None:
            reasons[asyncio.create_task(wait_until_ended(self._place.owner))] = "owner has ended"
            reasons[asyncio.create_task(self._presence.wait_until_left())] = "nobody is here any more"
        done, others = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        reason = " and ".join(reasons[task] for task in done)
        log.info("ending: %s", reason)
        for error in filter(None, (task.exception() for task in done)):
            log.error("a watch failed", exc_info=error)
        if self._asked_to_end.is_set():
            await self._drain()
        await self._service.refuse()
        if self._serving is not None and not await asyncio.to_thread(self._serving.engine.stop, ENGINE_STOP_S):
            log.warning("the engine is still in a step; leaving it")
        pulse.cancel()
        self._service.end_streams()  # after the engine, whose last updates go out with them
        await server.stop(SERVER_STOP_S)
        self._clean_up()
        return 1 if "engine failed" in reason else 0

    async def _load_and_watch(self) -> None:
        """Returns when the model did not load or the engine has failed."""
        try:
            self._serving = await self._load()
        except CedarError as error:
            log.error("the model does not load: %s", error)
            await self._service.fail(error)
            await asyncio.sleep(FAILED_LINGER_S)
            return
        await self._service.accept(self._serving)
        engine, longest = self._serving.engine, self._config.step_timeout_ms / 1000
        while engine.state not in ("failed", "stopped"):
            if engine.seconds_in_step() > longest:
                log.error("the engine hangs: its step has taken more than step_timeout_ms (%d)", self._config.step_timeout_ms)
                return
            await asyncio.sleep(_ENGINE_POLL_S)
        log.error("the engine has failed: %s", engine.error)

    async def _load(self) -> Serving:
        """`load_engine` on a thread that nobody has to join: a process that is to end does not wait for a model."""
        loaded: Future[Serving] = Future()

        def load() -> None:
            try:
                loaded.set_result(load_engine(self._config, self._service, self._metrics))
            except CedarError as error:
                loaded.set_exception(error)
            except BaseException as error:
                log.exception("loading failed")
                loaded.set_exception(CedarError(ErrorCode.INTERNAL, f"loading failed: {type(error).__name__}: {error}"))

        threading.Thread(target=load, name="cedar-load", daemon=True).start()
        return await asyncio.wrap_future(loaded)

    async def _drain(self) -> None:
        """Wait for what runs, but not for a second signal and not longer than the owner lives."""
        self._asked_to_end.clear()
        waits: list[asyncio.Task[object]] = [asyncio.create_task(self._asked_to_end.wait())]
        waits.append(asyncio.create_task(self._service.drain(self._config.drain_timeout_ms / 1000)))
        if self._place.owner is not None:
            waits.append(asyncio.create_task(wait_until_ended(self._place.owner)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _clean_up(self) -> None:
        if self._place.directory is None or self._place.owner is None:
            return
        if self._place.owner.alive():
            self._place.directory.clear()
        else:
            self._place.directory.remove()


def load_engine(config: EngineConfig, service: EngineService, metrics: EngineMetrics) -> Serving:
    """Load the model and start its thread. Raises the `CedarError` that says what is wrong with the checkpoint."""
    # here and not above: torch takes seconds to import, and the service answers meanwhile
    from cedar.engine.admission import ModelFacts
    from cedar.engine.engine import Engine
    from cedar.engine.loop import EngineThread
    from cedar.engine.runner import ModelRunner
    from cedar.text.tokenizer import load_tokenizer

    if config.engine_metrics_port:
        try:
            prometheus_client.start_http_server(config.engine_metrics_port, config.host, metrics.registry)
        except OSError as error:
            raise invalid(
                "engine_metrics_port", f"cannot listen on {config.engine_metrics_port} ({error})", "a free port"
            ) from error
    if not config.model:
        config = replace(config, model=str(embedded_model_dir()))

    def progress(done: int, total: int, _what: str) -> None:
        service.load_fraction = done / total if total else 0.0

    runner = ModelRunner.load(config, progress)
    tokenizer = load_tokenizer(config.model)
    facts = ModelFacts.of(runner.config, len(tokenizer))
    engine = EngineThread(Engine(runner, config, facts, tokenizer=tokenizer, recorder=metrics), service.hub.publish)
    engine.start()
    log.info(
        "%s is loaded: %d tokens of context, KV budget %d bytes", config.model, runner.max_model_len, runner.usage().bytes_total
    )
    return Serving(engine, config.model, runner.max_model_len, facts.num_valid_ids, runner.operations)


def _start_logging(config: EngineConfig, directory: EngineDirectory | None) -> None:
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if directory is not None:
        handler = logging.handlers.RotatingFileHandler(directory.log, maxBytes=_LOG_BYTES, backupCount=1)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s", handlers=[handler]
    )


def _parse(arguments: list[str] | None) -> tuple[Place, int | None]:
    parser = argparse.ArgumentParser(prog="cedar.service.main", description="The Cedar engine process.")
    parser.add_argument("--address", help="serve here until SIGTERM: unix:PATH or HOST:PORT")
    parser.add_argument("--owner", help="<pid>-<start time> of the process the engine belongs to")
    parser.add_argument("--directory", type=Path, help="the owner's engine directory")
    parser.add_argument("--lock-fd", type=int, help="inherited descriptor that holds the directory's lock")
    options = parser.parse_args(arguments)
    if options.address:
        return Place(options.address), None
    if not (options.owner and options.directory and options.lock_fd is not None):
        parser.error("either --address, or --owner, --directory and --lock-fd")
    directory = EngineDirectory(options.directory)
    return Place(directory.address, directory, Owner.parse(options.owner)), options.lock_fd


async def _run(config: EngineConfig, place: Place) -> int:
    return await EngineProcess(config, place).run()


def main(arguments: list[str] | None = None) -> int:
    """Run the engine process; the exit status."""
    place, lock = _parse(arguments)
    if lock is not None:
        os.set_inheritable(lock, False)  # no child of the engine may keep it locked
    if place.directory is not None:
        place.directory.announce()
    config = EngineConfig.load()
    _start_logging(config, place.directory)
    try:
        status = asyncio.run(_run(config, place))
    except Exception:
        log.exception("the engine process failed")
        status = 1
    logging.shutdown()
    # not sys.exit: a thread that is still in a step, or still loading, must not hold the process back
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
