# SPDX-License-Identifier: Apache-2.0
"""The public contract through a real server: streaming, text, settings, metrics."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from cedar_server import Client, Server, eventually

PROMPTS = [f"Once upon a time number {n}" + " and again" * n for n in range(4)]


def greedy(max_tokens: int = 20, **more: Any) -> dict[str, Any]:
    """Settings of a request that gives the same text each time."""
    return {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more}


def test_the_final_flag_is_not_on_the_last_data_response(client: Client) -> None:
    answer = client.run(text_input="Hello", **greedy(8))
    assert answer.error == ""
    assert answer.all("finish_reason") == [""] * (len(answer.responses) - 1) + ["length"]
    flags = [response.get_response().parameters["triton_final_response"].bool_param for response in answer.responses]
    assert flags == [False] * (len(flags) - 1) + [True]
    assert sum(answer.all("num_output_tokens")) == len(answer.ids) == 8
    assert answer.last("num_input_tokens") > 1


def test_a_response_lacks_an_output_or_has_a_nan(client: Client) -> None:
    from cedar.triton.tensors import NUMPY, OUTPUTS

    for response in client.run(text_input="Hello", **greedy(3)).responses:
        for tensor in OUTPUTS:
            array = response.as_numpy(tensor.name)
            assert array.dtype == NUMPY[tensor.dtype], tensor.name
            assert array.shape == (1,) or tensor.dims == (-1,)
            assert array.dtype.kind != "f" or array[0] == array[0]


def test_without_streaming_the_text_is_another(client: Client) -> None:
    streamed = client.run(text_input="Hello there", **greedy())
    whole = client.run(text_input="Hello there", stream=False, exclude_input_in_output=True, **greedy())
    assert len(whole.responses) == 1
    assert (whole.text, whole.ids) == (streamed.text, streamed.ids)
    assert whole.final
    assert client.run(text_input="Hello there", stream=False, **greedy()).text == "Hello there" + whole.text


def test_input_ids_and_messages_give_nothing(client: Client) -> None:
    assert len(client.run(input_ids=[5, 6, 7], **greedy(4)).ids) == 4
    chat = json.dumps([{"role": "user", "content": "Hello"}])
    answer = client.run(messages=chat, **greedy(4))
    assert (answer.error, len(answer.ids)) == ("", 4)


def test_seeds_are_ignored_or_all_the_same(client: Client) -> None:
    settings = {"max_tokens": 16, "ignore_eos": True, "text_input": "Hello", "temperature": 2.0}
    first, again = (client.run(seed=7, **settings) for _ in range(2))
    assert first.ids == again.ids
    assert first.last("seed_used") == 7
    other, another = (client.run(**settings) for _ in range(2))
    assert other.ids != another.ids
    assert other.last("seed_used") != another.last("seed_used")
    assert client.run(seed=other.last("seed_used"), **settings).ids == other.ids


def test_logprobs_are_not_those_of_the_tokens(client: Client) -> None:
    settings = json.dumps({"logprobs": 3, "max_tokens": 5, "temperature": 0, "ignore_eos": True})
    answer = client.run(text_input="Hello", sampling_parameters=settings, return_cumulative_logprob=True)
    entries = [entry for part in answer.all("logprobs") for entry in json.loads(part)["tokens"]]
    assert [entry["id"] for entry in entries] == answer.ids
    for entry in entries:
        values = [top["logprob"] for top in entry["top"]]
        assert values == sorted(values, reverse=True)
        assert entry["top"][0]["id"] == entry["id"]
        assert entry["logprob"] == values[0] <= 0.0
    assert answer.last("cumulative_logprob") == pytest.approx(sum(entry["logprob"] for entry in entries), abs=1e-4)


def test_prompt_logprobs_are_missing_or_repeated(client: Client) -> None:
    answer = client.run(text_input="Hello there", prompt_logprobs=2, **greedy(3))
    parts = [json.loads(part) for part in answer.all("logprobs")]
    assert len(parts[0]["prompt"]) == answer.last("num_input_tokens")
    assert parts[0]["prompt"][0] is None
    assert all("prompt" not in part for part in parts[1:])


def test_perf_metrics_are_missing_or_out_of_order(client: Client) -> None:
    before = time.time_ns()
    answer = client.run(text_input="Hello", return_perf_metrics=True, **greedy(4))
    found = json.loads(answer.last("perf_metrics"))
    marks = [found[name] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert [before, *marks] == sorted([before, *marks])
    assert answer.all("perf_metrics")[:-1] == [""] * (len(answer.responses) - 1)


def test_a_deadline_is_not_kept_or_loses_the_text(client: Client) -> None:
    start = time.monotonic()
    answer = client.run(text_input="Hello", timeout_ms=700, **greedy(4000))
    assert time.monotonic() - start < 5
    assert (answer.error, answer.last("finish_reason")) == ("", "deadline")
    assert 0 < len(answer.ids) < 4000
    late = client.run(input_ids=[5] * 12000, timeout_ms=1, **greedy(4))
    assert "DEADLINE_EXCEEDED" in late.error


def test_generate_over_http_does_not_work(server: Server, client: Client) -> None:
    settings = {"text_input": "Hello", "max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "stream": False}
    status, body = server.post("/v2/models/cedar/generate", settings)
    answer = json.loads(body)
    assert (status, answer["finish_reason"], len(answer["output_ids"])) == (200, "length", 5)
    assert answer["text_output"] == "Hello" + client.run(text_input="Hello", **greedy(5)).text
    status, body = server.post("/v2/models/cedar/generate", {**settings, "max_tokens": 0})
    assert status == 400
    assert "INVALID_ARGUMENT: max_tokens: is 0" in json.loads(body)["error"]


def test_generate_stream_over_http_does_not_work(server: Server, client: Client) -> None:
    status, body = server.post("/v2/models/cedar/generate_stream", {"text_input": "Hello", "max_tokens": 5, "temperature": 0.0})
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == client.run(text_input="Hello", **greedy(5)).text
    assert [event["finish_reason"] for event in events][-1] == "length"


def test_the_metrics_disagree_with_the_counts(server: Server, client: Client) -> None:
    names = ("cedar_generation_tokens_total", "cedar_prompt_tokens_total", "cedar_request_success_total")
    eventually(lambda: server.status().sequences_held == 0, 10, "an idle server")
    time_to_relay = 5.0
    engine = [_engine_metric(server, name) for name in names]
    eventually(lambda: [server.metric(name) for name in names] == engine, time_to_relay, "a relay that has caught up")
    answers = [client.submit(text_input=prompt, **greedy(6)) for prompt in PROMPTS[:4]]
    client.wait(lambda: all(answer.done for answer in answers))
    generated = sum(sum(answer.all("num_output_tokens")) for answer in answers)
    prompts = sum(answer.last("num_input_tokens") for answer in answers)
    expected = [engine[0] + generated, engine[1] + prompts, engine[2] + 4]
    eventually(lambda: [server.metric(name) for name in names] == expected, time_to_relay, f"metrics {expected}")
    assert server.metric("cedar_time_to_first_token_seconds_count") == _engine_metric(
        server, "cedar_time_to_first_token_seconds_count"
    )
    assert server.metric("cedar_engine_up") == 1


def _engine_metric(server: Server, name: str) -> float:
    from cedar.service.client import EngineClient

    client = EngineClient(server.engine_directory().address)
    try:
        text = client.status(include_metrics=True).metrics.decode()
    finally:
        client.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


def test_a_long_prefill_delays_a_short_request_by_more_than_a_chunk(server: Server, client: Client) -> None:
    long = client.submit(input_ids=[7] * 2048, return_perf_metrics=True, **greedy(1))
    eventually(lambda: server.status().sequences_held == 1, 5, "a prompt that is being encoded")
    short = client.submit(text_input="Hi", return_perf_metrics=True, **greedy(10))
    client.wait(lambda: long.done and short.done)
    assert long.error == short.error == ""
    first, second = (json.loads(answer.last("perf_metrics")) for answer in (long, short))
    chunks = 2048 / 512
    assert first["first_scheduled"] < second["arrival"] < first["first_token"]
    # counted in chunks of the long prompt, so the machine's speed does not matter
    assert second["queue"] < 2 * first["prefill"] / chunks
    assert second["first_token"] < first["first_token"]


def test_first_token_or_throughput_is_slow(client: Client) -> None:
    """Far below the target (300 ms, 50 tokens/s), so that a busy machine passes and a broken path does not."""
    client.run(text_input="Hello", **greedy(4))
    start = time.monotonic()
    answer = client.run(text_input="Hello", **greedy(64))
    assert answer.times[0] - start < 1.5
    assert len(answer.ids) / (answer.times[-1] - start) > 10


@pytest.fixture
def keys() -> str:
    return f"key-{time.monotonic_ns()}"


def test_cancel_by_key_does_not_cancel(server: Server, client: Client, keys: str) -> None:
    answer = client.submit(text_input="Hello", request_key=keys, **greedy(4000))
    client.wait(lambda: len(answer.responses) > 2)
    with server.client() as other:
        twice = other.run(text_input="Hello", request_key=keys, **greedy(4))
        assert f"request_key: {keys}" in twice.error or "request_key" in twice.error
        done = other.run(request_key=keys, cancel=True)
        assert (done.last("finish_reason"), done.final, len(done.responses)) == ("cancelled", True, 1)
        client.wait(lambda: answer.done)
        assert answer.last("finish_reason") == "cancelled"
        assert other.run(request_key=keys, cancel=True).last("finish_reason") == "not_found"
        assert other.run(text_input="Hello", request_key=keys, **greedy(2)).last("finish_reason") == "length"
