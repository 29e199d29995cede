# SPDX-License-Identifier: Apache-2.0
"""A request, an error and an update say the same on both sides of the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason, GenerationRequest, SamplingParams
from cedar.engine.updates import SequenceUpdate, Timing, TokenLogprobs
from cedar.errors import CedarError, ErrorCode
from cedar.service.convert import merge_tokens, parse_error, request_from_proto, request_to_proto
from cedar.v1 import engine_pb2 as pb

ids = st.integers(0, 2**32 - 1)
small = st.integers(0, 20)


def sampling() -> st.SearchStrategy[SamplingParams]:
    penalty = st.floats(-2, 2)
    return st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1000, 2**32 - 1),
        min_tokens=st.integers(0, 1000),
        temperature=st.floats(0, 100),
        top_k=ids,
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        presence_penalty=penalty,
        frequency_penalty=penalty,
        repetition_penalty=st.floats(0, 100, exclude_min=True),
        seed=st.none() | st.integers(0, 2**64 - 1),
        stop=st.lists(st.text(min_size=1, max_size=8), max_size=4).map(tuple),
        stop_token_ids=st.lists(ids, max_size=4).map(tuple),
        end_id=st.none() | ids,
        ignore_eos=st.booleans(),
        logprobs=st.none() | small,
        prompt_logprobs=st.none() | small,
    )


@given(
    st.builds(
        GenerationRequest,
        key=st.text(min_size=1, max_size=128),
        input_ids=st.lists(ids, min_size=1, max_size=20).map(tuple),
        sampling=sampling(),
        priority=st.integers(-(2**31), 2**31 - 1),
        arrival_unix_ns=st.integers(0, 2**63),
        timeout_ms=st.integers(0, 2**40),
        cache_salt=st.text(max_size=20),
        encoder_replay=st.none() | st.sampled_from(EncoderReplay),
        decoder_replay=st.none() | st.sampled_from(DecoderReplay),
    )
)
def test_request_changes_on_the_wire(request: GenerationRequest) -> None:
    wire = pb.EncodeRequest.FromString(request_to_proto(request).SerializeToString())
    assert request_from_proto(wire) == request


def test_absent_sampling_is_read_as_zeros() -> None:
    assert request_from_proto(pb.EncodeRequest(request_key="k", input_ids=[1])).sampling == SamplingParams()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_ids": (-1,)}, "input_ids"),
        ({"input_ids": (2**32,)}, "input_ids"),
        ({"arrival_unix_ns": -1}, "arrival_unix_ns"),
        ({"timeout_ms": 2**64}, "timeout_ms"),
        ({"sampling": SamplingParams(top_k=2**32)}, "top_k"),
        ({"sampling": SamplingParams(stop_token_ids=(2**32,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(end_id=2**32)}, "end_id"),
    ],
)
def test_number_that_the_wire_cannot_hold_is_not_named(changes: dict, field: str) -> None:
    with pytest.raises(CedarError, match=f"INVALID_ARGUMENT: {field}: "):
        request_to_proto(GenerationRequest(**{"key": "k", "input_ids": (1,), **changes}))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_key": ""}, "request_key"),
        ({"input_ids": []}, "input_ids"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"encoder_replay": "exact"}, "encoder_replay"),
        ({"sampling": pb.SamplingParams(temperature=101, top_p=1, repetition_penalty=1)}, "temperature"),
        ({"sampling": pb.SamplingParams(temperature=float("nan"), top_p=1, repetition_penalty=1)}, "temperature"),
        ({"sampling": pb.SamplingParams(top_p=0, repetition_penalty=1)}, "top_p"),
        ({"sampling": pb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=2, min_tokens=3)}, "sampling"),
    ],
)
def test_message_of_a_foreign_client_is_not_checked(changes: dict, field: str) -> None:
    with pytest.raises(CedarError, match=f"INVALID_ARGUMENT: {field}"):
        request_from_proto(pb.EncodeRequest(**{"request_key": "k", "input_ids": [1], **changes}))


@pytest.mark.parametrize("code", list(ErrorCode))
def test_error_text_loses_its_code(code: ErrorCode) -> None:
    error = CedarError(code, "field: a problem: with colons; allowed: this")
    again = parse_error(str(error))
    assert (again.code, again.message) == (code, error.message)
    assert parse_error("no code here").code is ErrorCode.INTERNAL


def test_merged_message_differs_from_its_parts() -> None:
    first = TokenLogprobs(7, -0.5, ((7, -0.5), (8, -1.5)))
    prompt = [TokenLogprobs(3, None), TokenLogprobs(4, -2.0)]
    error = CedarError(ErrorCode.DEADLINE_EXCEEDED, "late")
    message = pb.SequenceTokens(handle="h")
    merge_tokens(message, SequenceUpdate("h", 2, token_ids=[7], logprobs=[first], prompt_logprobs=prompt, num_output_tokens=1))
    assert message.finish_reason == ""
    merge_tokens(message, SequenceUpdate("h", 2, token_ids=[9], logprobs=[TokenLogprobs(9, -0.25)], num_output_tokens=2))
    last = SequenceUpdate(
        "h", 2, num_output_tokens=2, finish_reason=FinishReason.DEADLINE, error=error, timing=Timing(1, 2, 3, 4)
    )
    merge_tokens(message, last)
    assert (list(message.token_ids), message.num_output_tokens) == ([7, 9], 2)
    assert [entry.token_id for entry in message.logprobs] == [7, 9]
    assert [(top.token_id, top.logprob) for top in message.logprobs[0].top] == [(7, -0.5), (8, -1.5)]
    assert [entry.absent for entry in message.prompt_logprobs] == [True, False]
    assert (message.finish_reason, message.error_code, message.error_message) == ("deadline", "DEADLINE_EXCEEDED", "late")
    assert (message.timing.arrival_ns, message.timing.last_token_ns) == (1, 4)
