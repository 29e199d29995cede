# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import grpc.aio
from numpy.typing import ArrayLike
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from cedar_client import wire
from cedar_client.client import CANCEL_TIMEOUT, READY_TIMEOUT
from cedar_client.errors import from_status, stalled
from cedar_client.types import Chat, Completion, Delta, Parameters


class AsyncStream(AsyncIterator[Delta]):
    """The deltas of one request, in order. ``key`` names the request on the server.

    Closing it (also by leaving its ``async with`` block, by cancelling the task that reads, or by dropping the last
    reference) cancels the request.
    """

    def __init__(self, call: Any, key: str, stall_timeout: float | None) -> None:
        self.key = key
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._stall_timeout = stall_timeout
        self._closed = False
        self._finished = False

    async def __anext__(self) -> Delta:
        if self._closed:
            raise StopAsyncIteration
        try:
            delta = await self._read()
        except BaseException:
            self.close()
            raise
        if delta is None:
            self.close()
            raise StopAsyncIteration
        self._finished = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Cancel the request unless it is finished. Idempotent; `aclose` is the same for ``contextlib.aclosing``."""
        self._closed = True
        self._call.cancel()

    async def aclose(self) -> None:
        self.close()

    async def complete(self) -> Completion:
        """Read to the end and put the deltas together."""
        async with self:
            return wire.completion(self.key, [delta async for delta in self])

    async def _read(self) -> Delta | None:
        """The next delta; None at the end."""
        try:
            async with asyncio.timeout(self._stall_timeout):
                async for response in self._call:
                    delta = wire.read_response(response, self.key)
                    if delta is not None:
                        return delta
        except TimeoutError:
            assert self._stall_timeout is not None
            raise stalled(self._stall_timeout, self.key) from None
        except grpc.aio.AioRpcError as error:
            raise from_status(error.code(), error.details(), self.key) from error
        except asyncio.CancelledError:
            # gRPC raises it for every cancelled call; it is ours to pass on only if this task is being cancelled
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if not self._closed:
                raise from_status(grpc.StatusCode.CANCELLED, await self._call.details(), self.key) from None
        if not self._finished and not self._closed:
            raise wire.incomplete(self.key)
        return None

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # the garbage collector runs on any thread, the call belongs to its loop's
        if not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)


class AsyncClient:
    """A connection to one server, for one event loop; any number of requests at a time share its channel."""

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        model: str = "cedar",
        stall_timeout: float | None = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str] | None = None,
        channel_args: Sequence[tuple[str, int | str]] = (),
    ) -> None:
        """As `cedar_client.Client`. The connection is made by the first request, in the loop that makes it."""
        self._url = wire.checked_url(url)
        self._model = model
        self._stall_timeout = stall_timeout
        self._credentials = credentials
        self._metadata = tuple((metadata or {}).items())
        self._options = wire.channel_options(channel_args)
        self._open_channel: grpc.aio.Channel | None = None

    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: ArrayLike | None = None,
        messages: Chat | Sequence[Mapping[str, Any]] | None = None,
        **parameters: Unpack[Parameters],
    ) -> AsyncStream:
        """Start a request and stream it. Exactly one of ``prompt`` (text as it is), ``input_ids``, ``messages`` (chat)."""
        key = parameters.get("request_key") or wire.new_key()
        request = wire.generate_request(self._model, key, prompt, input_ids, messages, parameters)
        return AsyncStream(self._infer(request), key, self._stall_timeout)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: int | str | None = None,
        response_format: Mapping[str, Any] | None = None,
        **parameters: Unpack[Parameters],
    ) -> AsyncStream:
        """Stream the answer to a conversation; what is None is the server's default."""
        payload = wire.chat_payload(messages, tools, thinking, reasoning_effort, response_format)
        return self.generate(messages=payload, **parameters)

    async def complete(
        self,
        prompt: str | None = None,
        *,
        input_ids: ArrayLike | None = None,
        messages: Chat | Sequence[Mapping[str, Any]] | None = None,
        **parameters: Unpack[Parameters],
    ) -> Completion:
        """The whole result of `generate`."""
        return await self.generate(prompt, input_ids=input_ids, messages=messages, **parameters).complete()

    async def cancel(self, key: str) -> bool:
        """Cancel any client's request by its key. False: there is no such request (any more)."""
        try:
            async for response in self._infer(wire.cancel_request(self._model, key), CANCEL_TIMEOUT):
                return wire.cancel_result(response, key)
        except grpc.aio.AioRpcError as error:
            raise from_status(error.code(), error.details(), key) from error
        raise wire.incomplete(key)

    async def ready(self) -> bool:
        """Does the server accept requests now? False also when there is no server."""
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel())
        try:
            for name in (self._model, wire.PROBED_MODEL):
                request = pb.ModelReadyRequest(name=name)
                if not (await stub.ModelReady(request, metadata=self._metadata, timeout=READY_TIMEOUT)).ready:
                    return False
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
            raise from_status(error.code(), error.details(), "") from error
        return True

    async def close(self) -> None:
        """End all streams and the connection."""
        if self._open_channel is not None:
            await self._open_channel.close(None)

    def _channel(self) -> grpc.aio.Channel:
        # a channel belongs to the loop that runs while it is made
        if self._open_channel is None:
            self._open_channel = (
                grpc.aio.secure_channel(self._url, self._credentials, self._options)
                if self._credentials
                else grpc.aio.insecure_channel(self._url, self._options)
            )
        return self._open_channel

    def _infer(self, request: pb.ModelInferRequest, timeout: float | None = None) -> Any:
        method = self._channel().unary_stream(
            wire.METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )
        return method(request, metadata=self._metadata, timeout=timeout)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
