# SPDX-License-Identifier: Apache-2.0
"""The engine service: every call of `protos/cedar/v1/engine.proto` in front of one `EngineThread`.

It answers before the model is loaded, so that whoever waits can ask how far it is and why it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import cedar
from cedar.config.engine import EngineConfig
from cedar.engine.request import FinishReason, GenerationRequest
from cedar.engine.stats import EngineStats
from cedar.engine.updates import SequenceUpdate
from cedar.errors import CedarError, ErrorCode, invalid, unavailable
from cedar.service.convert import ERROR_MARK, request_from_proto, status_of
from cedar.service.hub import Record, TokenStream, UpdateHub
from cedar.service.life import Presence
from cedar.service.metrics import EngineMetrics
from cedar.v1 import engine_pb2 as pb
from cedar.v1 import engine_pb2_grpc

if TYPE_CHECKING:
    from cedar.engine.loop import EngineThread

log = logging.getLogger(__name__)
T = TypeVar("T")

SIGN_OF_LIFE_S = 1.0
"""On every call that a client waits on, something is sent at least this often."""
LAGGING_WRITE_S = 0.005
"""A write that took longer was held up by flow control: the receiver lags."""
COMMAND_TIMEOUT_S = 10.0
"""The engine takes commands between two steps; this bounds the wait for a step."""
STATS_TIMEOUT_S = 0.5
"""Status rather tells the last known numbers than waits for a long step."""
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),  # a prompt of ten million tokens
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    # a client that is stopped, or whose host is gone, loses its sequences as one that has closed its stream does
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


@dataclass(frozen=True)
class Serving:
    """A loaded engine and what `Status` tells of its model. operations: who carries them out, for people."""

    engine: EngineThread
    model: str
    max_model_len: int
    vocab_size: int
    operations: str


class EngineService(engine_pb2_grpc.EngineServicer):
    """States: loading -> serving -> draining, or loading -> failed. Event loop only."""

    def __init__(self, config: EngineConfig, metrics: EngineMetrics, presence: Presence) -> None:
        self.hub = UpdateHub(asyncio.get_running_loop())
        self.health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in its type stubs
        self.load_fraction = 0.0
        self.state = "loading"
        self._config = config
        self._metrics = metrics
        self._presence = presence
        self._serving: Serving | None = None
        self._error = ""
        self._stats: EngineStats | None = None
        self._streams: set[TokenStream] = set()
        self._ending = False

    # state

    async def accept(self, serving: Serving) -> None:
        """The model is loaded: requests are accepted from now on, unless the engine is to be drained already."""
        self._serving = serving
        self.load_fraction = 1.0
        if self.state == "loading":
            await self._enter("serving")

    async def fail(self, error: CedarError) -> None:
        """The model does not load: Status tells why."""
        self._error = str(error)
        await self._enter("failed")

    async def refuse(self) -> None:
        """New requests are refused from now on."""
        await self._enter("draining")

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, wait for those inside; how many are left after ``timeout_s`` seconds."""
        await self.refuse()
        if self._serving is None:
            return 0
        with contextlib.suppress(TimeoutError, CedarError):
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self._serving.engine.drain())
            return 0
        return self.hub.num_live

    def end_streams(self) -> None:
        """Every Generate call sends what it still has and ends."""
        self._ending = True
        for stream in self._streams:
            stream.wake.set()
            stream.urgent.set()

    async def _enter(self, state: str) -> None:
        if state != self.state:
            log.info("%s -> %s", self.state, state)
            self.state = state
            await self.report_health()

    async def report_health(self) -> None:
        """SERVING in the health service and 1 in ``cedar_engine_up`` exactly while requests are accepted."""
        up = self.state == "serving"
        self._metrics.set_up(up)
        status = health_pb2.HealthCheckResponse.SERVING if up else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", "cedar.v1.Engine"):
            await self.health.set(name, status)

    def _engine(self, *, for_new: bool = False) -> EngineThread:
        """The engine, or UNAVAILABLE. ``for_new``: a draining one does not count."""
        if self.state == "failed":
            raise unavailable(f"the engine could not load its model: {self._error}")
        if self._serving is None:
            raise unavailable(f"the engine is loading its model ({self.load_fraction:.0%})")
        if for_new and self.state == "draining":
            raise unavailable("the server is draining and takes no new requests")
        return self._serving.engine

    @contextlib.asynccontextmanager
    async def _call(self, context: Any) -> AsyncIterator[None]:
        """Around every call: somebody is there; a `CedarError` becomes the call's status."""
        with self._presence.here():
            try:
                yield
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception as error:
                if not isinstance(error, CedarError):
                    log.exception("a call of the engine service failed")
                    error = CedarError(ErrorCode.INTERNAL, f"engine service: {type(error).__name__}: {error}")
                await context.abort(status_of(error), error.message, ((ERROR_MARK, "1"),))

    async def pulse(self) -> None:
        """Every `SIGN_OF_LIFE_S`, have each stream that somebody waits on send an empty batch. For ever."""
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_S)
            for stream in self._streams:
                if stream.attached:
                    stream.silent = True
                    stream.wake.set()

    # encode

    # grpc.aio also takes streaming handlers that write, which the generated type stubs do not know
    async def Encode(self, request: pb.EncodeRequest, context: Any) -> None:  # type: ignore[override]
        async with self._call(context):
            engine = self._engine(for_new=True)
            parsed = request_from_proto(request)
            handle = await _admit(engine, parsed)
            log.info("request_key %s: admitted as %s with %d tokens", parsed.key, handle, len(parsed.input_ids))
            ready = False
            try:
                await context.write(pb.EncodeProgress(handle=handle, num_input_tokens=len(parsed.input_ids)))
                progress = await self._report_encoding(self.hub.record(handle, len(parsed.input_ids)), context)
                # the caller may hang up as soon as it has this message; if it does not get it, the lease ends the sequence
                ready = True
                await context.write(progress)
            finally:
                if not ready:
                    engine.abort(handle=handle)
                    self.hub.forget(handle)

    async def _report_encoding(self, record: Record, context: Any) -> pb.EncodeProgress:
        """Returns the last message when the sequence can be attached to; raises its error when it has ended before."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await record.changed.wait()
            record.changed.clear()
            progress = record.progress
            if record.last is not None:
                if not record.cancelled:
                    raise CedarError(ErrorCode(record.last.error_code), record.last.error_message)
                progress.ready = True  # whoever attaches is told that it was cancelled
            if progress.ready:
                return progress
            await context.write(progress)

    # generate

    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.GenerateCommand], context: Any
    ) -> None:
        async with self._call(context):
            await context.send_initial_metadata(())
            stream = TokenStream()
            self._streams.add(stream)
            reader = asyncio.create_task(self._read_commands(stream, request_iterator))
            reader.add_done_callback(lambda _: stream.wake.set())
            try:
                await self._write_tokens(stream, reader, context)
            finally:
                self._streams.discard(stream)
                reader.cancel()
                for handle in stream.attached:
                    self._engine().abort(handle=handle)

    async def _read_commands(self, stream: TokenStream, commands: AsyncIterator[pb.GenerateCommand]) -> None:
        # commands are not waited for: the engine takes them between two steps, all that have come meanwhile at once
        async for command in commands:
            if command.WhichOneof("command") == "attach":
                self._attach(command.attach.handle, stream)
            elif command.abort.request_key or self.hub.is_live(command.abort.handle):
                self._abort(command.abort)
            else:
                self.hub.answer_unknown(command.abort.handle, stream)

    def _attach(self, handle: str, stream: TokenStream) -> None:
        if not self.hub.attach(handle, stream):
            return

        def check(done: Future[bool]) -> None:
            # False: it has just ended, and its last update is on the way; an error: the engine took no command
            if isinstance(error := done.exception(), CedarError):
                self.hub.publish([SequenceUpdate(handle, 0, finish_reason=FinishReason.ERROR, error=error)])

        self._engine().attach(handle).add_done_callback(check)

    async def _write_tokens(self, stream: TokenStream, reader: asyncio.Task[None], context: Any) -> None:
        """Sends whatever has gathered, as soon as the last write is through; a lagging receiver is given some time."""
        loop = asyncio.get_running_loop()
        lagging = False
        while not reader.done():
            await stream.wake.wait()
            if lagging and not stream.urgent.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.coalesce_ms / 1000):
                        await stream.urgent.wait()
            messages = self.hub.take(stream)
            if messages or stream.silent:
                started = loop.time()
                await context.write(pb.TokenBatch(sequences=messages))
                lagging = loop.time() - started > LAGGING_WRITE_S
                stream.silent = False
            if self._ending:
                raise unavailable("the engine has ended")
        await reader

    # the short calls

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        async with self._call(context):
            if not (request.handle or request.request_key):
                raise invalid("handle, request_key", "neither is set", "one of the two")
            return pb.AbortResponse(found=await _settled(self._abort(request)))

    def _abort(self, request: pb.AbortRequest) -> Future[bool]:
        return self._engine().abort(handle=request.handle or None, key=request.request_key or None)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        async with self._call(context):
            response = pb.StatusResponse(
                state=self.state,
                version=cedar.__version__,
                pid=os.getpid(),
                load_fraction=self.load_fraction,
                error=self._error,
                model=self._config.model,
            )
            if request.include_metrics:
                response.metrics = self._metrics.text()
            stats = await self._fresh_stats()
            if (serving := self._serving) is not None:
                response.model, response.vocab_size = serving.model, serving.vocab_size
                response.max_model_len, response.operations = serving.max_model_len, serving.operations
            if stats is not None:
                usage = stats.usage
                response.num_running, response.num_waiting = stats.num_running, stats.num_waiting
                response.kv_bytes_used, response.kv_bytes_total = usage.bytes_used, usage.bytes_total
                response.pages_used, response.pages_total = usage.pages_used, usage.pages_total
                response.sequences_held, response.kv_bytes_cached = usage.sequences, usage.bytes_cached
            return response

    async def _fresh_stats(self) -> EngineStats | None:
        """The engine's numbers; the last known ones while a long step runs or after its end."""
        if self._serving is not None:
            with contextlib.suppress(TimeoutError, CedarError):
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    self._stats = await asyncio.wrap_future(self._serving.engine.stats())
        return self._stats

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        async with self._call(context):
            remaining = await self.drain(request.timeout_ms / 1000)
            if remaining and request.end_rest:
                over = unavailable(f"the server is stopping, and {request.timeout_ms} ms of draining are over")
                await _settled(self._engine().end_all(over))
            return pb.DrainResponse(drained=remaining == 0, remaining=remaining)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Any) -> pb.ClearCacheResponse:
        async with self._call(context):
            dropped = await _settled(self._engine().call(lambda engine: engine.clear_cache()))
            return pb.ClearCacheResponse(tokens_dropped=dropped)


async def _settled(future: Future[T]) -> T:
    """The result of a command, in bounded time."""
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        message = f"the engine has been in one step for {COMMAND_TIMEOUT_S:.0f} s"
        raise CedarError(ErrorCode.UNAVAILABLE, message) from None


async def _admit(engine: EngineThread, request: GenerationRequest) -> str:
    """The handle of an admitted request. A caller that leaves meanwhile takes the request along."""
    future = engine.add(request)
    try:
        return await _settled(future)
    except BaseException:
        future.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else engine.abort(handle=done.result())
        )
        raise


async def start_server(service: EngineService, address: str) -> tuple[grpc.aio.Server, str]:
    """A server that listens, and the address it is bound to (host:0 takes a free port)."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(service.health, server)
    port = server.add_insecure_port(address)
    await service.report_health()
    await server.start()
    return server, address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
