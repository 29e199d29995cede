# SPDX-License-Identifier: Apache-2.0
"""What a request gets: progress, tokens, log-probabilities, times, stop strings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_runner import FACTS, UNIX_OFFSET_NS, end_of, make_bench, no_eos, request, script

from cedar.engine.request import DecoderReplay, FinishReason


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
    assert counters["prompt_tokens_total"] == sum(4 + i for i in range(8))
    looked_up = counters["prefix_cache_queries_total"] - counters["prompt_tokens_total"]  # the others: again, after preemptions
    assert (looked_up > 0) == ("preemptions_total" in counters)
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


@pytest.mark.parametrize("count", [0, 1])
def test_prompt_logprobs_without_alternatives_are_prompt_logprobs(count: int) -> None:
    bench = make_bench(decoder_replay="bounded")
    handle = bench.engine.add(request("r", 20, prompt_logprobs=count, decoder_replay=DecoderReplay.EXACT))
    bench.run()
    (records,) = (u.prompt_logprobs for u in bench.updates if u.handle == handle and u.prompt_logprobs)
    assert [len(record.top) for record in records] == [0] + [count] * 19


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
