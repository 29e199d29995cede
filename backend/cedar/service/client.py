# SPDX-License-Identifier: Apache-2.0
"""`EngineClient`: the engine service for threads (Triton's Python models, commands), free of torch.

One background thread per client runs an event loop and calls every callback. A callback that blocks holds up this
client's other callbacks and, through flow control, makes the engine merge tokens: that is the back-pressure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import grpc

from cedar.engine.request import GenerationRequest
from cedar.errors import CedarError, ErrorCode, unavailable
from cedar.service.convert import is_ours, request_to_proto, rpc_error
from cedar.v1 import engine_pb2 as pb
from cedar.v1 import engine_pb2_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 1.0
"""How long a new call or attach waits for the connection before it ends with UNAVAILABLE."""
STALL_S = 15.0
"""The engine gives a sign of life every second on every call; after this much silence it counts as lost."""
_WATCH_S = 1.0
_RECONNECT_PAUSE_S = 0.1
_DEADLINE_MARGIN_S = 5.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    # a small window, so that the engine feels a slow callback after a few messages and not after 64 KiB of them (a message
    # beyond it costs 60 us: measured with 64 sequences in a batch)
    ("grpc.http2.lookahead_bytes", 256),
    ("grpc.http2.bdp_probe", 0),
)

OnProgress = Callable[[pb.EncodeProgress], None]
EncodeResult = pb.EncodeProgress | CedarError
OnDone = Callable[[EncodeResult], None]
OnTokens = Callable[[pb.SequenceTokens], None]
T = TypeVar("T")


class _Watch:
    """A call on which the engine must be heard. Silence is summed from ticks of the loop, so that a callback which holds
    the loop up is not taken for a silent engine."""

    def __init__(self, call: Any, expects: Callable[[], bool] = lambda: True) -> None:
        self.call = call
        self.expects = expects
        self.silent_s = 0.0
        self.stalled = False

    def tick(self) -> None:
        self.silent_s = self.silent_s + _WATCH_S if self.expects() else 0.0
        if self.silent_s > STALL_S:
            self.stalled = True
            self.call.cancel()


class EncodeCall:
    """A running `EngineClient.encode`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.task: asyncio.Task[EncodeResult] | None = None
        self.handle = ""
        self.cancelled = False

    def cancel(self) -> None:
        """Abort the request unless it is done; ``on_done`` then gets UNAVAILABLE. Any thread; never waits."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self.cancelled = True
        # before its admission there is no handle to abort by, and the engine keeps a request that has become ready when
        # its call is cancelled: so the first message is waited for
        if self.task is not None and self.handle:
            self.task.cancel()


class EngineClient:
    """Calls to one engine address. Survives the engine: what was in flight ends with an error, later calls reconnect.

    Holds one Generate stream open for its whole life; by it the engine knows that somebody is there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._loop = asyncio.new_event_loop()
        self._attached: dict[str, OnTokens] = {}
        self._commands: deque[pb.GenerateCommand] = deque()
        self._encodes: set[asyncio.Task[EncodeResult]] = set()
        self._watches: set[_Watch] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cedar-engine-client", daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(CALL_TIMEOUT_S)

    # ---- any thread ----

    @property
    def connected(self) -> bool:
        """Whether the Generate stream to an engine process is up now."""
        return self._connected.is_set()

    def encode(self, request: GenerationRequest, on_progress: OnProgress, on_done: OnDone) -> EncodeCall:
        """Have a prompt encoded. ``on_progress`` gets the admission (with the handle) and later progress;
        ``on_done`` gets, exactly once, the message with ``ready`` set or the error that ended the request. Never waits."""
        call = EncodeCall(self._loop)

        def finish(task: asyncio.Task[EncodeResult]) -> None:
            self._encodes.discard(task)
            if task.cancelled():
                why = "engine client is closed" if self._closed else f"request {request.key} was cancelled by its caller"
                _guarded(on_done, unavailable(why))
            else:
                _guarded(on_done, task.result())

        def start() -> None:
            call.task = self._loop.create_task(self._encode(call, request, on_progress))
            self._encodes.add(call.task)
            call.task.add_done_callback(finish)

        self._post(start, lambda: on_done(unavailable("engine client is closed")))
        return call

    def attach(self, handle: str, on_tokens: OnTokens) -> None:
        """Start decoding an encoded request. ``on_tokens`` gets its tokens, and exactly one message (the last) has a
        ``finish_reason``, also when the handle is unknown or the engine dies. Never waits."""
        self._post(
            lambda: self._attach(handle, on_tokens),
            lambda: on_tokens(_ended(handle, unavailable("engine client is closed"))),
        )

    def abort(self, *, handle: str = "", key: str = "", timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """End a request by its handle or its caller's key, in whatever state; whether it was live.

        Inside a callback it cannot wait: it sends the command and says whether this client had attached the handle.
        """
        message = pb.AbortRequest(handle=handle, request_key=key)
        if threading.current_thread() is self._thread:
            self._send(pb.GenerateCommand(abort=message))
            return handle in self._attached
        return self._wait(self._stub.Abort, message, timeout_s).found

    def status(self, include_metrics: bool = False, timeout_s: float = CALL_TIMEOUT_S) -> pb.StatusResponse:
        """The engine's state; with ``metrics`` in Prometheus text format when asked for."""
        return self._wait(self._stub.Status, pb.StatusRequest(include_metrics=include_metrics), timeout_s)

    def drain(self, timeout_ms: int, *, end_rest: bool = False) -> pb.DrainResponse:
        """Refuse new requests and wait until the running ones have ended or ``timeout_ms`` has passed.

        ``end_rest``: those that are left then end with UNAVAILABLE; the answer counts them all the same.
        """
        timeout_s = timeout_ms / 1000 + _DEADLINE_MARGIN_S
        return self._wait(self._stub.Drain, pb.DrainRequest(timeout_ms=timeout_ms, end_rest=end_rest), timeout_s)

    def clear_cache(self, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """Empty the prefix cache; how many tokens it held."""
        return self._wait(self._stub.ClearCache, pb.ClearCacheRequest(), timeout_s).tokens_dropped

    def close(self) -> None:
        """End the stream (the engine aborts what it attached); every open call gets its terminal callback first."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._main.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(CALL_TIMEOUT_S)

    def _post(self, action: Callable[[], None], otherwise: Callable[[], None]) -> None:
        if self._closed:
            otherwise()
        else:
            self._loop.call_soon_threadsafe(action)

    def _wait(self, method: Callable[..., Awaitable[T]], request: object, timeout_s: float) -> T:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of EngineClient must not wait for the engine")
        if self._closed:
            raise unavailable("engine client is closed")

        async def call() -> T:
            try:
                return await method(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise rpc_error(error) from None

        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            return future.result(timeout_s + 1.0)
        except CancelledError:
            raise unavailable("engine client is closed") from None
        except TimeoutError:
            future.cancel()
            raise CedarError(ErrorCode.DEADLINE_EXCEEDED, f"engine did not answer within {timeout_s} s") from None

    # ---- the client's own thread ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        # what grpc still has to finish: a task that is destroyed while it waits complains on stderr
        rest = asyncio.all_tasks(self._loop)
        if rest:
            self._loop.run_until_complete(asyncio.wait(rest, timeout=CALL_TIMEOUT_S))
        self._loop.close()

    async def _serve(self) -> None:
        self._connected, self._disconnected, self._wake = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._disconnected.set()
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            self._stub = engine_pb2_grpc.EngineStub(channel)
            self._ready.set()
            watching = self._loop.create_task(self._watch())
            try:
                while True:
                    await self._run_stream()
                    await asyncio.sleep(_RECONNECT_PAUSE_S)
            finally:
                watching.cancel()
                for task in list(self._encodes):
                    task.cancel()
                await asyncio.gather(*self._encodes, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for watch in list(self._watches):
                watch.tick()

    async def _run_stream(self) -> None:
        """One Generate stream, from connecting to its end; then everything attached ends with an error."""
        call = self._stub.Generate(wait_for_ready=True)  # type: ignore[call-arg]  # written to by hand
        watch = _Watch(call, expects=lambda: bool(self._attached))
        writer: asyncio.Task[None] | None = None
        error = unavailable(f"engine at {self.address} ended the stream")
        try:
            await call.initial_metadata()
            log.info("connected to the engine at %s", self.address)
            self._connected.set()
            self._disconnected.clear()
            self._watches.add(watch)
            writer = self._loop.create_task(self._write(call))
            while isinstance(batch := await call.read(), pb.TokenBatch):
                watch.silent_s = 0.0
                for tokens in batch.sequences:
                    self._deliver(tokens)
        except grpc.aio.AioRpcError as failure:
            error = rpc_error(failure)
        except asyncio.CancelledError:
            error = self._silent() if watch.stalled else unavailable("engine client is closed")
            if not watch.stalled:
                raise
        finally:
            self._watches.discard(watch)
            self._connected.clear()
            self._disconnected.set()
            call.cancel()
            if writer is not None:
                writer.cancel()
                log.log(
                    logging.INFO if self._closed else logging.WARNING, "%s (%d sequences attached)", error, len(self._attached)
                )
            self._fail_attached(error)

    def _silent(self) -> CedarError:
        return unavailable(f"engine at {self.address} has been silent for {STALL_S:.0f} s")

    async def _write(self, call: Any) -> None:
        # a write fails when the stream has ended, which its reader deals with
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._commands:
                    await call.write(self._commands.popleft())
                self._wake.clear()
                await self._wake.wait()

    def _send(self, command: pb.GenerateCommand) -> None:
        self._commands.append(command)
        self._wake.set()

    def _attach(self, handle: str, on_tokens: OnTokens) -> None:
        if handle in self._attached:
            error = CedarError(ErrorCode.INTERNAL, f"handle {handle} is already attached")
            _guarded(on_tokens, _ended(handle, error))
            return
        self._attached[handle] = on_tokens
        self._send(pb.GenerateCommand(attach=pb.Attach(handle=handle)))
        if not self._connected.is_set():
            self._loop.call_later(CONNECT_TIMEOUT_S, self._fail_unconnected)

    def _deliver(self, tokens: pb.SequenceTokens) -> None:
        if tokens.finish_reason:
            on_tokens = self._attached.pop(tokens.handle, None)
        else:
            on_tokens = self._attached.get(tokens.handle)
        if on_tokens is not None and not _guarded(on_tokens, tokens) and not tokens.finish_reason:
            self._send(pb.GenerateCommand(abort=pb.AbortRequest(handle=tokens.handle)))

    def _fail_unconnected(self) -> None:
        if not self._connected.is_set():
            self._fail_attached(unavailable(f"engine at {self.address} cannot be reached"))

    def _fail_attached(self, error: CedarError) -> None:
        self._commands.clear()
        attached, self._attached = self._attached, {}
        for handle, on_tokens in attached.items():
            _guarded(on_tokens, _ended(handle, error))

    async def _encode(self, call: EncodeCall, request: GenerationRequest, on_progress: OnProgress) -> EncodeResult:
        try:
            return await self._encoded(call, request, on_progress)
        except CedarError as error:
            return error
        except Exception as error:
            log.exception("request_key %s: encoding failed", request.key)
            return CedarError(ErrorCode.INTERNAL, f"request_key {request.key}: {type(error).__name__}: {error}")

    async def _encoded(self, call: EncodeCall, request: GenerationRequest, on_progress: OnProgress) -> pb.EncodeProgress:
        message = request_to_proto(request)
        try:
            await asyncio.wait_for(self._connected.wait(), CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise unavailable(f"engine at {self.address} cannot be reached") from None
        # the engine itself ends the request at its deadline; the call's own only bounds an engine that does not
        timeout = request.timeout_ms / 1000 + _DEADLINE_MARGIN_S if request.timeout_ms else None
        rpc = self._stub.Encode(message, timeout=timeout)
        self._watches.add(watch := _Watch(rpc))
        try:
            while isinstance(progress := await rpc.read(), pb.EncodeProgress):
                watch.silent_s = 0.0
                call.handle = progress.handle
                if call.cancelled:
                    raise asyncio.CancelledError
                if progress.ready:
                    return progress
                _guarded(on_progress, progress)
            raise unavailable(f"engine ended the encoding of request {request.key} before it was ready")
        except grpc.aio.AioRpcError as failure:
            raise await self._rpc_error(failure) from None
        except asyncio.CancelledError:
            if call.handle:
                self._send(pb.GenerateCommand(abort=pb.AbortRequest(handle=call.handle)))
            if watch.stalled:
                raise self._silent() from None
            raise
        finally:
            self._watches.discard(watch)
            rpc.cancel()  # of no effect once the engine has ended it

    async def _rpc_error(self, failure: grpc.aio.AioRpcError) -> CedarError:
        """What it means. When the connection is lost, `connected` says so before the caller can ask."""
        error = rpc_error(failure)
        if error.code is ErrorCode.UNAVAILABLE and not is_ours(failure):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._disconnected.wait(), CONNECT_TIMEOUT_S / 2)
        return error


def _ended(handle: str, error: CedarError) -> pb.SequenceTokens:
    """The terminal message of a sequence that the engine itself could not end."""
    return pb.SequenceTokens(handle=handle, finish_reason="error", error_code=error.code.value, error_message=error.message)


def _guarded(callback: Callable[[T], None], value: T) -> bool:
    """Call it; whether it returned. A callback that raises must not end the thread that serves all the others."""
    try:
        callback(value)
    except Exception:
        log.exception("callback of the engine client failed")
        return False
    return True
