# SPDX-License-Identifier: Apache-2.0
"""A server that speaks Triton's protocol and misbehaves on demand: what a real one does seldom or not on command."""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

Response = pb.ModelStreamInferResponse
Script = Callable[["Call"], Iterator[Response]]


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def data(piece: str = "", ids: tuple[int, ...] = (), finish: str = "", final: bool = False, **more: Any) -> Response:
    """A data response with every output, as Cedar sends them."""
    response = pb.ModelInferResponse(model_name="cedar")
    values: list[tuple[str, str, list[int], bytes]] = [
        ("text_output", "BYTES", [1], text(piece)),
        ("output_ids", "INT32", [len(ids)], np.asarray(ids, "<i4").tobytes()),
        ("finish_reason", "BYTES", [1], text(finish)),
        ("logprobs", "BYTES", [1], text(more.get("logprobs", ""))),
        ("cumulative_logprob", "FP32", [1], struct.pack("<f", more.get("cumulative_logprob", 0.0))),
        ("num_input_tokens", "UINT32", [1], struct.pack("<I", 7)),
        ("cached_tokens", "UINT32", [1], struct.pack("<I", 4)),
        ("replayed_tokens", "UINT32", [1], struct.pack("<I", 2)),
        ("num_output_tokens", "UINT32", [1], struct.pack("<I", len(ids))),
        ("seed_used", "UINT64", [1], struct.pack("<Q", 2**64 - 1)),
        ("perf_metrics", "BYTES", [1], text(more.get("perf_metrics", ""))),
    ]
    for name, datatype, shape, raw in values:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(raw)
    response.parameters["triton_final_response"].bool_param = final
    return Response(infer_response=response)


def empty_final() -> Response:
    response = pb.ModelInferResponse(model_name="cedar")
    response.parameters["triton_final_response"].bool_param = True
    return Response(infer_response=response)


class Call:
    """One ModelStreamInfer call as the server saw it."""

    def __init__(self, requests: list[pb.ModelInferRequest], context: grpc.ServicerContext) -> None:
        (request,) = requests  # one request a call, half-closed
        self.request = request
        self.context = context
        self.gone = threading.Event()
        context.add_callback(self.gone.set)

    def raw(self, name: str) -> bytes:
        names = [tensor.name for tensor in self.request.inputs]
        return bytes(self.request.raw_input_contents[names.index(name)])

    def text(self, name: str) -> str:
        return self.raw(name)[4:].decode()

    @property
    def parameters(self) -> dict[str, Any]:
        return json.loads(self.text("sampling_parameters"))  # type: ignore[no-any-return]


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each call by the script that its prompt names."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.calls: list[Call] = []
        self.arrived = threading.Condition()
        self.not_ready: set[str] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(64))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Response]:
        call = Call(list(request_iterator), context)
        with self.arrived:
            self.calls.append(call)
            self.arrived.notify_all()
        yield from self.scripts[self._script(call)](call)

    def _script(self, call: Call) -> str:
        names = [tensor.name for tensor in call.request.inputs]
        if "cancel" in names:
            return "cancel"
        if "text_input" in names:
            return call.text("text_input")
        asked = json.loads(call.text("messages"))["messages"][-1]["content"] if "messages" in names else ""
        return asked if asked in self.scripts else "echo"

    def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=request.name not in self.not_ready)

    def wait_for_call(self, number: int = 0) -> Call:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.calls) > number, 10)
        return self.calls[number]

    def stop(self, grace: float | None = None) -> None:
        self._server.stop(grace).wait(10)


class FrozenLink:
    """A TCP link to a server that can go dead without closing: no more bytes, no end of file."""

    def __init__(self, target: str) -> None:
        self._target = target.rsplit(":", 1)
        self._frozen = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target[0], int(self._target[1])))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                if not self._frozen.is_set():
                    sink.sendall(chunk)

    def freeze(self) -> None:
        self._frozen.set()

    def __enter__(self) -> FrozenLink:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@contextmanager
def web_server(answer: bytes) -> Iterator[str]:
    """Something that listens but does not speak gRPC: answers whatever it reads and hangs up. Yields its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join(10)


def two_words(call: Call) -> Iterator[Response]:
    yield data("Hello", (1,))
    yield data(" world", (2, 3), finish="stop", final=True)


def flag_apart(call: Call) -> Iterator[Response]:
    yield data("Hello", (1,))
    yield data(" world", (2, 3), finish="stop")
    yield empty_final()


def endless(call: Call) -> Iterator[Response]:
    while not call.gone.is_set():
        yield data("x", (1,))
        call.gone.wait(0.001)


def silent(call: Call) -> Iterator[Response]:
    yield data("Hello", (1,))
    call.gone.wait(20)


def mute(call: Call) -> Iterator[Response]:
    call.gone.wait(20)
    yield from ()


def broken(call: Call) -> Iterator[Response]:
    yield data("Hello", (1,))
    call.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def unfinished(call: Call) -> Iterator[Response]:
    yield data("Hello", (1,))


def foreign(call: Call) -> Iterator[Response]:
    response = data("Hello")
    del response.infer_response.outputs[1:], response.infer_response.raw_output_contents[1:]
    yield response


def cancelled_by_server(call: Call) -> Iterator[Response]:
    yield data("Hello", (1,))
    call.context.abort(grpc.StatusCode.CANCELLED, "by an administrator")


def cancelled_early(call: Call) -> Iterator[Response]:
    yield data(finish="cancelled", final=True)


def rich(call: Call) -> Iterator[Response]:
    entry = {"id": 5, "token": "é", "logprob": -0.5}
    logprobs: dict[str, Any] = {"tokens": [{**entry, "top": [entry]}], "prompt": [None, {**entry, "top": []}]}
    yield data("é", (5,), logprobs=json.dumps(logprobs), cumulative_logprob=-0.5)
    perf = {"arrival": 1, "first_scheduled": 2, "first_token": 3, "last_token": 4, "queue": 0.1, "prefill": 0.2, "decode": 0.3}
    last = json.dumps({"tokens": [{**entry, "top": []}]})
    yield data("", (5,), "length", True, logprobs=last, cumulative_logprob=-1.0, perf_metrics=json.dumps(perf))


def echo(call: Call) -> Iterator[Response]:
    names = [tensor.name for tensor in call.request.inputs]
    prompt = call.text("messages") if "messages" in names else str(list(memoryview(call.raw("input_ids")).cast("i")))
    yield data(prompt, (), "stop", True)


def cancel(call: Call) -> Iterator[Response]:
    assert call.raw("cancel") == b"\x01"
    yield data(finish="cancelled" if call.text("request_key") == "live" else "not_found", final=True)


def reasoned(call: Call) -> Iterator[Response]:
    yield data("because</th", (1,))
    yield data("ink>\n", (2,))
    yield data("Yes.", (3, 4), finish="stop", final=True)


def refuse(message: str) -> Any:
    return lambda call: iter([Response(error_message=message)])


SCRIPTS: tuple[Script, ...] = (
    *(two_words, flag_apart, endless, silent, mute, broken, unfinished, foreign),
    *(cancelled_by_server, rich, echo, cancel, reasoned),
)
