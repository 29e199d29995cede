# SPDX-License-Identifier: Apache-2.0
"""A client that cancels or disconnects frees its memory, whatever its request was doing."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cedar_server import Answer, Client, Server, eventually

FREED_S = 2.0
"""One engine step and two ticks of 250 ms, with room for a busy machine."""
PAGE_TOKENS = 64
LONG = 15000
"""Prompt tokens whose encoding takes many steps."""


def endless(**more: Any) -> dict[str, Any]:
    """A request that does not end by itself during a test."""
    return {"text_input": "Hello", "max_tokens": 4000, "ignore_eos": True, "temperature": 0.0, **more}


@pytest.fixture(autouse=True)
def idle(server: Server, tight: Server) -> Iterator[None]:
    """Before and after a test nothing is held; a leak fails the test that made it."""
    for each in (server, tight):
        eventually(lambda s=each: held(s) == (0, 0), 30, "an idle server")
    yield
    for each in (server, tight):
        eventually(lambda s=each: held(s) == (0, 0), 30, "an idle server")


def held(server: Server) -> tuple[int, int]:
    """(sequences that hold memory, requests that wait)."""
    status = server.status()
    return status.sequences_held, status.num_waiting


def freed(server: Server, left: tuple[int, int] = (0, 0)) -> None:
    """Memory and queue places are given back in time."""
    took = eventually(lambda: held(server) == left, FREED_S, f"(held, waiting) = {left}; now {held(server)}")
    print(f"freed after {took * 1000:.0f} ms")


def started(client: Client, answer: Answer, tokens: int = 3) -> None:
    client.wait(lambda: len(answer.ids) >= tokens or answer.error)
    assert answer.error == ""


def test_cancel_while_queued(tight: Server) -> None:
    with tight.client() as busy, tight.client() as waiting:
        running = [busy.submit(**endless()) for _ in range(2)]
        busy.wait(lambda: all(answer.ids for answer in running))
        waiting.submit(**endless())
        eventually(lambda: tight.status().num_waiting == 1, 5, "a request that waits")
        waiting.cancel_all()
        freed(tight, (2, 0))
        count = len(running[0].ids)
        busy.wait(lambda: len(running[0].ids) > count + 2)


def test_cancel_while_the_prompt_is_encoded(server: Server) -> None:
    with server.client() as client:
        answer = client.submit(input_ids=[5] * LONG, max_tokens=100, ignore_eos=True)
        eventually(lambda: held(server) == (1, 0), 5, "a prompt that is being encoded")
        client.cancel_all()
        freed(server)
        assert answer.responses == []


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0, 1.05])
def test_cancel_around_the_first_token(server: Server, share: float, encoding_s: float) -> None:
    """Also in the moment between the end of the encoding and the first token, which no test can hold still."""
    with server.client() as client:
        client.submit(input_ids=[6] * 1000, max_tokens=15000, ignore_eos=True)
        deadline = time.monotonic() + share * encoding_s
        client.wait(lambda: time.monotonic() > deadline)
        client.cancel_all()
        freed(server)


@pytest.fixture(scope="module")
def encoding_s(server: Server) -> float:
    """Time to the first token of that prompt."""
    with server.client() as client:
        start = time.monotonic()
        client.run(input_ids=[6] * 1000, max_tokens=1)
        return time.monotonic() - start


def test_cancel_while_decoding(server: Server) -> None:
    with server.client() as client:
        started(client, client.submit(**endless()))
        client.cancel_all()
        freed(server)


def test_cancel_without_streaming(server: Server) -> None:
    with server.client() as client:
        answer = client.submit(**endless(stream=False, exclude_input_in_output=True))
        eventually(lambda: held(server) == (1, 0), 5, "a running request")
        client.cancel_all()
        freed(server)
        assert answer.responses == []


def test_cancel_while_preempted(tight: Server) -> None:
    """Two sequences that outgrow the memory: one loses it and waits. Each is cancelled apart, so both states are met."""
    share = tight.status().pages_total // 2 * PAGE_TOKENS
    with tight.client() as first, tight.client() as second:
        before = tight.metric("cedar_preemptions_total")
        for number, client in enumerate((first, second)):  # with nothing in common: pages would be shared
            client.submit(input_ids=[7 + number] * (share - PAGE_TOKENS), max_tokens=1000, ignore_eos=True)
        eventually(lambda: held(tight) == (1, 1) and tight.metric("cedar_preemptions_total") > before, 60, "a preemption")
        second.cancel_all()
        eventually(lambda: sum(held(tight)) <= 1, FREED_S, "one request less")
        first.cancel_all()
        freed(tight)


def test_disconnect_of_a_killed_client(server: Server) -> None:
    """No goodbye: the process is killed, the connection just ends."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\nfrom cedar_server import Client\nc = Client(int(sys.argv[1]))\n"
        "a = c.submit(text_input='Hello', max_tokens=16000, ignore_eos=True)\nc.wait(lambda: len(a.ids) > 3)\n"
        "print('running', flush=True)\nc.wait(lambda: a.done, 600)\n"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, str(server.grpc_port), str(here), str(here.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.kill()
    freed(server)


def test_disconnect_from_generate_stream(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    body = json.dumps({"text_input": "Hello", "max_tokens": 4000, "ignore_eos": True})
    connection.request("POST", "/v2/models/cedar/generate_stream", body=body)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    freed(server)


@pytest.mark.parametrize("state", ["queued", "encoding", "decoding", "whole"])
def test_cancel_by_key_in_another_state(server: Server, tight: Server, state: str) -> None:
    key = f"{state}-{time.monotonic_ns()}"
    where = tight if state == "queued" else server
    request: dict[str, Any] = endless(request_key=key)
    if state == "encoding":
        request = {"input_ids": [5] * LONG, "max_tokens": 100, "request_key": key}
    if state == "whole":
        request |= {"stream": False, "exclude_input_in_output": True}
    with where.client() as busy, where.client() as client, where.client() as other:
        if state == "queued":
            running = [busy.submit(**endless()) for _ in range(2)]
            busy.wait(lambda: all(answer.ids for answer in running))
        answer = client.submit(**request)
        reached: dict[str, Callable[[], Any]] = {
            "queued": lambda: where.status().num_waiting == 1,
            "encoding": lambda: held(where) == (1, 0),
            "decoding": lambda: len(answer.ids) > 2,
            "whole": lambda: held(where) == (1, 0),
        }
        client.wait(reached[state])
        assert other.run(request_key=key, cancel=True).last("finish_reason") == "cancelled"
        client.wait(lambda: answer.done, 5)
        assert (answer.error, answer.last("finish_reason")) == ("", "cancelled")
        busy.cancel_all()


def test_a_full_queue_waits_instead_of_refusing(tight: Server) -> None:
    with tight.client() as busy, tight.client() as refused:
        running = [busy.submit(**endless()) for _ in range(2)]
        busy.wait(lambda: all(answer.ids for answer in running))
        for _ in range(2):
            busy.submit(**endless())
        eventually(lambda: tight.status().num_waiting == 2, 5, "a full queue")
        start = time.monotonic()
        answer = refused.run(**endless())
        assert "UNAVAILABLE: " in answer.error
        assert time.monotonic() - start < 2.0
        # a cancel request passes the full queue
        assert refused.run(request_key="nobody", cancel=True).last("finish_reason") == "not_found"


@pytest.mark.slow
def test_a_storm_of_cancels_leaks_or_hangs(server: Server) -> None:
    """160 requests, each client cancelled at a moment of its own; every other client leaves without a word."""
    dice = random.Random(5)
    for round_ in range(20):
        with server.client() as client:
            answers = [client.submit(**endless(stream=dice.random() < 0.8, exclude_input_in_output=True)) for _ in range(8)]
            deadline = time.monotonic() + dice.random() * 0.6
            client.wait(lambda end=deadline: time.monotonic() > end)
            if round_ % 2:
                client.cancel_all()
        assert not any(answer.error for answer in answers)
    eventually(lambda: held(server) == (0, 0), 10, "everything given back")
    with server.client() as client:
        assert len(client.run(text_input="Hello", max_tokens=4, ignore_eos=True).ids) == 4
