# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from fake_triton import FakeTriton, FrozenLink, refuse, web_server

from cedar_client import (
    AsyncClient,
    CedarError,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    Perf,
    ServerError,
    StallTimeout,
    TokenLogprob,
    Unavailable,
)
from cedar_client.watchdog import Watchdog


@pytest.mark.parametrize("prompt", ["two_words", "flag_apart"])
def test_stream_ends_with_either_convention_of_the_final_flag(client: Client, prompt: str) -> None:
    deltas = list(client.generate(prompt))
    assert [(d.text, d.token_ids, d.finish_reason) for d in deltas] == [("Hello", (1,), None), (" world", (2, 3), "stop")]
    assert [d.num_output_tokens for d in deltas] == [1, 2]
    assert (deltas[0].num_input_tokens, deltas[0].cached_tokens, deltas[0].replayed_tokens) == (7, 4, 2)
    assert deltas[0].seed == 2**64 - 1


def test_finished_stream_stays_finished(client: Client) -> None:
    stream = client.generate("two_words")
    assert len(list(stream)) == 2
    assert list(stream) == []


def test_whole_result_joins_its_deltas(client: Client) -> None:
    result = client.complete("two_words", request_key="mine")
    assert (result.key, result.text, result.token_ids, result.finish_reason) == ("mine", "Hello world", (1, 2, 3), "stop")
    assert (result.num_output_tokens, result.num_input_tokens, result.logprobs, result.perf) == (3, 7, None, None)


def test_logprobs_and_clocks_are_typed(client: Client) -> None:
    result = client.complete("rich", logprobs=1, prompt_logprobs=0)
    token = TokenLogprob(5, "é", -0.5)
    assert result.logprobs == (TokenLogprob(5, "é", -0.5, (token,)), token)
    assert result.prompt_logprobs == (None, token)
    assert result.cumulative_logprob == -1.0
    assert result.perf == Perf(1, 2, 3, 4, 0.1, 0.2, 0.3)


def test_settings_and_key_reach_the_server(client: Client, server: FakeTriton) -> None:
    stream = client.generate("two_words", max_tokens=3, temperature=0.7, stop=["a", "b"], seed=np.uint64(2**63))
    list(stream)
    call = server.calls[0]
    assert call.parameters == {
        "max_tokens": 3,
        "temperature": 0.7,
        "stop": ["a", "b"],
        "seed": 2**63,
        "request_key": stream.key,
    }
    assert call.request.id == stream.key
    assert len(stream.key) == 32
    assert call.request.model_name == "cedar"


def test_token_ids_of_any_kind_arrive_as_int32(client: Client) -> None:
    for ids in ([1, 2, 70000], (1, 2, 70000), np.array([1, 2, 70000], np.int64)):
        assert client.complete(input_ids=ids).text == "[1, 2, 70000]"


def test_chat_sends_only_what_was_given(client: Client) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    assert client.chat(messages).complete().text == '{"messages": [{"role": "user", "content": "Grüße"}]}'
    text = client.chat(messages, tools=[], thinking=False, reasoning_effort=1, response_format={"type": "text"}).complete().text
    assert text.endswith('"tools": [], "thinking": false, "reasoning_effort": 1, "response_format": {"type": "text"}}')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no prompt given; allowed: exactly one of prompt, input_ids, messages"),
        ({"prompt": "a", "input_ids": [1]}, "prompt and input_ids given"),
        ({"input_ids": [[1]]}, "input_ids: not a flat list of 32-bit integers"),
        ({"input_ids": [1.5]}, "input_ids: not a flat list"),
        ({"input_ids": [2**31]}, "input_ids: not a flat list"),
        ({"input_ids": [-(2**31) - 1]}, "input_ids: not a flat list"),
        ({"prompt": "a\ud800"}, "prompt: holds half of a surrogate pair"),
        ({"prompt": ["a", "b"]}, r"prompt: is a list; allowed: one text, one request per prompt \(for many: .*map"),
        ({"prompt": b"a"}, "prompt: is a bytes"),
    ],
)
def test_unsendable_prompt_is_refused_before_it_is_sent(client: Client, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        client.generate(**arguments)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("in ensemble 'cedar', INVALID_ARGUMENT: top_p: is 2; allowed: 0 to 1", InvalidArgument, "top_p: is 2; allowed: 0 to 1"),
        ("in ensemble 'a', in ensemble 'cedar', UNAVAILABLE: queue full", Unavailable, "queue full"),
        ("INVALID_ARGUMENT: sampling_parameters.stop[1]: is 5", InvalidArgument, r"^stop\[1\]: is 5$"),
        ("INVALID_ARGUMENT: text_input: is empty", InvalidArgument, "^prompt: is empty$"),
        ("DEADLINE_EXCEEDED: after 5 ms", DeadlineExceeded, "after 5 ms"),
        ("in ensemble 'cedar', INTERNAL: request k failed", ServerError, "request k failed"),
        ("Request for unknown model: 'cedar' is not found", Unavailable, "still loads its model.*unknown model"),
        ("in ensemble 'cedar', Server is stopping, scheduler is closed", Unavailable, "stopping"),
        ("[request id: k] unexpected inference input 'x' for model 'cedar'", InvalidArgument, "unexpected inference input"),
        ("[request id: k] inference input 'seed' data-type is 'INT32', but", InvalidArgument, "data-type"),
        ("[request id: k] unexpected shape for input 'seed' for model 'cedar'. Expected [1], got [2].", InvalidArgument, "shape"),
        ("something else", ServerError, "something else"),
    ],
)
def test_server_error_becomes_the_exception_of_its_code(
    client: Client, server: FakeTriton, message: str, kind: type[CedarError], text: str
) -> None:
    server.scripts["bad"] = refuse(message)
    with pytest.raises(kind, match=text) as caught:
        client.complete("bad", request_key="k")
    assert type(caught.value) is kind
    assert caught.value.key == "k"


def test_error_after_text_leaves_the_text_and_ends_the_stream(client: Client, server: FakeTriton) -> None:
    hello = server.scripts["unfinished"]

    def text_then_error(call: object) -> object:
        yield from hello(call)
        yield from refuse("INTERNAL: request k failed")(call)

    server.scripts["late"] = text_then_error
    stream = client.generate("late")
    assert next(stream).text == "Hello"
    with pytest.raises(ServerError):
        next(stream)
    assert list(stream) == []


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ("broken", ConnectionLost, "Socket closed"),
        ("cancelled_by_server", ConnectionLost, "by an administrator"),
        ("unfinished", ServerError, "without a finish_reason"),
        ("foreign", ServerError, "the response is not Cedar's"),
    ],
)
def test_stream_that_breaks_off_raises_instead_of_ending(
    client: Client, prompt: str, kind: type[CedarError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        list(client.generate(prompt))


def test_no_server_is_a_lost_connection_and_not_a_hang() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(ConnectionLost, match=r"Connection refused$"):
            client.complete("two_words")
        assert client.ready() is False


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"])
def test_http_port_is_named_as_such(answer: bytes) -> None:
    with web_server(answer) as url, Client(url) as client:
        with pytest.raises(ConnectionLost, match=r"or is that the HTTP port\? gRPC is 8001 by default$"):
            client.complete("two_words")
        assert client.ready() is False


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("url", ["http://localhost:8001", "HTTPS://localhost:8001", "grpc://localhost:8001"])
def test_web_address_is_refused_and_not_looked_up_as_a_host_name(kind: Callable[[str], object], url: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"url: is '{url}'; allowed: host:port without {url.split('/')[0]}//"):
        kind(url)


def test_schemes_of_grpc_are_left_alone(server: FakeTriton) -> None:
    with Client(f"dns:///{server.url}") as client:
        assert client.ready() is True


def test_server_that_dies_mid_stream_is_a_lost_connection(client: Client, server: FakeTriton) -> None:
    stream = client.generate("silent")
    next(stream)
    threading.Thread(target=server.stop).start()
    with pytest.raises(ConnectionLost):
        next(stream)


def test_dead_peer_behind_an_open_connection_is_found_by_keepalive(server: FakeTriton) -> None:
    options = [("grpc.keepalive_time_ms", 200), ("grpc.keepalive_timeout_ms", 200), ("grpc.http2.ping_timeout_ms", 200)]
    with FrozenLink(server.url) as link, Client(link.url, channel_args=options, stall_timeout=30) as client:
        stream = client.generate("silent")
        next(stream)
        link.freeze()
        with pytest.raises(ConnectionLost):
            next(stream)


@pytest.mark.parametrize("how", ["close", "with", "break", "drop"])
def test_stream_that_is_left_cancels_the_request_at_once(client: Client, server: FakeTriton, how: str) -> None:
    start = time.monotonic()
    stream = client.generate("endless")
    if how == "close":
        next(stream)
        stream.close()
        stream.close()
    elif how == "with":
        with stream:
            next(stream)
    else:
        for _ in stream:
            break
        if how == "drop":
            del stream
            gc.collect()
        else:
            del stream
    assert server.wait_for_call().gone.wait(5)
    assert time.monotonic() - start < 5


def test_request_cancelled_before_its_first_token_is_cancelled_on_the_server(client: Client, server: FakeTriton) -> None:
    stream = client.generate("mute")
    call = server.wait_for_call()
    stream.close()
    assert call.gone.wait(5)
    assert list(stream) == []


def test_result_of_a_stream_that_was_closed_is_an_error_and_not_half_a_text(client: Client) -> None:
    stream = client.generate("endless")
    next(stream)
    stream.close()
    with pytest.raises(CedarError, match="closed before its end"):
        stream.complete()


def test_close_from_another_thread_ends_a_blocked_read(client: Client, server: FakeTriton) -> None:
    stream = client.generate("mute")
    server.wait_for_call()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(list, stream)
        stream.close()
        assert reader.result(5) == []


def test_silence_is_bounded_and_cancels_the_request(server: FakeTriton) -> None:
    with Client(server.url, stall_timeout=0.2) as client:
        stream = client.generate("silent", request_key="k")
        assert next(stream).text == "Hello"
        with pytest.raises(StallTimeout, match=r"request k: nothing came for 0.2 s.*cedar_num_requests_waiting") as caught:
            next(stream)
        assert isinstance(caught.value, TimeoutError)
        assert server.calls[0].gone.wait(5)


def test_stall_timeout_counts_silence_and_not_the_whole_stream(server: FakeTriton) -> None:
    with Client(server.url, stall_timeout=1.0) as client, client.generate("endless") as stream:
        end = time.monotonic() + 1.5
        for _ in stream:
            if time.monotonic() > end:
                break


def test_earlier_deadline_is_seen_although_the_watchdog_sleeps_for_a_later_one() -> None:
    dog, late, early = Watchdog(), threading.Event(), threading.Event()
    with dog.bound(60, late.set) as long, dog.bound(0.05, early.set) as short:
        assert early.wait(5)
        assert short.expired
        assert not long.expired
    dog.close()
    assert dog._thread is not None
    dog._thread.join(5)
    assert not dog._thread.is_alive()


def test_dropped_client_ends_its_watchdog(server: FakeTriton) -> None:
    client = Client(server.url)
    client.complete("two_words")
    thread = client._watchdog._thread
    assert thread is not None
    del client
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_many_streams_share_one_client_without_mixing(client: Client) -> None:
    def run(number: int) -> bool:
        ids = list(range(number, number + 50))
        return client.complete(input_ids=ids).text == str(ids)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(run, range(200)))


def test_streams_run_side_by_side_in_one_thread(client: Client) -> None:
    streams = [client.generate("endless") for _ in range(16)]
    for _ in range(3):
        assert [next(stream).text for stream in streams] == ["x"] * 16
    for stream in streams:
        stream.close()


def test_cancel_by_key_tells_whether_there_was_such_a_request(client: Client) -> None:
    assert client.cancel("live") is True
    assert client.cancel("gone") is False


def test_refused_cancel_raises(client: Client, server: FakeTriton) -> None:
    server.scripts["cancel"] = refuse("in ensemble 'cedar', UNAVAILABLE: engine restarting")
    with pytest.raises(Unavailable, match="engine restarting"):
        client.cancel("live")


@pytest.mark.parametrize("model", ["cedar", "decoder_generate"])
def test_ready_needs_the_ensemble_and_the_step_behind_the_engine(client: Client, server: FakeTriton, model: str) -> None:
    assert client.ready() is True
    server.not_ready.add(model)
    assert client.ready() is False


def test_metadata_reaches_every_call(server: FakeTriton) -> None:
    with Client(server.url, metadata={"authorization": "secret"}) as client:
        client.complete("two_words")
        client.cancel("live")
    for call in server.calls:
        assert ("authorization", "secret") in call.context.invocation_metadata()


def test_closed_client_ends_its_streams(server: FakeTriton) -> None:
    client = Client(server.url)
    stream = client.generate("mute")
    call = server.wait_for_call()
    client.close()
    assert call.gone.wait(5)
    with pytest.raises(ConnectionLost):
        next(stream)


def test_tls_needs_a_server_that_speaks_it(server: FakeTriton) -> None:
    with Client(server.url, credentials=grpc.ssl_channel_credentials()) as client, pytest.raises(ConnectionLost):
        client.complete("two_words")
