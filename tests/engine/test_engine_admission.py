# SPDX-License-Identifier: Apache-2.0
"""What is refused at the door, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import UNIX_OFFSET_NS, Bench, make_bench, request

from cedar.engine.request import FinishReason
from cedar.errors import CedarError, ErrorCode


def refused(bench: Bench, request_: Any) -> CedarError:
    with pytest.raises(CedarError) as caught:
        bench.engine.add(request_)
    return caught.value


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


def test_max_tokens_defaults_to_what_the_kv_budget_holds() -> None:
    bench = make_bench(pages=6)  # 20 positions, and the last token needs none
    handle = bench.engine.add(request("r", 10, max_tokens=None))
    bench.run()
    assert len(bench.tokens[handle]) == 11


def test_a_prompt_that_can_never_fit_is_refused_by_its_own_name() -> None:
    bench = make_bench(pages=6)
    error = refused(bench, request("long", 21, max_tokens=None))
    assert error.message.startswith("input_ids: 21 prompt tokens and up to 1 more never fit in the kv budget of 600 bytes")


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
