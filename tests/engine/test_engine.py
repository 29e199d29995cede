# SPDX-License-Identifier: Apache-2.0
"""How requests end, in every state, and what their end leaves behind."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from fake_runner import (
    EOS,
    UNIX_OFFSET_NS,
    VOCAB,
    Bench,
    end_of,
    expected_tokens,
    make_bench,
    no_eos,
    prefix_logits,
    request,
    script,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.engine.engine import MAX_FAILED_STEPS
from cedar.engine.request import DecoderReplay, FinishReason
from cedar.errors import CedarError, ErrorCode

LEASE_MS = 5000


# ends


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


def test_a_lease_that_ends_frees_the_sequence_as_cancelled() -> None:
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


def test_attaching_ends_the_lease() -> None:
    bench = make_bench(lease_ms=LEASE_MS)
    handle = bench.engine.add(request("r"))
    bench.until(lambda: handle in bench.ready)
    bench.clock.pass_ms(LEASE_MS - 1)
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
    actions = st.sampled_from(["add", "add", "step", "step", "step", "attach", "attach", "abort", "time", "fail"])
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
            live = handle in bench.engine._live
            assert (bench.engine.attach(handle) if action == "attach" else bench.engine.abort(handle=handle)) is live
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
