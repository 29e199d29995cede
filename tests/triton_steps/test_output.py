# SPDX-License-Identifier: Apache-2.0
"""Tokens to the values of the public outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.engine.request import SamplingParams
from cedar.errors import ErrorCode
from cedar.text.output import OutputText
from cedar.text.tokenizer import load_tokenizer
from cedar.triton.envelope import Envelope, Reply
from cedar.triton.output import SequenceOutput, empty_values
from cedar.triton.tensors import OUTPUTS
from cedar.v1 import engine_pb2 as pb

TOKENIZER = load_tokenizer(Path(__file__).parents[1] / "data" / "golden" / "tiny-a" / "checkpoint")
ROOM = 1 << 20


def output(stop: Sequence[str] = (), room: int = ROOM, **reply: Any) -> SequenceOutput:
    envelope = Envelope(key="k", sampling=SamplingParams(stop=tuple(stop)), reply=Reply(**reply))
    return SequenceOutput(envelope, TOKENIZER, room)


def tokens(text: str, finish: str = "", **more: Any) -> pb.SequenceTokens:
    return pb.SequenceTokens(handle="h", token_ids=TOKENIZER.encode(text), finish_reason=finish, **more)


def run(out: SequenceOutput, messages: Sequence[pb.SequenceTokens]) -> list[dict[str, Any]]:
    """One response per message that gives one."""
    taken: list[dict[str, Any]] = []
    for message in messages:
        if out.ended:
            break
        out.feed(message)
        if out.has_data():
            taken.append(out.take())
    return taken


def test_a_character_is_cut_at_a_token_border() -> None:
    out = output()
    single = [pb.SequenceTokens(token_ids=[token]) for token in TOKENIZER.encode("aé€😀z")]
    assert len(single) > 5
    taken = run(out, [*single, pb.SequenceTokens(finish_reason="length")])
    assert "".join(values["text_output"] for values in taken) == "aé€😀z"
    assert all("�" not in values["text_output"] for values in taken)
    assert [values["finish_reason"] for values in taken] == [""] * len(single) + ["length"]


def test_a_stop_string_is_emitted_or_held_back_for_ever() -> None:
    out = output(["STOP"])
    taken = run(out, [tokens("ab ST"), tokens("x S"), tokens("TO"), tokens("P and more", "stop")])
    assert "".join(values["text_output"] for values in taken) == "ab STx "
    assert taken[0]["text_output"] == "ab "
    assert taken[-1]["finish_reason"] == "stop"
    assert not out.ended_here
    left = output(["STOP"])
    assert "".join(values["text_output"] for values in run(left, [tokens("ab STO"), tokens("", "length")])) == "ab STO"


@given(
    st.lists(st.sampled_from(["wor", "ld", " hel", "lo", "x"]), min_size=1, max_size=12),
    st.lists(st.sampled_from(["wor", "orl", "lo", "xx", "ld h"]), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_engine_and_front_see_different_ends(parts: list[str], stops: list[str], min_tokens: int) -> None:
    ids = TOKENIZER.encode("".join(parts))
    engine = OutputText(TOKENIZER, stops, min_tokens)
    end = next((n for n, token in enumerate(ids, 1) if engine.push(token).matched is not None), None)
    out = SequenceOutput(
        Envelope(key="k", sampling=SamplingParams(stop=tuple(stops), min_tokens=min_tokens), reply=Reply()), TOKENIZER, ROOM
    )
    for n, token in enumerate(ids, 1):
        out.feed(pb.SequenceTokens(token_ids=[token]))
        assert (out.finish_reason == "stop") == (n == end)
        if n == end:
            break


def test_the_text_of_the_first_min_tokens_is_cut_at_a_stop_string() -> None:
    ids = TOKENIZER.encode("hello world hello world")
    cut = len(TOKENIZER.encode("hello world"))
    out = SequenceOutput(
        Envelope(key="k", sampling=SamplingParams(stop=("wor",), min_tokens=cut), reply=Reply()), TOKENIZER, ROOM
    )
    taken = run(out, [pb.SequenceTokens(token_ids=[token]) for token in ids])
    assert "".join(values["text_output"] for values in taken) == "hello world hello "
    assert taken[-1]["finish_reason"] == "stop"


def test_a_stop_string_that_only_we_see_does_not_end_the_sequence() -> None:
    out = output(["STOP"])
    taken = run(out, [tokens("a STOP b")])
    assert (taken[-1]["text_output"], taken[-1]["finish_reason"]) == ("a ", "stop")
    assert out.ended
    assert out.ended_here


def test_output_grows_beyond_its_ceiling() -> None:
    out = output(room=5)
    taken = run(out, [tokens("abc"), tokens("déf"), tokens("never")])
    assert "".join(values["text_output"] for values in taken) == "abcd"
    assert taken[-1]["finish_reason"] == "length"
    assert out.ended_here


def test_without_streaming_something_goes_out_before_the_end() -> None:
    out = output(stream=False, echo="prompt ")
    out.feed(tokens("abc"))
    assert not out.has_data()
    out.feed(tokens("def", "length"))
    values = out.take()
    assert values["text_output"] == "prompt abcdef"
    assert values["num_output_tokens"] == len(values["output_ids"]) == len(TOKENIZER.encode("abc") + TOKENIZER.encode("def"))


def test_an_engine_error_becomes_a_normal_end() -> None:
    out = output()
    out.feed(tokens("abc", "error", error_code="UNAVAILABLE", error_message="gone"))
    assert out.error is not None
    assert str(out.error) == "UNAVAILABLE: gone"
    unknown = output()
    unknown.feed(tokens("", "error", error_code="", error_message="?"))
    assert unknown.error is not None
    assert unknown.error.code is ErrorCode.INTERNAL


def test_a_deadline_throws_the_text_away_or_hides_that_there_is_none() -> None:
    late = run(output(), [tokens("abc"), tokens("", "deadline", error_code="DEADLINE_EXCEEDED", error_message="late")])
    assert (late[-1]["finish_reason"], late[0]["text_output"]) == ("deadline", "abc")
    none = output()
    none.feed(tokens("", "deadline", error_code="DEADLINE_EXCEEDED", error_message="late"))
    assert none.error is not None
    assert none.error.code is ErrorCode.DEADLINE_EXCEEDED


def entry(token: int, logprob: float, absent: bool = False) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(token_id=token, logprob=logprob, absent=absent, top=[pb.TopLogprob(token_id=token, logprob=logprob)])


def test_logprobs_are_not_the_documented_json() -> None:
    out = output(logprobs=True, cumulative_logprob=True)
    first = pb.SequenceTokens(token_ids=[70], logprobs=[entry(70, -0.1)], prompt_logprobs=[entry(0, 0.0, True), entry(71, -2.0)])
    last = pb.SequenceTokens(token_ids=[72], logprobs=[entry(72, -0.25)], finish_reason="length")
    taken = run(out, [first, last])
    begin, end = (json.loads(values["logprobs"]) for values in taken)
    assert begin["prompt"][0] is None
    assert begin["prompt"][1]["id"] == 71
    token = {"id": 70, "token": TOKENIZER.token_text(70), "logprob": pytest.approx(-0.1)}
    assert begin["tokens"] == [{**token, "top": [token]}]
    assert "prompt" not in end
    assert [values["cumulative_logprob"] for values in taken] == [pytest.approx(-0.1), pytest.approx(-0.35)]


def test_what_was_not_asked_for_is_filled() -> None:
    taken = run(output(), [pb.SequenceTokens(token_ids=[70], logprobs=[entry(70, -0.1)], finish_reason="length", timing=TIMING)])
    assert (taken[0]["logprobs"], taken[0]["cumulative_logprob"], taken[0]["perf_metrics"]) == ("", 0.0, "")


TIMING = pb.Timing(arrival_ns=10**9, first_scheduled_ns=2 * 10**9, first_token_ns=4 * 10**9, last_token_ns=9 * 10**9)


def test_perf_metrics_name_the_wrong_spans() -> None:
    taken = run(output(perf_metrics=True), [pb.SequenceTokens(token_ids=[70], finish_reason="length", timing=TIMING)])
    found = json.loads(taken[0]["perf_metrics"])
    assert (found["queue"], found["prefill"], found["decode"]) == (1.0, 2.0, 5.0)
    assert (found["arrival"], found["last_token"]) == (10**9, 9 * 10**9)


def test_a_response_lacks_an_output() -> None:
    counts = {"num_input_tokens", "cached_tokens", "replayed_tokens", "seed_used"}
    names = {tensor.name for tensor in OUTPUTS} - counts
    assert set(empty_values()) == set(output().take()) == names


@given(st.text(max_size=40), st.lists(st.integers(1, 4), max_size=20), st.booleans())
def test_text_depends_on_how_tokens_are_grouped(text: str, sizes: list[int], stream: bool) -> None:
    ids = TOKENIZER.encode(text)
    messages = []
    for size in sizes:
        messages.append(pb.SequenceTokens(token_ids=ids[:size]))
        ids = ids[size:]
    messages.append(pb.SequenceTokens(token_ids=ids, finish_reason="length"))
    taken = run(output(stream=stream), messages)
    assert "".join(values["text_output"] for values in taken) == TOKENIZER.decode(TOKENIZER.encode(text))
    assert [token for values in taken for token in values["output_ids"]] == TOKENIZER.encode(text)
