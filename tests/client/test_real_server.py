# SPDX-License-Identifier: Apache-2.0
"""The client against a real tritonserver with the embedded model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from cedar_server import Server, eventually
from test_cli import environment

from cedar.text.dsml import ToolCall
from cedar.text.parse import parse_completion
from cedar_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    Parameters,
    Unavailable,
)

pytestmark = pytest.mark.server
GREEDY: Parameters = {"temperature": 0.0, "ignore_eos": True}
ANSWER: Parameters = {"temperature": 0.0, "max_tokens": 80}
FREED_S = 5.0
USER = [{"role": "user", "content": "Hello"}]
SUM = [{"role": "user", "content": "What is 345 + 278?"}]
COPY = [{"role": "user", "content": "Copy this text: 4711 23 888"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "city name"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Current weather of a city", "parameters": CITY},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("client") / "serve.log", "--drain-timeout-ms", "500")
    yield server
    print(server.tail())
    server.stop()


@pytest.fixture
def client(real: Server) -> Iterator[Client]:
    with Client(f"127.0.0.1:{real.grpc_port}", stall_timeout=60) as client:
        yield client


def idle(server: Server) -> None:
    eventually(lambda: server.status().sequences_held == 0, FREED_S, "memory given back")


def test_stream_and_whole_result_are_the_answer(client: Client) -> None:
    deltas = list(client.chat(SUM, **ANSWER))
    result = client.chat(SUM, **ANSWER).complete()
    assert "".join(delta.text for delta in deltas) == result.text
    assert parse_completion(result.text, thinking=True).content == "623"
    assert sum(delta.num_output_tokens for delta in deltas) == result.num_output_tokens == len(result.token_ids) > 5
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert result.finish_reason == "stop"
    assert client.complete("import json", max_tokens=24, **GREEDY).num_output_tokens == 24


def test_tool_call_is_what_was_asked_for(client: Client) -> None:
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    result = client.chat(question, tools=[WEATHER], **ANSWER).complete()
    assert parse_completion(result.text, thinking=True).tool_calls == (ToolCall("get_weather", {"city": "Oslo"}),)


def test_settings_without_a_tensor_of_their_own_arrive(client: Client) -> None:
    settings: Parameters = {"max_tokens": 8, "ignore_eos": True, "cache_salt": "mine"}
    first = client.complete("Hi", logprobs=2, prompt_logprobs=1, return_perf_metrics=True, **settings)
    assert first.logprobs is not None
    assert [len(entry.top) for entry in first.logprobs] == [2] * 8
    assert [entry.id for entry in first.logprobs] == list(first.token_ids)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == first.num_input_tokens
    assert first.perf is not None
    assert first.perf.arrival_ns < first.perf.first_token_ns <= first.perf.last_token_ns
    assert client.complete("Hi", seed=first.seed, **settings).token_ids == first.token_ids


def test_stop_string_is_not_emitted(client: Client) -> None:
    assert client.chat(COPY, thinking=False, **ANSWER).complete().text == "4711 23 888"
    result = client.chat(COPY, thinking=False, stop="23", **ANSWER).complete()
    assert (result.text, result.finish_reason) == ("4711 ", "stop")


def test_token_ids_and_chat_are_answered(client: Client) -> None:
    assert client.complete(input_ids=[5, 6, 7], max_tokens=3, **GREEDY).num_input_tokens == 3
    thinking = client.chat(USER, max_tokens=3, **GREEDY).complete()
    plain = client.chat(USER, thinking=False, max_tokens=3, **GREEDY).complete()
    assert thinking.num_input_tokens > plain.num_input_tokens


def test_many_streams_of_one_client_mix_their_answers(client: Client, real: Server) -> None:
    sums = [(11 + 7 * number, 5 + 3 * number) for number in range(16)]
    questions = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums]
    right = [str(a + b) for a, b in sums]

    def answer(question: list[dict[str, str]]) -> str:
        return client.chat(question, **ANSWER).complete().text

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(answer, questions))
    assert [parse_completion(text, thinking=True).content for text in texts] == right

    async def together() -> list[str]:
        async with AsyncClient(f"127.0.0.1:{real.grpc_port}") as aio, asyncio.timeout(120):
            results = await asyncio.gather(*(aio.chat(question, **ANSWER).complete() for question in questions))
        return [result.text for result in results]

    assert asyncio.run(together()) == texts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 2.0}, "top_p: is 2.0; allowed: "),
        ({"colour": 1}, "colour: no such key; allowed: "),
        ({"max_tokens": 10**6}, "max_tokens: is 1000000"),
    ],
)
def test_wrong_setting_is_named(client: Client, settings: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        client.complete("Hi", **settings)  # type: ignore[arg-type]


def test_http_port_is_named_as_such(real: Server) -> None:
    with Client(f"127.0.0.1:{real.http_port}") as client, pytest.raises(ConnectionLost, match="is that the HTTP port"):
        client.complete("Hi", max_tokens=1)


def test_wrong_message_is_named(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"messages\[1\]\.content: is missing"):
        client.chat([*USER, {"role": "user"}]).complete()


def test_live_key_is_refused_and_cancel_by_key_ends_its_stream(client: Client, real: Server) -> None:
    stream = client.generate("Hello", request_key="mine", max_tokens=8000, **GREEDY)
    next(stream)
    with pytest.raises(InvalidArgument, match="request_key"):
        client.complete("Hello", request_key="mine", max_tokens=1)
    assert client.cancel("mine") is True
    assert [delta.finish_reason for delta in stream][-1] == "cancelled"
    assert client.cancel("mine") is False
    idle(real)


@pytest.mark.parametrize("prompt_tokens", [3, 12_000])
def test_closing_a_stream_frees_memory_in_decode_and_prefill(client: Client, real: Server, prompt_tokens: int) -> None:
    stream = client.generate(input_ids=[5] * prompt_tokens, max_tokens=2000, **GREEDY)
    if prompt_tokens == 3:
        next(stream)
    else:
        eventually(lambda: real.status().sequences_held == 1, 10, "a prompt that is being encoded")
    stream.close()
    idle(real)


def test_leaving_an_async_stream_frees_its_memory(real: Server) -> None:
    async def leave() -> None:
        async with AsyncClient(f"127.0.0.1:{real.grpc_port}") as client, asyncio.timeout(60):
            async for _ in client.generate("Hello", max_tokens=8000, **GREEDY):
                break
            task = asyncio.create_task(client.complete("Hello", max_tokens=8000, **GREEDY))
            await asyncio.to_thread(eventually, lambda: real.status().sequences_held >= 1, 10, "a request that runs")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(idle, real)

    asyncio.run(leave())


def test_deadline_before_the_first_token_is_an_error(client: Client, real: Server) -> None:
    with pytest.raises(DeadlineExceeded):
        client.complete(input_ids=[5] * 12_000, max_tokens=10, timeout_ms=50)
    idle(real)


def test_commands_work_against_a_server(real: Server) -> None:
    def cedar(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cedar", *arguments, "--url", f"127.0.0.1:{real.grpc_port}"]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, env=environment(), check=True)

    assert json.loads(cedar("generate", "Hi", "--json", "--max-tokens", "5", "--ignore-eos").stdout)["num_output_tokens"] == 5
    chat = cedar("chat", "--temperature", "0", stdin="What is 345 + 278?\n/reset\n/thinking off\nCopy this text: 4711 23 888\n")
    assert chat.stdout == "623\n4711 23 888\n"
    assert ": 623\n" in chat.stderr


def test_server_that_stops_ends_streams_with_an_error(client: Client, real: Server) -> None:
    """Runs last: the server is gone afterwards."""
    assert client.ready() is True
    stream = client.generate("Hello", max_tokens=15_000, **GREEDY)
    next(stream)
    stopping = threading.Thread(target=real.stop)
    stopping.start()
    with suppress(Unavailable):
        assert [delta.finish_reason for delta in stream][-1] == "cancelled"
    stopping.join(60)
    assert client.ready() is False
    with pytest.raises(ConnectionLost):
        client.complete("Hello")
