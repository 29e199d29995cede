# SPDX-License-Identifier: Apache-2.0
"""Requests in, updates out: admission, every end, every bound, every state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_runner import EOS, FACTS, UNIX_OFFSET_NS, VOCAB, Bench, expected_tokens, make_bench, no_eos, prefix_logits, request
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.engine.engine import MAX_FAILED_STEPS
from cedar.engine.request import DecoderReplay, FinishReason
from cedar.errors import CedarError, ErrorCode

LEASE_MS = 5000


def refused(bench: Bench, request_: Any) -> CedarError:
    with pytest.raises(CedarError) as caught:
        bench.engine.add(request_)
    return caught.value


# admission


@pytest.mark.parametrize(
    ("settings_", "field", "allowed"),
    [
        ({"prompt": [5, 40]}, "input_ids: 40", "0 to 39"),
        ({"prompt": [-1, 5]}, "input_ids: -1", "0 to 39"),
        ({"prompt": [5, 39]}, "input_ids: 39 is the image token", "text only"),
        ({"stop_token_ids": (3, 47)}, "stop_token_ids: 47", "0 to 39"),
        ({"end_id": 40}, "end_id: 40", "0 to 39"),
        ({"prompt": 64, "max_tokens": None}, "input_ids: 64 tokens", "at most 63"),
        ({"prompt": 60, "max_tokens": 5}, "max_tokens: is 5, but 60 prompt tokens leave 4", "1 to 4"),
        ({"prompt": 60, "max_tokens": None, "min_tokens": 5}, "min_tokens: is 5", "0 to 4"),
        ({"stop": ("x",)}, "stop: this engine has no tokenizer", "stop_token_ids"),
    ],
)
def test_bad_request_is_refused_by_field_and_the_next_good_one_is_served(
    settings_: dict[str, Any], field: str, allowed: str
) -> None:
    bench = make_bench(max_model_len=64)
    error = refused(bench, request("bad", **settings_))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.message.startswith(field)
    assert allowed in error.message
    good = bench.engine.add(request("bad"))  # its key is free
    bench.run()
    assert bench.ends[good].finish_reason is FinishReason.LENGTH


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    bench = make_bench(pages=6)  # rings + 5 pages of 4: 20 positions
    error = refused(bench, request("big", 10, max_tokens=12))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.message.startswith("max_tokens")
    assert "kv budget of 600 bytes" in error.message
    fits = bench.engine.add(request("fits", 10, max_tokens=11))  # the last token needs no position
    bench.run()
    assert len(bench.tokens[fits]) == 11


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    bench = make_bench(max_model_len=64)
    handle = bench.engine.add(request("r", 50, max_tokens=None))
    bench.run()
    assert len(bench.tokens[handle]) == 14


def test_max_tokens_defaults_to_1024_in_a_long_context() -> None:
    bench = make_bench(max_num_batched_tokens=64)
    handle = bench.engine.add(request("r", 3, max_tokens=None))
    bench.run()
    assert bench.ends[handle].num_output_tokens == 1024


def test_a_live_key_is_refused_and_free_again_after_its_end() -> None:
    bench = make_bench()
    first = bench.engine.add(request("same"))
    error = refused(bench, request("same"))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.message.startswith("request_key")
    bench.run()
    second = bench.engine.add(request("same"))
    assert second != first
    assert not bench.engine.attach(first)
    bench.run()
    assert bench.tokens[first] == bench.tokens[second]


def test_handles_of_two_engines_never_meet() -> None:
    assert make_bench().engine.add(request("k")) != make_bench().engine.add(request("k"))


def test_waiting_queue_is_bounded() -> None:
    bench = make_bench(max_waiting=3, max_num_seqs=2)
    handles = [bench.engine.add(request(f"r{i}")) for i in range(5)]  # two seats, three that wait
    error = refused(bench, request("r5"))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "max_waiting is 3" in error.message
    bench.step()
    assert refused(bench, request("r5")).code is ErrorCode.UNAVAILABLE
    bench.engine.abort(handle=handles[4])
    bench.engine.add(request("r5"))
    bench.run()
    assert len(bench.ends) == 6


def test_preempted_sequences_take_no_place_in_the_waiting_queue() -> None:
    bench = make_bench(pages=16, max_waiting=1, max_num_seqs=2, decoder_replay="off")
    for key in "ab":
        bench.engine.add(request(key, 20, max_tokens=30))
    bench.until(lambda: [bench.engine.attach(h) for h in bench.ready] and bench.counts.counters.get("preemptions_total", 0) > 0)
    bench.engine.add(request("c"))
    bench.engine.add(request("d"))
    assert refused(bench, request("e")).code is ErrorCode.UNAVAILABLE
    bench.run()
    assert len(bench.ends) == 4


def test_a_draining_engine_refuses_new_requests_and_finishes_old_ones() -> None:
    bench = make_bench()
    handle = bench.engine.add(request("old"))
    bench.engine.drain()
    error = refused(bench, request("new"))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "draining" in error.message
    assert bench.engine.stats().draining
    bench.run()
    assert bench.ends[handle].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("default_timeout_ms", [0, 100])
def test_a_deadline_that_is_over_at_the_door_is_refused(default_timeout_ms: int) -> None:
    bench = make_bench(default_timeout_ms=default_timeout_ms)
    arrival = bench.clock.now + UNIX_OFFSET_NS - 200_000_000
    error = refused(bench, request("late", arrival_unix_ns=arrival, timeout_ms=0 if default_timeout_ms else 100))
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    assert bench.engine.num_live == 0


def test_an_arrival_in_the_future_counts_as_now() -> None:
    bench = make_bench()
    handle = bench.engine.add(request("r", arrival_unix_ns=bench.clock.now + UNIX_OFFSET_NS + 10**15, timeout_ms=50))
    bench.clock.pass_ms(51)
    bench.step()
    assert bench.ends[handle].finish_reason is FinishReason.DEADLINE


# ends


def end_of(bench: Bench, **settings_: Any) -> tuple[list[int], FinishReason | None]:
    handle = bench.engine.add(request("r", **settings_))
    bench.run()
    assert bench.runner.pages_used == 0
    return bench.tokens[handle], bench.ends[handle].finish_reason


def script(*tokens: int, prompt: int = 5) -> Callable[[Any], torch.Tensor]:
    """Logits whose arg max is the next of ``tokens``, whatever came before."""

    def logits_of(ids: Any) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[tokens[min(max(len(ids) - prompt, 0), len(tokens) - 1)]] = 9.0
        return logits

    return logits_of


def test_end_of_sentence_is_emitted_counted_and_ends() -> None:
    bench = make_bench()
    bench.runner.logits_of = script(7, 8, EOS)
    assert end_of(bench, max_tokens=10) == ([7, 8, EOS], FinishReason.STOP)
    assert bench.counts.counters["generation_tokens_total"] == 3


def test_end_id_replaces_the_end_of_sentence() -> None:
    bench = make_bench()
    bench.runner.logits_of = script(7, EOS, 9, 8)
    assert end_of(bench, max_tokens=10, end_id=9) == ([7, EOS, 9], FinishReason.STOP)


def test_stop_token_ids_are_added_to_it() -> None:
    bench = make_bench()
    bench.runner.logits_of = script(7, 12, EOS)
    assert end_of(bench, max_tokens=10, stop_token_ids=(12, 13)) == ([7, 12], FinishReason.STOP)


def test_ignore_eos_ignores_it_but_not_stop_token_ids() -> None:
    bench = make_bench()
    bench.runner.logits_of = script(EOS, EOS, 12)
    assert end_of(bench, max_tokens=10, ignore_eos=True, stop_token_ids=(12,)) == ([EOS, EOS, 12], FinishReason.STOP)


def test_min_tokens_holds_the_end_back() -> None:
    bench = make_bench()
    bench.runner.logits_of = script(EOS)
    tokens, reason = end_of(bench, max_tokens=10, min_tokens=4)
    assert len(tokens) == 5
    assert EOS not in tokens[:4]
    assert (tokens[4], reason) == (EOS, FinishReason.STOP)


def test_length_counts_output_tokens() -> None:
    assert end_of(make_bench(), max_tokens=3) == (expected_tokens(request("r").input_ids, 3), FinishReason.LENGTH)


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    bench = make_bench()
    bench.runner.logits_of = script(7, EOS)
    assert end_of(bench, max_tokens=2) == ([7, EOS], FinishReason.STOP)


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    bench = make_bench()
    bad = request("bad", [2, 3, 4])

    def logits_of(ids: Any) -> torch.Tensor:
        return torch.full((VOCAB,), torch.nan) if list(ids[:3]) == [2, 3, 4] and len(ids) > 4 else no_eos(ids)

    bench.runner.logits_of = logits_of
    handles = [bench.engine.add(request(f"r{i}", 4)) for i in range(3)]
    broken = bench.engine.add(bad)
    bench.run()
    assert bench.ends[broken].finish_reason is FinishReason.ERROR
    assert bench.ends[broken].error.code is ErrorCode.INTERNAL
    assert "request_key bad" in bench.ends[broken].error.message
    assert len(bench.tokens[broken]) == 2
    assert [bench.ends[h].finish_reason for h in handles] == [FinishReason.LENGTH] * 3


def test_a_failing_step_ends_what_holds_memory_and_nothing_else() -> None:
    bench = make_bench(max_num_seqs=2)
    running = [bench.engine.add(request(f"r{i}", max_tokens=20)) for i in range(2)]
    waiting = bench.engine.add(request("waits"))
    bench.until(lambda: [bench.engine.attach(h) for h in bench.ready] and len(bench.ready) == 2)
    bench.runner.fail_with = ValueError("device lost")
    bench.step()
    for i, handle in enumerate(running):
        end = bench.ends[handle]
        assert end.finish_reason is FinishReason.ERROR
        assert str(end.error) == f"INTERNAL: request_key r{i}: the step that ran it failed (ValueError: device lost)"
    assert bench.runner.pages_used == 0
    later = bench.engine.add(request("later"))
    bench.run()
    assert bench.tokens[waiting] == expected_tokens(request("waits").input_ids, 4)
    assert bench.tokens[later] == expected_tokens(request("later").input_ids, 4)


@pytest.mark.parametrize("answer", ["no logits", "too few", "no progress"])
def test_a_runner_that_does_not_do_its_step_is_an_error_and_not_a_hang(answer: str) -> None:
    bench = make_bench()
    real = bench.runner.step

    def step(work: Any) -> Any:
        result = real(work)
        if answer == "no progress":
            for item in work.prefills:
                item.seq.num_computed -= len(item.token_ids)
                item.seq.ids, item.seq.encoded = [], False
        elif result.logits is not None:
            result.logits = None if answer == "no logits" else result.logits[1:]
        return result

    bench.runner.step = step
    handle = bench.engine.add(request("r"))
    bench.run(limit=20)
    assert bench.ends[handle].error.code is ErrorCode.INTERNAL


# in every state


def reach(bench: Bench, name: str) -> str:
    """A sequence in the state ``name``, beside others that are busy."""
    if name == "waiting":
        for key in "xyz":
            bench.engine.add(request(key, 30, max_tokens=50))
        bench.step()
        return bench.engine.add(request("r", 10))
    if name == "preempted":
        bench.engine.add(request("x", 40, max_tokens=60, priority=-1))
        handle = bench.engine.add(request("r", 40, max_tokens=60))
        bench.until(lambda: [bench.engine.attach(h) for h in bench.ready] and "preemptions_total" in bench.counts.counters)
        assert bench.tokens[handle]
        return handle
    handle = bench.engine.add(request("r", 70, max_tokens=20))
    bench.step()
    if name == "encoding":
        return handle
    bench.until(lambda: handle in bench.ready)
    if name != "encoded":
        bench.engine.attach(handle)
    if name == "decoding":
        bench.until(lambda: len(bench.tokens[handle]) == 3)
    return handle


STATES = {
    "waiting": "WAITING",
    "encoding": "ENCODING",
    "encoded": "ENCODED",
    "before the first token": "DECODING",
    "decoding": "DECODING",
    "preempted": "PREEMPTED",
}


def bench_for(**settings_: Any) -> Bench:
    return make_bench(pages=36, max_num_seqs=3, **settings_)


@pytest.mark.parametrize("by", ["handle", "key"])
@pytest.mark.parametrize("name", STATES)
def test_cancel_frees_memory_at_once_in_every_state(name: str, by: str) -> None:
    bench = bench_for()
    handle = reach(bench, name)
    seq = bench.engine._live[handle].seq
    assert seq.state.name == STATES[name]
    memory, tokens = seq.memory, list(bench.tokens.get(handle, ()))
    assert bench.engine.abort(**({"handle": handle} if by == "handle" else {"key": "r"}))
    assert memory is None or memory not in bench.runner.memories
    assert not bench.engine.abort(handle=handle)
    assert not bench.engine.abort(key="r")
    assert bench.engine.has_work()
    bench.step()
    end = bench.ends[handle]
    assert (end.finish_reason, end.error, end.num_output_tokens) == (FinishReason.CANCELLED, None, len(tokens))
    bench.run()
    assert bench.tokens[handle] == tokens
    assert bench.runner.pages_used == 0


@pytest.mark.parametrize("name", STATES)
def test_a_deadline_ends_a_request_in_every_state(name: str) -> None:
    bench = bench_for()
    handle = reach(bench, name)
    seq = bench.engine._live[handle].seq
    memory = seq.memory
    seq.deadline_ns = bench.clock.now + 1_000_000
    assert bench.engine.next_deadline() <= seq.deadline_ns
    bench.clock.pass_ms(1)
    assert bench.engine.has_work()
    bench.step()
    end = bench.ends[handle]
    assert end.finish_reason is FinishReason.DEADLINE
    assert end.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert memory is None or memory not in bench.runner.memories
    bench.run()


def test_timeout_ms_counts_from_arrival_queueing_included() -> None:
    bench = make_bench(max_num_seqs=1)
    bench.engine.add(request("busy", 10, max_tokens=1000))
    arrival = bench.clock.now + UNIX_OFFSET_NS - 30_000_000
    handle = bench.engine.add(request("r", arrival_unix_ns=arrival, timeout_ms=50))
    bench.clock.pass_ms(19)
    bench.step()
    assert handle not in bench.ends
    bench.clock.pass_ms(1)
    bench.step()
    assert bench.ends[handle].finish_reason is FinishReason.DEADLINE
    assert "50 ms" in bench.ends[handle].error.message


def test_a_lease_that_nobody_renews_frees_the_sequence_as_cancelled() -> None:
    bench = make_bench(lease_ms=LEASE_MS)
    handle = bench.engine.add(request("r"))
    bench.until(lambda: handle in bench.ready)
    assert bench.runner.pages_used > 0
    assert not bench.engine.has_work() or bench.step() == []
    assert not bench.engine.has_work()
    bench.clock.pass_ms(LEASE_MS - 1)
    assert not bench.engine.has_work()
    assert bench.engine.next_deadline() == bench.clock.now + 1_000_000
    bench.clock.pass_ms(1)
    assert bench.engine.has_work()
    bench.step()
    assert (bench.ends[handle].finish_reason, bench.ends[handle].error) == (FinishReason.CANCELLED, None)
    assert bench.runner.pages_used == 0
    assert not bench.engine.attach(handle)
    assert not bench.engine.renew(handle)


def test_renewing_keeps_the_lease_and_attaching_ends_it() -> None:
    bench = make_bench(lease_ms=LEASE_MS)
    handle = bench.engine.add(request("r"))
    bench.until(lambda: handle in bench.ready)
    for _ in range(5):
        bench.clock.pass_ms(LEASE_MS - 1)
        assert bench.engine.renew(handle)
        assert bench.step() == []
    assert bench.engine.attach(handle)
    bench.clock.pass_ms(LEASE_MS * 10)
    bench.run()
    assert bench.ends[handle].finish_reason is FinishReason.LENGTH


def test_no_lease_runs_before_the_prompt_is_encoded() -> None:
    bench = make_bench(lease_ms=1, max_num_seqs=1)
    bench.engine.add(request("busy", 40, max_tokens=50))
    handle = bench.engine.add(request("r"))
    bench.run()
    assert bench.ends[handle].finish_reason is FinishReason.LENGTH


def test_only_attached_sequences_decode() -> None:
    bench = make_bench()
    handles = [bench.engine.add(request(f"r{i}")) for i in range(3)]
    bench.until(lambda: len(bench.ready) == 3)
    bench.engine.attach(handles[1])
    bench.until(lambda: handles[1] in bench.ends)
    assert [len(bench.tokens[h]) for h in handles] == [0, 4, 0]
    bench.run(attach=False)
    assert [bench.ends[h].finish_reason for h in handles] == [FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.CANCELLED]


def test_a_request_that_comes_while_all_others_wait_for_an_attach_runs_at_once() -> None:
    bench = make_bench()
    first = bench.engine.add(request("first"))
    bench.until(lambda: first in bench.ready)
    bench.step()
    assert not bench.engine.has_work()
    second = bench.engine.add(request("second"))
    assert bench.engine.has_work()
    bench.step()
    assert second in bench.ready
    bench.run()


def test_an_unattached_sequence_that_is_preempted_is_ready_only_once_and_attaches_later() -> None:
    bench = make_bench(pages=26, decoder_replay="off")
    first = bench.engine.add(request("first", 30, max_tokens=40))
    idle = bench.engine.add(request("idle", 30, max_tokens=4))
    bench.until(lambda: len(bench.ready) == 2)
    bench.engine.attach(first)
    bench.until(lambda: bench.engine._live[idle].seq.memory is None)
    assert bench.engine.attach(idle)
    bench.run()
    assert bench.tokens[first] == expected_tokens(request("first", 30).input_ids, 40)
    assert bench.tokens[idle] == expected_tokens(request("idle", 30).input_ids, 4)


def test_end_all_leaves_nothing_behind() -> None:
    bench = bench_for()
    names = ["x", "y", "z"]
    for name in names:
        bench.engine.add(request(name, 30, max_tokens=50))
    bench.until(lambda: bool([bench.engine.attach(h) for h in bench.ready]))
    updates = bench.engine.end_all(CedarError(ErrorCode.UNAVAILABLE, "shutdown"))
    assert [(u.finish_reason, u.error.code) for u in updates] == [(FinishReason.ERROR, ErrorCode.UNAVAILABLE)] * 3
    assert (bench.engine.num_live, bench.runner.pages_used) == (0, 0)
    assert not bench.engine.has_work()


# what comes out


def test_progress_goes_up_to_ready_which_comes_once() -> None:
    bench = make_bench(max_num_batched_tokens=16)
    handle = bench.engine.add(request("r", 50))
    bench.run()
    assert bench.encoded[handle] == [16, 32, 48, 50]
    ready = [u for u in bench.updates if u.ready]
    assert [(u.handle, u.num_input_tokens, u.cached_tokens, u.replayed_tokens) for u in ready] == [(handle, 50, 0, 0)]


def test_timing_and_histograms_agree_with_the_clock() -> None:
    bench = make_bench()
    start = bench.clock.now
    handle = bench.engine.add(request("r", 5, arrival_unix_ns=start + UNIX_OFFSET_NS - 2_000_000))
    bench.clock.pass_ms(3)
    bench.run()
    timing = bench.ends[handle].timing
    assert timing.arrival_ns == start + UNIX_OFFSET_NS - 2_000_000
    assert timing.queue_s == pytest.approx(0.005)
    assert timing.prefill_s == pytest.approx(0.0015 + 0.0015)  # five rows, then a tail of five
    assert timing.decode_s == pytest.approx(3 * 0.0011)
    observed = bench.counts.observed
    assert observed["time_to_first_token_seconds"] == [pytest.approx(0.008)]
    assert observed["inter_token_latency_seconds"] == [pytest.approx(0.0011)] * 3
    assert observed["e2e_request_latency_seconds"] == [pytest.approx(0.008 + 3 * 0.0011)]
    assert observed["request_queue_time_seconds"] == [pytest.approx(timing.queue_s)]
    assert observed["request_prefill_time_seconds"] == [pytest.approx(timing.prefill_s)]
    assert observed["request_decode_time_seconds"] == [pytest.approx(timing.decode_s)]
    assert (observed["request_prompt_tokens"], observed["request_generation_tokens"]) == ([5], [4])


def test_counters_agree_with_what_was_emitted() -> None:
    bench = make_bench(pages=40, max_num_seqs=6)
    handles = [bench.engine.add(request(f"r{i}", 4 + i, max_tokens=20 + i)) for i in range(8)]
    bench.until(lambda: [bench.engine.attach(h) for h in bench.ready] and sum(map(len, bench.tokens.values())) > 30)
    bench.engine.abort(handle=handles[0])
    bench.run()
    counters = bench.counts.counters
    assert counters["generation_tokens_total"] == sum(map(len, bench.tokens.values()))
    assert counters["prompt_tokens_total"] == counters["prefix_cache_queries_total"] == sum(4 + i for i in range(8))
    assert counters["request_success_total{cancelled}"] == 1
    assert counters["request_success_total{length}"] == 7
    gauges = bench.counts.gauges
    assert (gauges["num_requests_running"], gauges["num_requests_waiting"], gauges["kv_cache_usage_ratio"]) == (0, 0, 0)
    assert gauges["kv_bytes_per_token"] == 25.0


def test_logprobs_come_one_per_token_and_prompt_logprobs_once_with_the_first() -> None:
    bench = make_bench(max_num_batched_tokens=7)
    prompt = request("r", 20, logprobs=2, prompt_logprobs=1, max_tokens=5)
    handle = bench.engine.add(prompt)
    other = bench.engine.add(request("other", 9))
    bench.run()
    mine = [u for u in bench.updates if u.handle == handle and u.token_ids]
    assert [len(u.logprobs) for u in mine] == [1] * 5
    assert [len(u.prompt_logprobs) for u in mine] == [20, 0, 0, 0, 0]
    ids = list(prompt.input_ids)
    for position, record in enumerate(mine[0].prompt_logprobs):
        assert record.token_id == ids[position]
        if position:
            raw = torch.log_softmax(no_eos(ids[:position])[: FACTS.num_valid_ids].double(), 0)
            assert record.logprob == pytest.approx(float(raw[ids[position]]), abs=1e-6)
    output = ids + bench.tokens[handle]
    for i, update in enumerate(mine):
        raw = torch.log_softmax(no_eos(output[: 20 + i])[: FACTS.num_valid_ids].double(), 0)
        assert update.logprobs[0].logprob == pytest.approx(float(raw[output[20 + i]]), abs=1e-6)
    assert not [u for u in bench.updates if u.handle == other and (u.logprobs or u.prompt_logprobs)]
    assert bench.runner.steps[0].prefills[0].seq.decoder_replay is DecoderReplay.OFF  # forced


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    bench = make_bench(pages=24, max_num_batched_tokens=4, decoder_replay="off")
    first = bench.engine.add(request("first", 8, max_tokens=80))
    prompt = request("second", 60, prompt_logprobs=0, max_tokens=2, priority=1)
    bench.until(lambda: first in bench.ready)
    bench.engine.attach(first)
    second = bench.engine.add(prompt)
    bench.until(lambda: "preemptions_total" in bench.counts.counters)
    assert second not in bench.ready
    bench.run()
    records = [u.prompt_logprobs for u in bench.updates if u.handle == second and u.prompt_logprobs]
    assert len(records) == 1
    assert [record.token_id for record in records[0]] == list(prompt.input_ids)


@pytest.mark.parametrize(
    ("asked", "setting", "used"),
    [(None, "bounded", "bounded"), ("exact", "bounded", "exact"), ("off", "exact", "off"), (None, "off", "off")],
)
def test_decoder_replay_of_a_request_goes_before_the_setting(asked: str | None, setting: str, used: str) -> None:
    bench = make_bench(decoder_replay=setting)
    bench.engine.add(request("r", decoder_replay=DecoderReplay(asked) if asked else None))
    bench.step()
    assert bench.runner.memories[0].decoder_replay == used


def test_sampled_output_continues_through_preemption_with_the_same_random_numbers() -> None:
    prompts = [request(k, 20, max_tokens=40, temperature=1.0, seed=s, frequency_penalty=0.3) for k, s in (("a", 1), ("b", 2))]
    roomy, tight = make_bench(), make_bench(pages=24, decoder_replay="off")
    tokens = []
    for bench in (roomy, tight):
        handles = [bench.engine.add(prompt) for prompt in prompts]
        bench.run()
        tokens.append([bench.tokens[h] for h in handles])
    assert "preemptions_total" not in roomy.counts.counters
    assert tight.counts.counters["preemptions_total"] > 0
    assert tokens[0] == tokens[1]


def test_requests_without_a_seed_differ() -> None:
    bench = make_bench()
    handles = [bench.engine.add(request(f"r{i}", [5, 6, 7], temperature=3.0, max_tokens=20)) for i in range(3)]
    bench.run()
    assert len({tuple(bench.tokens[h]) for h in handles}) == 3


# stop strings


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    """One token per printable ASCII byte of 'abcdefgh…', plus two that span several, so that stop strings cross borders."""
    import json

    from cedar.text.tokenizer import Tokenizer

    pieces = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "bc", "cde", "xyz"]
    spec = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": pieces[i],
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i in (0, 1)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": []},
    }
    return Tokenizer(json.dumps(spec), "<s>", "</s>")


def letters(text: str) -> list[int]:
    return [2 + ord(c) - ord("a") for c in text]


BC, CDE, XYZ = 28, 29, 30


@pytest.mark.parametrize(
    ("output", "stop", "settings_", "count"),
    [
        (letters("aabcd"), ("abc",), {}, 4),
        ([*letters("aa"), BC, *letters("d")], ("abc",), {}, 3),  # ends inside a token that began before
        ([*letters("aab"), CDE, *letters("d")], ("bcd",), {}, 4),  # ends in the middle of a token
        (letters("ababacd"), ("abac", "zzz"), {}, 6),  # a false start that overlaps the match
        (letters("abcabc"), ("bca", "abc"), {}, 3),  # the first to be complete
        (letters("abcabcabc"), ("abc",), {"min_tokens": 4}, 9),  # the text of the first four takes no part
        ([*letters("ab"), 0, *letters("cd")], ("abc",), {}, 4),  # a special token adds no text
        (letters("abab"), ("abc",), {}, None),
    ],
)
def test_stop_strings_end_at_the_token_that_completes_them(
    byte_tokenizer: Any, output: list[int], stop: tuple[str, ...], settings_: dict[str, Any], count: int | None
) -> None:
    bench = make_bench(tokenizer=byte_tokenizer)
    bench.runner.logits_of = script(*output, 25)
    tokens, reason = end_of(bench, stop=stop, max_tokens=12, **settings_)
    assert reason is (FinishReason.LENGTH if count is None else FinishReason.STOP)
    assert tokens == (output + [25] * 12)[: count or 12]


# anything goes


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    pages=st.integers(12, 40),
    budget=st.integers(1, 40),
    seats=st.integers(1, 5),
    mode=st.sampled_from(DecoderReplay),
)
def test_whatever_happens_memory_comes_back_and_every_request_ends_once(
    data: st.DataObject, pages: int, budget: int, seats: int, mode: DecoderReplay
) -> None:
    bench = make_bench(
        pages=pages, max_num_batched_tokens=budget, max_num_seqs=seats, max_waiting=4, decoder_replay=mode.value, lease_ms=60
    )
    bench.runner.logits_of = prefix_logits  # ends by itself now and then
    requests: dict[str, Any] = {}
    failures = 0
    actions = st.sampled_from(["add", "add", "step", "step", "step", "attach", "attach", "abort", "time", "renew", "fail"])
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(actions)
        handle = data.draw(st.sampled_from([*requests, "unknown"]))
        if action == "add":
            spec = request(
                f"k{number}",
                data.draw(st.integers(1, 50)),
                max_tokens=data.draw(st.integers(1, 30)),
                priority=data.draw(st.integers(-1, 1)),
                timeout_ms=data.draw(st.sampled_from([0, 0, 40])),
            )
            with contextlib.suppress(CedarError):  # too long for the pool, or the queue is full
                requests[bench.engine.add(spec)] = spec
        elif action == "step":
            bench.step()
        elif action == "time":
            bench.clock.pass_ms(data.draw(st.integers(0, 40)))
        elif action == "fail":
            broken = failures < MAX_FAILED_STEPS - 1 and data.draw(st.integers(0, 3)) == 0
            bench.runner.fail_with = RuntimeError("x") if broken else None
            failures += broken
        else:
            act = {"attach": bench.engine.attach, "renew": bench.engine.renew, "abort": lambda h: bench.engine.abort(handle=h)}[
                action
            ]
            live = handle in bench.engine._live
            assert act(handle) is live
        assert len(bench.runner.memories) == bench.engine.stats().num_running <= seats
    bench.runner.fail_with = None
    bench.run()
    assert set(bench.ends) == set(requests)
    assert (bench.runner.pages_used, bench.engine.num_live, bench.engine.has_work()) == (0, 0, False)
    for handle, spec in requests.items():
        tokens = bench.tokens[handle]
        assert tokens == expected_tokens(spec.input_ids, len(tokens), prefix_logits)
        reason = bench.ends[handle].finish_reason
        assert (reason is FinishReason.STOP) == (EOS in tokens)
        assert (reason is FinishReason.LENGTH) == (len(tokens) == spec.sampling.max_tokens and EOS not in tokens)
    assert sum(n for name, n in bench.counts.counters.items() if name.startswith("request_success")) == len(requests)
    assert math.fsum(bench.counts.observed.get("request_generation_tokens", [])) == sum(
        len(bench.tokens[h]) for h, end in bench.ends.items() if end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    )
