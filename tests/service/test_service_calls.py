# SPDX-License-Identifier: Apache-2.0
"""Every call of the engine service through the real client: what must not get lost, doubled, leaked or left waiting."""

from __future__ import annotations

import random
import threading
import time

import grpc
import pytest
from service_support import (
    PATIENCE_S,
    VOCAB,
    Encoding,
    ServiceThread,
    Stream,
    continuation,
    encode,
    request,
    service,
    until,
)

from cedar.errors import CedarError, ErrorCode
from cedar.service.client import EngineClient
from cedar.v1 import engine_pb2 as pb
from cedar.v1 import engine_pb2_grpc


def is_empty(served: ServiceThread) -> bool:
    stats = served.engine.stats().result(PATIENCE_S)
    return stats.num_running + stats.num_waiting + stats.usage.sequences == 0


def test_tokens_lost_doubled_or_reordered(client: EngineClient, served: ServiceThread) -> None:
    streams = {}
    for number in range(12):
        prompt = tuple(range(2 + number, 8 + number))
        handle = encode(client, request(f"r{number}", prompt, max_tokens=20 + number))
        streams[number] = stream = Stream()
        client.attach(handle, stream.on_tokens)
    for number, stream in streams.items():
        last = stream.end()
        assert (last.finish_reason, last.num_output_tokens) == ("length", 20 + number)
        assert stream.tokens == continuation((7 + number,), 20 + number)
        assert last.timing.arrival_ns <= last.timing.first_token_ns <= last.timing.last_token_ns
        assert stream.messages.empty()
    until(lambda: is_empty(served), "everything freed")


def test_handle_is_not_told_before_the_prompt_is_encoded(client: EngineClient, served: ServiceThread) -> None:
    served.runner.gate.clear()
    encoding = Encoding()
    client.encode(request("r", tuple(range(2, 12))), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    assert encoding.progress[0].handle
    assert encoding.progress[0].num_input_tokens == 10
    assert not encoding.done.is_set()
    served.runner.gate.set()
    result = encoding.wait()
    assert (result.handle, result.ready, result.encoded_tokens) == (encoding.progress[0].handle, True, 10)


def test_cancel_before_ready_leaks_the_request(client: EngineClient, served: ServiceThread) -> None:
    served.runner.gate.clear()
    encoding = Encoding()
    call = client.encode(request("r"), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    call.cancel()
    error = encoding.wait()
    assert isinstance(error, CedarError)
    assert error.code is ErrorCode.UNAVAILABLE
    served.runner.gate.set()
    until(lambda: is_empty(served), "everything freed")


def test_cancel_at_once_leaks_the_request(client: EngineClient, served: ServiceThread) -> None:
    for number in range(50):
        encoding = Encoding()
        client.encode(request(f"r{number}"), encoding.progress.append, encoding.on_done).cancel()
        encoding.wait()
    until(lambda: is_empty(served), "everything freed")


def test_abort_by_key_while_encoding_is_told_as_cancelled(client: EngineClient, served: ServiceThread) -> None:
    served.runner.gate.clear()
    encoding, stream = Encoding(), Stream()
    client.encode(request("victim"), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(client.abort(key="victim")))
    thread.start()
    served.runner.gate.set()
    thread.join(PATIENCE_S)
    assert found == [True]
    client.attach(encoding.wait().handle, stream.on_tokens)
    assert stream.end().finish_reason == "cancelled"
    assert client.abort(key="victim") is False


def test_abort_of_a_request_that_waits_forgets_its_prompt() -> None:
    """Its length is reported although nothing of it was ever encoded."""
    with service(max_num_seqs=1) as served:
        client, encoding = EngineClient(served.address), Encoding()
        encode(client, request("first"))
        client.encode(request("waits", (5, 6, 7, 8)), encoding.progress.append, encoding.on_done)
        until(lambda: bool(encoding.progress), "admission")
        assert client.abort(key="waits")
        result = encoding.wait()
        assert isinstance(result, pb.EncodeProgress)
        assert (result.ready, result.num_input_tokens, result.encoded_tokens) == (True, 4, 0)
        client.close()


def test_abort_by_another_client_while_decoding(client: EngineClient, served: ServiceThread) -> None:
    other = EngineClient(served.address)
    stream = Stream()
    handle = encode(client, request("r", max_tokens=100_000))
    client.attach(handle, stream.on_tokens)
    stream.next()
    assert other.abort(handle=handle)
    last = stream.end()
    assert last.finish_reason == "cancelled"
    assert last.num_output_tokens == len(stream.tokens)
    assert not other.abort(handle=handle)
    until(lambda: is_empty(served), "everything freed")
    other.close()


def test_abort_inside_a_callback_waits_for_itself(client: EngineClient, served: ServiceThread) -> None:
    stream = Stream()
    handle = encode(client, request("r", max_tokens=100_000))
    answers: list[bool] = []

    def abort_at_first(message: pb.SequenceTokens) -> None:
        if not answers:
            answers.append(client.abort(handle=handle))
        stream.on_tokens(message)

    client.attach(handle, abort_at_first)
    assert stream.end().finish_reason == "cancelled"
    assert answers == [True]
    until(lambda: is_empty(served), "everything freed")


def test_abort_by_key_inside_a_callback_is_dropped(client: EngineClient, served: ServiceThread) -> None:
    victim, killer = Stream(), Stream()
    client.attach(encode(client, request("victim", max_tokens=100_000)), victim.on_tokens)
    victim.next()

    def abort_victim(message: pb.SequenceTokens) -> None:
        client.abort(key="victim")
        killer.on_tokens(message)

    client.attach(encode(client, request("killer", max_tokens=1)), abort_victim)
    assert victim.end().finish_reason == "cancelled"
    assert killer.end().finish_reason == "length"
    until(lambda: is_empty(served), "everything freed")


def test_abort_without_a_name_is_taken_for_one(client: EngineClient) -> None:
    with pytest.raises(CedarError, match="INVALID_ARGUMENT: handle, request_key: neither is set"):
        client.abort()


def test_unknown_handle_is_met_with_silence(client: EngineClient) -> None:
    stream = Stream()
    client.attach("no-such-handle", stream.on_tokens)
    last = stream.end()
    assert (last.finish_reason, last.error_code) == ("error", "UNAVAILABLE")
    assert "no-such-handle" in last.error_message


def test_expired_lease_is_met_with_silence(client: EngineClient) -> None:
    with service(lease_ms=1) as served:
        client = EngineClient(served.address)
        handle = encode(client, request("r"))
        until(lambda: is_empty(served), "the lease's end")
        stream = Stream()
        client.attach(handle, stream.on_tokens)
        assert stream.end().finish_reason == "cancelled"
        client.close()


def test_second_attach_steals_or_ends_the_first(client: EngineClient, served: ServiceThread) -> None:
    other = EngineClient(served.address)
    first, second, third = Stream(), Stream(), Stream()
    handle = encode(client, request("r", max_tokens=400))
    client.attach(handle, first.on_tokens)
    first.next()
    client.attach(handle, second.on_tokens)
    other.attach(handle, third.on_tokens)
    assert second.end().error_code == "INTERNAL"
    assert "attached elsewhere" in third.end().error_message
    assert first.end().finish_reason == "length"
    assert first.tokens == continuation((7,), 400)
    other.close()


def test_closed_client_leaves_its_sequences_running(served: ServiceThread) -> None:
    client = EngineClient(served.address)
    stream, encoding = Stream(), Encoding()
    client.attach(encode(client, request("r", max_tokens=100_000)), stream.on_tokens)
    stream.next()
    served.runner.gate.clear()
    client.encode(request("q"), encoding.progress.append, encoding.on_done)
    client.close()
    served.runner.gate.set()
    assert stream.end().error_code == "UNAVAILABLE"
    assert isinstance(encoding.wait(), CedarError)
    until(lambda: is_empty(served), "everything freed")
    late = Stream()
    client.attach("h", late.on_tokens)
    assert late.end().error_code == "UNAVAILABLE"
    with pytest.raises(CedarError, match="closed"):
        client.status()


def test_closing_a_client_gives_its_waiting_threads_a_foreign_error(served: ServiceThread) -> None:
    client, encoding = EngineClient(served.address), Encoding()
    served.runner.gate.clear()
    client.encode(request("q"), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            client.drain(60_000)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=drain)
    waiting.start()
    until(lambda: served.service.state == "draining", "the drain has begun")
    client.close()
    waiting.join(PATIENCE_S)
    served.runner.gate.set()
    assert [str(error) for error in errors] == ["UNAVAILABLE: engine client is closed"]
    assert str(encoding.wait()) == "UNAVAILABLE: engine client is closed"


def test_engine_error_changes_its_words_on_the_way(client: EngineClient) -> None:
    encoding = Encoding()
    client.encode(request("r", (5, VOCAB)), encoding.progress.append, encoding.on_done)
    error = encoding.wait()
    message = f"input_ids: {VOCAB} is outside the vocabulary; allowed: token ids from 0 to {VOCAB - 1}"
    assert isinstance(error, CedarError)
    assert (error.code, error.message) == (ErrorCode.INVALID_ARGUMENT, message)


def test_full_queue_blocks_or_drops(served: ServiceThread) -> None:
    with service(max_num_seqs=1, max_waiting=2, lease_ms=50) as served:
        client = EngineClient(served.address)
        served.runner.gate.clear()
        encodings = [Encoding() for _ in range(8)]
        for number, encoding in enumerate(encodings):
            client.encode(request(f"r{number}", max_tokens=1), encoding.progress.append, encoding.on_done)
        served.runner.gate.set()
        results = [encoding.wait() for encoding in encodings]
        refused = [result for result in results if isinstance(result, CedarError)]
        assert 0 < len(refused) < 8
        assert {error.code for error in refused} == {ErrorCode.UNAVAILABLE}
        assert all("max_waiting" in error.message for error in refused)
        client.close()


def test_deadline_while_encoding_and_while_decoding(client: EngineClient, served: ServiceThread) -> None:
    served.runner.gate.clear()
    encoding = Encoding()
    client.encode(request("slow prompt", range(2, 42), timeout_ms=30), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    time.sleep(0.03)  # the deadline itself
    served.runner.gate.set()
    error = encoding.wait()
    assert isinstance(error, CedarError)
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    stream = Stream()
    client.attach(encode(client, request("slow output", timeout_ms=200, max_tokens=1_000_000)), stream.on_tokens)
    last = stream.end()
    assert (last.finish_reason, last.error_code) == ("deadline", "DEADLINE_EXCEEDED")


def test_slow_reader_gets_every_token_in_fewer_messages() -> None:
    with service(pause_s=0.0005) as served:
        client, quick = EngineClient(served.address), EngineClient(served.address)
        slow, fast = Stream(pause_s=0.02), Stream()
        client.attach(encode(client, request("slow", max_tokens=1500)), slow.on_tokens)
        quick.attach(encode(quick, request("fast", (9,), max_tokens=1500)), fast.on_tokens)
        fast.end()
        finished_at = time.monotonic()
        slow.end()
        behind = time.monotonic() - finished_at
        assert fast.tokens == continuation((9,), 1500)
        assert slow.tokens == continuation((7,), 1500)
        assert slow.seen[0].num_output_tokens == 1, "the first token waited for others"
        assert len(slow.seen) < 300, f"{len(slow.seen)} messages: queued one by one"
        assert behind < 0.5, f"the slow reader is {behind:.2f} s behind: its backlog is not bounded"
        client.close()
        quick.close()


def test_callback_that_raises_takes_others_down(client: EngineClient, served: ServiceThread) -> None:
    good = Stream()

    def bad(message: pb.SequenceTokens) -> None:
        raise ValueError("of the test")

    good_handle = encode(client, request("good", max_tokens=200))
    client.attach(encode(client, request("bad", max_tokens=100_000)), bad)
    client.attach(good_handle, good.on_tokens)
    assert good.end().finish_reason == "length"
    until(lambda: is_empty(served), "the sequence that nobody reads is aborted")


def test_random_cancels_leave_something_behind() -> None:
    """Two hundred requests, cancelled at random moments in every way there is: one end each, and nothing held."""
    rng = random.Random(7)
    with service(pause_s=0.001, max_waiting=64, lease_ms=60_000) as served:
        clients = [EngineClient(served.address) for _ in range(2)]
        encodings, streams = [], []
        for number in range(200):
            client, encoding, stream = rng.choice(clients), Encoding(), Stream()
            wanted = request(f"r{number}", range(2, 2 + rng.randint(1, 50)), max_tokens=rng.randint(1, 60))
            encodings.append(encoding)

            def attach_when_ready(result, encoding=encoding, stream=stream, client=client) -> None:
                if not isinstance(result, CedarError):
                    streams.append(stream)
                    client.attach(result.handle, stream.on_tokens)
                encoding.on_done(result)

            call = client.encode(wanted, encoding.progress.append, attach_when_ready)
            match rng.randrange(4):
                case 0:
                    call.cancel()
                case 1:
                    rng.choice(clients).abort(key=wanted.key)
                case 2 if encoding.progress:
                    rng.choice(clients).abort(handle=encoding.progress[0].handle)
        for encoding in encodings:
            encoding.wait()
        ends = [stream.end().finish_reason for stream in streams]
        assert set(ends) <= {"length", "cancelled"}
        assert all(stream.messages.empty() for stream in streams)
        until(lambda: is_empty(served), "everything freed")
        until(lambda: served.service.hub.num_live == 0, "nothing remembered")
        for client in clients:
            client.close()


def test_logprobs_get_lost(client: EngineClient) -> None:
    stream = Stream()
    client.attach(encode(client, request("r", max_tokens=8, logprobs=3)), stream.on_tokens)
    stream.end()
    entries = [entry for message in stream.seen for entry in message.logprobs]
    assert [entry.token_id for entry in entries] == stream.tokens
    assert all(len(entry.top) == 3 and entry.top[0].token_id == entry.token_id for entry in entries)
    assert all(entry.logprob == entry.top[0].logprob < 0 for entry in entries)


def test_tcp_address_is_served() -> None:
    with service() as served:
        pass
    from service_support import GatedRunner

    thread = ServiceThread(served.config, "127.0.0.1:0", GatedRunner())
    thread.load()
    client, stream = EngineClient(thread.address), Stream()
    client.attach(encode(client, request("r")), stream.on_tokens)
    assert stream.end().finish_reason == "length"
    client.close()
    thread.stop()


def test_clear_cache_and_generic_grpc_client(client: EngineClient, served: ServiceThread) -> None:
    assert client.clear_cache() == 0
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(engine_pb2_grpc.EngineStub(channel).Encode(pb.EncodeRequest(request_key="k"), timeout=5))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("input_ids")
