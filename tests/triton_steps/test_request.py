# SPDX-License-Identifier: Apache-2.0
"""A Triton request to a validated one, without a server."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bad_inputs import MAX_PROMPT_BYTES, NAMES, bad_inputs, text
from cedar.errors import CedarError
from cedar.text.tokenizer import Tokenizer, load_tokenizer
from cedar.triton.envelope import Envelope
from cedar.triton.request import Admission, Cancel, Limits, parse_request
from cedar.triton.tensors import INPUTS, json_keys

LIMITS = Limits(max_model_len=4096, vocab_size=512, image_token_id=511, max_prompt_bytes=MAX_PROMPT_BYTES, default_timeout_ms=0)
CHECKPOINT = Path(__file__).parents[1] / "data" / "golden" / "tiny-a" / "checkpoint"
TOKENIZER = load_tokenizer(CHECKPOINT)


class Prompts:
    """The parser's view of a tokenizer; messages are checked as in the product, and become one token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_text(self, value: str) -> list[int]:
        return self._tokenizer.encode_prompt(value)

    def encode_messages(self, messages: str) -> list[int]:
        from cedar.text.messages import parse_messages

        return [len(parse_messages(messages).messages)]


def parse(parameters: dict[str, Any] | None = None, timeout_us: int = 0, **tensors: Any) -> Admission | Cancel:
    raw = json.dumps(parameters) if parameters else ""
    return parse_request(tensors, raw, timeout_us, Prompts(TOKENIZER), LIMITS, 1_000)


def envelope(parameters: dict[str, Any] | None = None, timeout_us: int = 0, **tensors: Any) -> Envelope:
    parsed = parse(parameters, timeout_us, **{"text_input": text("hello"), **tensors})
    assert isinstance(parsed, Admission)
    return parsed.envelope


def sampling(**keys: Any) -> Any:
    return text(json.dumps(keys))


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_input_is_accepted_or_its_error_does_not_name_the_field(name: str) -> None:
    bad = bad_inputs(LIMITS)[name]
    with pytest.raises(CedarError) as caught:
        parse(bad.parameters, **bad.tensors)
    message = str(caught.value)
    assert message.startswith("INVALID_ARGUMENT: ")
    assert "; allowed: " in message
    assert len(message) < 1000
    for part in bad.says:
        assert part in message


def test_the_table_of_bad_inputs_is_too_short() -> None:
    assert len(NAMES) >= 40


def test_defaults_differ_from_the_contract() -> None:
    found = envelope()
    assert found.sampling.max_tokens is None
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert found.sampling.seed is not None
    assert (found.reply.stream, found.reply.echo, found.reply.logprobs) == (True, "", False)
    assert found.arrival_unix_ns == 1_000
    assert len(bytes.fromhex(found.key)) == 16


def test_two_requests_get_the_same_random_key_or_seed() -> None:
    first, second = envelope(), envelope()
    assert first.key != second.key
    assert first.sampling.seed != second.sampling.seed


def test_bos_is_missing_or_doubled() -> None:
    parsed = parse(text_input=text("hello"))
    assert isinstance(parsed, Admission)
    ids = parsed.input_ids.tolist()
    assert ids[0] == TOKENIZER.bos_id
    assert ids[1:] == TOKENIZER.encode("hello")


def test_input_ids_are_changed() -> None:
    parsed = parse(input_ids=np.array([7, 8, 9], np.int32))
    assert isinstance(parsed, Admission)
    assert parsed.input_ids.tolist() == [7, 8, 9]


def test_messages_are_not_encoded_as_chat() -> None:
    parsed = parse(messages=text(json.dumps([{"role": "user", "content": "a"}])))
    assert isinstance(parsed, Admission)
    assert parsed.input_ids.tolist() == [1]


def test_precedence_is_not_tensor_then_json_then_parameter() -> None:
    number = np.array([3], np.int32)
    three = envelope({"max_tokens": 1}, max_tokens=number, sampling_parameters=sampling(max_tokens=2))
    assert three.sampling.max_tokens == 3
    assert envelope({"max_tokens": 1}, sampling_parameters=sampling(max_tokens=2)).sampling.max_tokens == 2
    assert envelope({"max_tokens": 1}).sampling.max_tokens == 1
    words = envelope(stop_words=text("a"), sampling_parameters=sampling(stop=["b", "c"]))
    assert words.sampling.stop == ("a",)


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"max_tokens": "12"}, "max_tokens", 12),
        ({"max_tokens": 12.0}, "max_tokens", 12),
        ({"temperature": "0.5"}, "temperature", 0.5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": ".5"}, "top_p", 0.5),
        ({"seed": str(2**64 - 1)}, "seed", 2**64 - 1),
        ({"ignore_eos": "true"}, "ignore_eos", True),
        ({"ignore_eos": False}, "ignore_eos", False),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"stop_token_ids": [3, "4"]}, "stop_token_ids", (3, 4)),
        ({"min_length": 5}, "min_tokens", 5),
        ({"logprobs": 20}, "logprobs", 20),
        ({"n": 1, "top_k": 2}, "top_k", 2),
        ({"max_tokens": None, "seed": 4}, "seed", 4),
    ],
)
def test_a_json_value_is_refused_or_misread(keys: dict[str, Any], field: str, value: object) -> None:
    found = getattr(envelope(sampling_parameters=sampling(**keys)).sampling, field)
    assert found == value
    assert type(found) is type(value)


def test_a_higher_source_does_not_replace_the_alias() -> None:
    assert envelope({"min_tokens": 7}, sampling_parameters=sampling(min_length=5)).sampling.min_tokens == 5
    assert envelope({"min_length": 7}, sampling_parameters=sampling(min_tokens=5)).sampling.min_tokens == 5
    assert envelope(min_tokens=np.array([3], np.int32), sampling_parameters=sampling(min_length=5)).sampling.min_tokens == 3


def test_echo_has_another_default_than_the_contract() -> None:
    whole = np.array([False])
    assert envelope(stream=whole).reply.echo == "hello"
    assert envelope(stream=whole, exclude_input_in_output=np.array([True])).reply.echo == ""
    assert envelope().reply.echo == ""
    ids = parse(input_ids=np.array([5], np.int32), stream=whole)
    assert isinstance(ids, Admission)
    assert ids.envelope.reply.echo == ""


def test_logprobs_are_not_computed_for_the_outputs_that_need_them() -> None:
    yes = np.array([True])
    assert envelope(return_cumulative_logprob=yes).sampling.logprobs == 0
    assert not envelope(return_cumulative_logprob=yes).reply.logprobs
    assert envelope(return_logprobs=yes).sampling.logprobs == 0
    assert envelope(sampling_parameters=sampling(logprobs=3)).reply.logprobs
    assert envelope(prompt_logprobs=np.array([2], np.int32)).sampling.logprobs == 0
    assert envelope(prompt_logprobs=np.array([2], np.int32)).sampling.prompt_logprobs == 2


def test_deadline_is_lost() -> None:
    assert envelope(timeout_ms=np.array([70], np.int32)).timeout_ms == 70
    assert envelope(timeout_us=1_500).timeout_ms == 2
    assert envelope(timeout_us=1_500, timeout_ms=np.array([70], np.int32)).timeout_ms == 70


def test_triton_s_own_parameters_are_taken_for_settings() -> None:
    assert envelope({"triton_enable_empty_final_response": True, "sequence_id": 5, "seed": 3}).sampling.seed == 3


def test_cancel_is_not_recognised() -> None:
    assert parse(cancel=np.array([True]), request_key=text("k")) == Cancel("k")
    assert isinstance(parse(cancel=np.array([False]), text_input=text("a")), Admission)


def test_what_genai_perf_sends_is_refused() -> None:
    vllm = envelope(
        stream=np.array([True]), exclude_input_in_output=np.array([True]), sampling_parameters=text('{"max_tokens":"12"}')
    )
    assert vllm.sampling.max_tokens == 12
    tensorrt = envelope({"min_length": 12}, stream=np.array([True]), max_tokens=np.array([12], np.int32))
    assert (tensorrt.sampling.min_tokens, tensorrt.sampling.max_tokens) == (12, 12)


def test_the_envelope_loses_something_between_the_steps() -> None:
    found = envelope(
        sampling_parameters=sampling(stop=["ä"], top_k=4, encoder_replay="off", decoder_replay="exact", cache_salt="s"),
        priority=np.array([-3], np.int32),
        stream=np.array([False]),
    )
    again = Envelope.model_validate_json(found.model_dump_json(exclude_defaults=True))
    assert again == found
    request = again.generation_request([1, 2])
    assert (request.input_ids, request.priority, request.decoder_replay) == ((1, 2), -3, "exact")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(json_keys())), JSON, max_size=4))
def test_some_json_ends_in_another_exception(keys: dict[str, Any]) -> None:
    with suppress(CedarError):
        envelope(sampling_parameters=sampling(**keys))


@given(st.binary(max_size=60))
def test_some_bytes_end_in_another_exception(raw: bytes) -> None:
    for name in ("text_input", "messages", "sampling_parameters", "request_key", "stop_words"):
        with suppress(CedarError):
            parse(**{"text_input": text("a"), name: text(raw)})


def test_a_scalar_input_is_no_key_of_sampling_parameters() -> None:
    prompts = {"text_input", "messages", "sampling_parameters", "cancel"}
    scalars = {tensor.name for tensor in INPUTS if tensor.dims == (1,)} - prompts
    assert scalars <= set(json_keys())


def test_a_text_that_cannot_fit_is_tokenised_to_find_out() -> None:
    limits = replace(LIMITS, max_model_len=100, longest_token=8, max_prompt_bytes=1 << 20)
    with pytest.raises(CedarError, match=r"text_input: has 801 bytes; allowed: at most 800 bytes \(a context of 100 tokens\)"):
        parse_request({"text_input": text("a" * 801)}, "", 0, Prompts(TOKENIZER), limits, 1_000)
    with pytest.raises(CedarError, match=r"messages: has \d+ bytes; allowed: at most 70336 bytes"):
        parse_request({"messages": text("x" * 70337)}, "", 0, Prompts(TOKENIZER), limits, 1_000)


@pytest.mark.parametrize("key", ["a\nb", "\x1b[31m", "\u2028"])
def test_a_key_forges_a_line_of_the_log(key: str) -> None:
    with pytest.raises(CedarError, match=r"request_key: is .*printable"):
        parse(text_input=text("a"), request_key=text(key))
