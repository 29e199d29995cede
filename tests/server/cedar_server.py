# SPDX-License-Identifier: Apache-2.0
"""A real `cedar serve` in a subprocess, and a client of plain tritonclient, for tests. Every wait has a bound."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient

from bad_inputs import MAX_PROMPT_BYTES
from cedar.service.directory import EngineDirectory
from cedar.service.owner import Owner
from cedar.service.process import probe
from cedar.triton.tensors import INPUTS
from cedar.v1 import engine_pb2 as pb

START_S = 120.0
STOP_S = 40.0
ANSWER_S = 60.0
_KIND = {tensor.name: tensor.dtype for tensor in INPUTS}
_NUMPY = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}


def eventually(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Poll until ``condition`` holds; the seconds it took. Fails the test when it does not in time."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - start


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; held until all are chosen, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Server:
    """`cedar serve` on free loopback ports."""

    def __init__(self, log: Path, *flags: str, wait: bool = True) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.log = log
        ports = ("--http-port", self.http_port, "--grpc-port", self.grpc_port, "--metrics-port", self.metrics_port)
        command = [sys.executable, "-m", "cedar", "serve", *map(str, ports), "--cpu-threads", "1"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CEDAR_")}
        environment |= {"OMP_NUM_THREADS": "1", "CEDAR_MAX_PROMPT_BYTES": str(MAX_PROMPT_BYTES)}
        with log.open("wb") as output:
            self.process = subprocess.Popen([*command, *flags], stdout=output, stderr=output, env=environment)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until the line that scripts wait for."""
        eventually(lambda: self.process.poll() is not None or b"Cedar is ready\n" in self.log.read_bytes(), START_S, self.tail())
        assert self.process.poll() is None, self.tail()

    def tail(self) -> str:
        """The end of the server's and the engine's log."""
        engine = ""
        if self.process.poll() is None and self.triton() is not None:
            engine = f"\n--- engine\n{self.engine_directory().log_tail()}"
        return f"--- serve\n{self.log.read_text(errors='replace')[-4000:]}{engine}"

    # ---- processes ----

    def triton(self) -> psutil.Process | None:
        """The tritonserver, if there is one."""
        children = [c for c in psutil.Process(self.process.pid).children() if c.name() == "tritonserver"]
        return children[0] if children else None

    def stubs(self, model: str = "") -> list[psutil.Process]:
        """Python model processes, of one model or of all."""
        triton = self.triton()
        assert triton is not None
        found = [c for c in triton.children() if c.status() != psutil.STATUS_ZOMBIE and len(c.cmdline()) > 1]
        return [c for c in found if f"/{model}/1/model.py" in c.cmdline()[1] or not model]

    def engine_directory(self) -> EngineDirectory:
        triton = self.triton()
        assert triton is not None
        return EngineDirectory.create(Owner.of(triton.pid))

    def engine(self) -> psutil.Process:
        """The engine's process."""
        owner = self.engine_directory().engine()
        assert owner is not None
        return psutil.Process(owner.pid)

    def everything(self) -> list[psutil.Process]:
        """Every process of this server but `cedar serve` itself."""
        triton = self.triton()
        assert triton is not None
        return [triton, *self.stubs(), self.engine()]

    def status(self) -> pb.StatusResponse:
        """The engine's own account."""
        status = probe(self.engine_directory().address, timeout_s=10)
        assert status is not None, self.tail()
        return status

    @property
    def model(self) -> Path:
        """The checkpoint that is served."""
        return Path(self.status().model)

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """End it by signal; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                tail = self.tail()
                self.process.kill()
                raise AssertionError(f"cedar serve did not end within {STOP_S} s\n{tail}") from None
        return self.process.wait(1)

    # ---- HTTP ----

    def post(self, path: str, body: Any, timeout_s: float = ANSWER_S) -> tuple[int, str]:
        """Status and body of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout_s)
        try:
            connection.request("POST", path, body=json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ready(self, model: str = "decoder_generate") -> bool:
        """The probe that readiness checks use."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=5)
        try:
            connection.request("GET", f"/v2/models/{model}/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def metric(self, name: str, port: int = 0) -> float:
        """The sum over all labels of one series at Triton's endpoint."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.metrics_port, timeout=5)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client with one gRPC stream."""
        client = Client(self.grpc_port)
        try:
            yield client
        except AssertionError:
            print(self.tail())
            raise
        finally:
            client.close()


@dataclass
class Answer:
    """All responses to one request. ``error``: the text of the error that ended it."""

    responses: list[grpcclient.InferResult] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    final: bool = False

    @property
    def done(self) -> bool:
        return self.final or bool(self.error)

    def last(self, name: str) -> Any:
        """A scalar output of the last response."""
        return _plain(self.responses[-1].as_numpy(name)[0])

    def all(self, name: str) -> list[Any]:
        """A scalar output of every response."""
        return [_plain(response.as_numpy(name)[0]) for response in self.responses]

    @property
    def text(self) -> str:
        return "".join(self.all("text_output"))

    @property
    def ids(self) -> list[int]:
        return [int(token) for response in self.responses for token in response.as_numpy("output_ids")]


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value.item()


def tensor(name: str, value: Any) -> grpcclient.InferInput:
    """An input from a Python value (a list: a vector), or from an array as it is."""
    kind = _KIND.get(name, "INT32")
    if isinstance(value, np.ndarray):
        array = value
        kind = {"i": "INT32", "f": "FP32", "b": "BOOL", "O": "BYTES", "u": "UINT64"}[array.dtype.kind]
    else:
        items = value if isinstance(value, list) else [value]
        if kind == "BYTES":
            array = np.array([item.encode() if isinstance(item, str) else item for item in items], dtype=object)
        else:
            array = np.array(items, dtype=_NUMPY[kind])
    found = grpcclient.InferInput(name, list(array.shape), kind)
    found.set_data_from_numpy(array)
    return found


class Client:
    """Plain tritonclient: one stream, many requests."""

    def __init__(self, port: int) -> None:
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}")
        self._events: queue.Queue[tuple[float, Any, Any]] = queue.Queue()
        self._answers: dict[str, Answer] = {}
        self._count = 0
        self._client.start_stream(lambda result, error: self._events.put((time.monotonic(), result, error)))

    def submit(self, *, parameters: dict[str, Any] | None = None, **inputs: Any) -> Answer:
        """Send a request; its `Answer` fills while any `wait` of this client runs."""
        self._count += 1
        answer = self._answers[str(self._count)] = Answer()
        tensors = [tensor(name, value) for name, value in inputs.items()]
        self._client.async_stream_infer("cedar", tensors, request_id=str(self._count), parameters=parameters)
        return answer

    def wait(self, condition: Callable[[], Any], timeout_s: float = ANSWER_S) -> None:
        """Take in responses until ``condition`` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {timeout_s} s; answers: {self._answers}"
            try:
                self._take(*self._events.get(timeout=min(left, 0.05)))
            except queue.Empty:
                continue

    def _take(self, when: float, result: Any, error: Any) -> None:
        if error is not None:
            # an error of a stream says nowhere which request it is about: alone it is clear, else all that run end
            running = [answer for answer in self._answers.values() if not answer.done]
            ids = [i for i, answer in self._answers.items() if not answer.done]
            if len(ids) == 1 or "Stream" in str(error) or "StatusCode" in str(error):
                for answer in running:
                    answer.error = str(error)
            else:
                running[0].error = str(error)
            return
        message = result.get_response()
        answer = self._answers[message.id]
        answer.responses.append(result)
        answer.times.append(when)
        answer.final = message.parameters["triton_final_response"].bool_param

    def run(self, *, parameters: dict[str, Any] | None = None, **inputs: Any) -> Answer:
        """Send a request and wait for its end."""
        answer = self.submit(parameters=parameters, **inputs)
        self.wait(lambda: answer.done)
        return answer

    def cancel_all(self) -> None:
        """Cancel the stream, and with it whatever runs."""
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        """Cancel what is left and close the connection."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()
