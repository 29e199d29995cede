# SPDX-License-Identifier: Apache-2.0
"""Losing processes and reloading models: requests end, readiness follows, nothing is left behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cedar_server import Answer, Client, Server, eventually, free_ports
from tritonclient.utils import InferenceServerException

from cedar.config.engine import SHIPPED_REPOSITORY, EngineConfig
from cedar.model.embedded import embedded_model_dir
from cedar.service.directory import EngineDirectory
from cedar.service.owner import Owner
from cedar.triton.bundle import find_triton, python_environment

Start = Callable[..., Server]
READINESS_S = 3.0
RECOVERY_S = 60.0
STEPS = ("tokenize", "encoder_prefill", "decoder_generate", "deliver")


def endless(**more: Any) -> dict[str, Any]:
    """A request that does not end by itself during a test."""
    return {"text_input": "Hello", "max_tokens": 4000, "ignore_eos": True, "temperature": 0.0, **more}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests that leave a serving one behind."""
    server = Server(tmp_path_factory.mktemp("own") / "serve.log")
    yield server
    print(server.tail())
    assert server.stop() == 0


def running(client: Client, count: int) -> list[Answer]:
    """Streams that have begun."""
    answers = [client.submit(**endless()) for _ in range(count)]
    client.wait(lambda: all(len(answer.ids) > 2 for answer in answers))
    return answers


def serves(server: Server) -> bool:
    """A short request succeeds."""
    with server.client() as client:
        answer = client.run(input_ids=[5], max_tokens=2, temperature=0.0, ignore_eos=True)
        return len(answer.ids) == 2


def serves_again(server: Server) -> bool:
    """As `serves`; false while requests are refused or nobody listens."""
    with contextlib.suppress(AssertionError, InferenceServerException):
        return serves(server)
    return False


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


@pytest.mark.parametrize("model", ["decoder_generate", "encoder_prefill", "deliver", "tokenize"])
def test_a_killed_step_leaves_requests_hanging(own: Server, model: str) -> None:
    """The one that started the engine is among them."""
    stubs = own.stubs(model)
    engine = own.engine()
    with own.client() as client:
        answers = running(client, 3)
        if model == "encoder_prefill":
            # the running streams are past this step; this one is in it
            answers.append(client.submit(input_ids=[6] * 15000, max_tokens=4))
            eventually(lambda: own.status().sequences_held == 4, 5, "a prompt that is being encoded")
        for stub in stubs:
            stub.kill()
        eventually(lambda: not own.ready(), READINESS_S, "readiness gone")
        if model == "tokenize":
            count = len(answers[0].ids)
            client.wait(lambda: len(answers[0].ids) > count + 3)
            client.cancel_all()
        else:
            client.wait(lambda: all(answer.done for answer in answers), 15)
            assert [bool(answer.error) for answer in answers] == [True] * len(answers)
    eventually(lambda: own.ready("cedar"), RECOVERY_S, "readiness again")
    assert serves(own)
    assert gone(stubs)
    eventually(lambda: own.status().sequences_held == 0, 10, "memory given back")
    if own.engine() != engine:
        eventually(lambda: gone([engine]), 10, "the end of the former engine")


def test_a_killed_engine_leaves_requests_hanging(own: Server) -> None:
    engine = own.engine()
    with own.client() as client:
        answers = running(client, 3)
        engine.kill()
        client.wait(lambda: all(answer.done for answer in answers), 5)
        for answer in answers:
            assert "UNAVAILABLE: " in answer.error
    eventually(lambda: not own.ready(), READINESS_S, "readiness gone")
    eventually(lambda: own.ready("cedar"), RECOVERY_S, "readiness again")
    assert serves(own)
    assert own.engine().pid != engine.pid


def test_an_engine_killed_during_recovery_ends_the_service(own: Server) -> None:
    first = own.engine()
    first.kill()

    def another() -> psutil.Process | None:
        with contextlib.suppress(AssertionError, psutil.Error):
            engine = own.engine()
            return engine if engine.pid != first.pid else None
        return None

    eventually(lambda: another(), RECOVERY_S, "a new engine")
    second = another()
    assert second is not None
    second.kill()
    eventually(lambda: own.ready("cedar") and serves(own), RECOVERY_S, "requests served again")
    assert own.process.poll() is None


def test_a_killed_server_leaves_orphans(start: Start) -> None:
    server = start()
    processes = server.everything()
    triton = server.triton()
    assert triton is not None
    with server.client() as client:
        answers = running(client, 3)
        triton.kill()
        client.wait(lambda: all(answer.done for answer in answers), 5)
        assert all(answer.error for answer in answers)
    assert server.process.wait(20) == 1
    assert b"tritonserver was killed by SIGKILL" in server.log.read_bytes()
    eventually(lambda: gone(processes), 8, "no process left")


def test_a_killed_supervisor_leaves_orphans(start: Start) -> None:
    server = start()
    processes = server.everything()
    server.process.kill()
    server.process.wait(5)
    eventually(lambda: gone(processes), 8, "no process left")


def test_two_servers_share_an_engine(own: Server, start: Start) -> None:
    other = start()
    assert own.engine().pid != other.engine().pid
    assert serves(own)
    assert serves(other)
    engine = other.engine()
    assert other.stop() == 0
    assert gone([engine])
    assert serves(own)


class Traffic:
    """Short requests in a loop on a thread, one client each, until `stop`."""

    def __init__(self, server: Server) -> None:
        self.good = 0
        self.errors: list[str] = []
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._server.client() as client:
                answer = client.run(input_ids=[5, 6], max_tokens=2, ignore_eos=True)
            if answer.error:
                self.errors.append(answer.error)
            else:
                self.good += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive(), "a request hangs"


@pytest.mark.parametrize("model", [*STEPS, "cedar"])
def test_unload_and_load_under_traffic_hang_or_break_requests(own: Server, model: str) -> None:
    traffic = Traffic(own)
    try:
        eventually(lambda: traffic.good > 0, 20, "traffic")
        assert own.post(f"/v2/repository/models/{model}/unload", {})[0] == 200
        eventually(lambda: not own.ready("cedar"), 5, "an unloaded model")
        assert own.post(f"/v2/repository/models/{model}/load", {})[0] == 200
        if model != "cedar":
            # an ensemble comes back with its steps on its own
            eventually(lambda: own.ready("cedar"), 20, "the ensemble")
        count = traffic.good
        eventually(lambda: traffic.good > count + 1, 30, "traffic again")
    finally:
        traffic.stop()
    unavailable = ("is not ready", "unknown model", "not found", "no available", "UNAVAILABLE", "not available", "unloaded")
    assert [error for error in traffic.errors if not any(part in error for part in unavailable)] == []
    eventually(lambda: own.status().sequences_held == 0, 10, "memory given back")


def test_a_lost_engine_is_not_replaced_without_a_supervisor(start: Start) -> None:
    """As under a plain tritonserver: with the supervisor stopped the steps themselves bring the engine back."""
    server = start()
    engine = server.engine()
    server.process.send_signal(signal.SIGSTOP)
    try:
        engine.kill()
        with server.client() as client:
            refused = client.run(input_ids=[5], max_tokens=2)
            assert "UNAVAILABLE: " in refused.error

        eventually(lambda: serves_again(server), RECOVERY_S, "requests served again")
        assert server.engine().pid != engine.pid
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_stuck_engine_stays(own: Server) -> None:
    engine = own.engine()
    engine.suspend()
    eventually(lambda: gone([engine]), 40, "the end of a stuck engine")
    eventually(lambda: not own.ready(), READINESS_S, "readiness gone")
    eventually(lambda: own.ready("cedar"), RECOVERY_S, "readiness again")
    assert serves(own)


@pytest.mark.slow
def test_a_server_that_answers_nothing_looks_healthy(own: Server) -> None:
    """Every process alive, every model ready, and no request is ever answered."""
    stuck = own.stubs("deliver")
    for stub in stuck:
        stub.suspend()
    eventually(lambda: gone(stuck), 90, "the end of the stuck step")
    eventually(lambda: serves_again(own), RECOVERY_S, "requests served again")  # it looks ready all the time


LOOKS_AFTER_S = 0.1
"""Triton looks at the repository later than this after its start. Times of starts are rounded to hundredths of a second."""


def clock_offset_s() -> float:
    """What a process's start time lacks to the clock that dates files: the former counts from a boot time in whole seconds."""
    now = time.time()
    with subprocess.Popen(["true"]) as process:
        return now - psutil.Process(process.pid).create_time()


def test_serving_changes_the_model_repository(start: Start, tmp_path: Path) -> None:
    """A changed directory is a modified model: Triton would reload it under traffic when the ensemble is loaded again."""
    repository = tmp_path / "model_repository"
    shutil.copytree(SHIPPED_REPOSITORY, repository, ignore=shutil.ignore_patterns("__pycache__"))
    server = start("--model-repository", str(repository))
    assert serves(server)
    triton = server.triton()
    assert triton is not None
    changed = max(version.stat().st_mtime for version in repository.glob("*/1"))
    assert changed < triton.create_time() + clock_offset_s() + LOOKS_AFTER_S


def test_the_repository_does_not_load_in_a_plain_server(tmp_path: Path) -> None:
    """As in a container: tritonserver alone, with the settings in its environment."""
    triton = find_triton(EngineConfig())
    http_port, grpc_port, metrics_port = free_ports(3)
    command = [triton.executable, f"--model-repository={SHIPPED_REPOSITORY}", *triton.arguments]
    command += [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
    command += [f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    environment = os.environ | python_environment() | triton.environment
    environment |= {"CEDAR_MODEL": str(embedded_model_dir()), "CEDAR_CPU_THREADS": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path / "triton.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        eventually(lambda: answers(http_port) or process.poll() is not None, RECOVERY_S, "readiness")
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        client = Client(grpc_port)
        assert len(client.run(input_ids=[5], max_tokens=2, ignore_eos=True).ids) == 2
        client.close()
        directory = EngineDirectory.create(Owner.of(process.pid))
        engine = directory.engine()
        assert engine is not None
        # the models have loaded at once, and any of them could have started it
        assert directory.log.read_text().count("listens on") == 1
        processes = [*psutil.Process(process.pid).children(), psutil.Process(engine.pid)]
    finally:
        process.kill()
        process.wait(5)
    eventually(lambda: gone(processes), 8, "no process left")


def answers(port: int) -> bool:
    """The public model is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/models/cedar/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
