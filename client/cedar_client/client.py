# SPDX-License-Identifier: Apache-2.0
"""The client for threads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from numpy.typing import ArrayLike
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from cedar_client import wire
from cedar_client.errors import from_status, stalled
from cedar_client.types import Chat, Completion, Delta, Parameters
from cedar_client.watchdog import Watchdog

CANCEL_TIMEOUT = 10.0
READY_TIMEOUT = 5.0


class Stream(Iterator[Delta]):
    """The deltas of one request, in order. ``key`` names the request on the server.

    Closing it (also by leaving its ``with`` block, or by dropping the last reference) cancels the request and never blocks.
    """

    def __init__(self, call: Any, key: str, stall_timeout: float | None, watchdog: Watchdog) -> None:
        self.key = key
        self._call = call
        self._stall_timeout = stall_timeout
        self._watchdog = watchdog
        self._closed = False
        self._finished = False

    def __next__(self) -> Delta:
        if self._closed:
            raise StopIteration
        try:
            delta = self._read()
        except KeyboardInterrupt:
            raise  # the stream is as it was: the caller may go on reading, or close it
        except BaseException:
            self.close()
            raise
        if delta is None:
            self.close()
            raise StopIteration
        self._finished = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Cancel the request unless it is finished. Idempotent, callable from any thread."""
        self._closed = True
        self._call.cancel()

    def complete(self) -> Completion:
        """Read to the end and put the deltas together."""
        with self:
            return wire.completion(self.key, list(self))

    def _read(self) -> Delta | None:
        """The next delta; None at the end."""
        try:
            with self._watchdog.bound(self._stall_timeout, self._call.cancel) as wait:
                for response in self._call:
                    delta = wire.read_response(response, self.key)
                    if delta is not None:
                        return delta
        except grpc.RpcError as error:
            if self._closed:
                return None
            if wait.expired and self._stall_timeout is not None:
                raise stalled(self._stall_timeout, self.key) from None
            raise from_status(error.code(), error.details(), self.key) from error
        if not self._finished and not self._closed:
            raise wire.incomplete(self.key)
        return None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A connection to one server. Thread-safe; any number of requests at a time share its channel."""

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
        """``url``: host:port of the server's gRPC endpoint, without http://. ``stall_timeout``: longest silence in s before a
        stream is given up with `StallTimeout`; None: wait for ever. ``credentials``: TLS. ``metadata``: headers of every
        call. ``channel_args``: gRPC options that go over ours."""
        url = wire.checked_url(url)
        options = wire.channel_options(channel_args)
        self._channel = grpc.secure_channel(url, credentials, options) if credentials else grpc.insecure_channel(url, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._infer = self._channel.unary_stream(
            wire.METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )
        self._model = model
        self._stall_timeout = stall_timeout
        self._metadata = tuple((metadata or {}).items())
        self._watchdog = Watchdog()
        weakref.finalize(self, self._watchdog.close)

    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: ArrayLike | None = None,
        messages: Chat | Sequence[Mapping[str, Any]] | None = None,
        **parameters: Unpack[Parameters],
    ) -> Stream:
        """Start a request and stream it. Exactly one of ``prompt`` (text as it is), ``input_ids``, ``messages`` (chat)."""
        key = parameters.get("request_key") or wire.new_key()
        request = wire.generate_request(self._model, key, prompt, input_ids, messages, parameters)
        return Stream(self._infer(request, metadata=self._metadata), key, self._stall_timeout, self._watchdog)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: int | str | None = None,
        response_format: Mapping[str, Any] | None = None,
        **parameters: Unpack[Parameters],
    ) -> Stream:
        """Stream the answer to a conversation; what is None is the server's default."""
        payload = wire.chat_payload(messages, tools, thinking, reasoning_effort, response_format)
        return self.generate(messages=payload, **parameters)

    def complete(
        self,
        prompt: str | None = None,
        *,
        input_ids: ArrayLike | None = None,
        messages: Chat | Sequence[Mapping[str, Any]] | None = None,
        **parameters: Unpack[Parameters],
    ) -> Completion:
        """The whole result of `generate`."""
        return self.generate(prompt, input_ids=input_ids, messages=messages, **parameters).complete()

    def cancel(self, key: str) -> bool:
        """Cancel any client's request by its key. False: there is no such request (any more)."""
        call = self._infer(wire.cancel_request(self._model, key), metadata=self._metadata, timeout=CANCEL_TIMEOUT)
        try:
            for response in call:
                return wire.cancel_result(response, key)
        except grpc.RpcError as error:
            raise from_status(error.code(), error.details(), key) from error
        raise wire.incomplete(key)

    def ready(self) -> bool:
        """Does the server accept requests now? False also when there is no server."""
        try:
            return all(
                self._stub.ModelReady(pb.ModelReadyRequest(name=name), metadata=self._metadata, timeout=READY_TIMEOUT).ready
                for name in (self._model, wire.PROBED_MODEL)
            )
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
            raise from_status(error.code(), error.details(), "") from error

    def close(self) -> None:
        """End all streams and the connection."""
        self._channel.close()
        self._watchdog.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
