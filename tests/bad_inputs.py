# SPDX-License-Identifier: Apache-2.0
"""Requests that must be refused, each with the words its error must contain. Used with and without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cedar.triton.request import Limits

MAX_PROMPT_BYTES = 65536
"""Small, so that an oversized prompt is still a small test."""


@dataclass(frozen=True)
class BadInput:
    """``says``: parts of the error. ``ours``: False when Triton itself refuses it and words the error."""

    tensors: dict[str, NDArray[Any]]
    says: tuple[str, ...]
    parameters: dict[str, Any] = field(default_factory=dict)
    ours: bool = True


def text(*values: str | bytes) -> NDArray[Any]:
    """A BYTES tensor."""
    return np.array([value.encode() if isinstance(value, str) else value for value in values], dtype=object)


def _with(says: str, *more: str, parameters: Mapping[str, Any] | None = None, ours: bool = True, **tensors: Any) -> BadInput:
    """A good prompt with bad tensors."""
    return BadInput({"text_input": text("hello"), **tensors}, (says, *more), dict(parameters or {}), ours)


def _json(says: str, value: Any, *more: str) -> BadInput:
    """A good prompt with bad ``sampling_parameters``."""
    raw = value if isinstance(value, (str, bytes)) else json.dumps(value)
    return _with(says, *more, sampling_parameters=text(raw))


def _int(value: int) -> NDArray[np.int32]:
    return np.array([value], dtype=np.int32)


def _float(value: float) -> NDArray[np.float32]:
    return np.array([value], dtype=np.float32)


def _flag(value: bool) -> NDArray[np.bool_]:
    return np.array([value])


def _ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _prompts(limits: Limits) -> dict[str, BadInput]:
    image = limits.image_token_id
    refused = "is the image token" if image < limits.vocab_size else f"0 to {limits.vocab_size - 1}"
    return {
        "no prompt": BadInput({}, ("text_input, input_ids, messages", "none is given", "exactly one")),
        "only settings": BadInput({"max_tokens": _int(4)}, ("text_input, input_ids, messages", "exactly one")),
        "text and ids": _with("text_input and input_ids are given", "exactly one", input_ids=_ids(1, 2)),
        "text and messages": _with("text_input and messages are given", messages=text("[]")),
        "empty text": BadInput({"text_input": text("")}, ("text_input: is empty",)),
        "text not UTF-8": BadInput({"text_input": text(b"a\xff\xfe")}, ("text_input: is not valid UTF-8 (byte 1)",)),
        "text too long": BadInput({"text_input": text("a" * (MAX_PROMPT_BYTES + 1))}, ("text_input: has", "bytes", "at most")),
        "text with image": BadInput({"text_input": text("a <｜deepseek_image｜>")}, ("text_input", "no vision tower")),
        "no ids": BadInput({"input_ids": _ids()}, ("input_ids: is empty",)),
        "negative id": BadInput({"input_ids": _ids(5, -1)}, ("input_ids[1]: is -1", f"0 to {limits.vocab_size - 1}")),
        "id beyond vocabulary": BadInput({"input_ids": _ids(limits.vocab_size)}, ("input_ids[0]", "allowed: 0 to")),
        "image id": BadInput({"input_ids": _ids(5, image)}, ("input_ids[1]", refused)),
        "too many ids": BadInput(
            {"input_ids": np.full(limits.max_model_len, 5, np.int32)}, ("input_ids", f"at most {limits.max_model_len - 1}")
        ),
        "messages not JSON": BadInput({"messages": text("[{]")}, ("messages: not valid JSON",)),
        "messages a number": BadInput({"messages": text("7")}, ("messages: is a JSON int",)),
        "messages empty": BadInput({"messages": text("[]")}, ("messages: is empty",)),
        "unknown role": BadInput({"messages": text('[{"role":"robot","content":"a"}]')}, ("messages[0]", "role")),
        "messages with NaN": BadInput({"messages": text('[{"role":"user","content":NaN}]')}, ("messages",)),
    }


def _objects() -> dict[str, BadInput]:
    return {
        "sampling not JSON": _json("sampling_parameters: is not valid JSON", "{max_tokens: 1}"),
        "sampling a list": _json("sampling_parameters: is a JSON list", "[1]"),
        "sampling with NaN": _json("sampling_parameters: contains NaN", '{"temperature": NaN}'),
        "sampling with infinity": _json("temperature: is inf", '{"temperature": 1e999}'),
        "sampling key twice": _json("sampling_parameters.seed: is given twice", '{"seed": 1, "seed": 2}'),
        "sampling unknown key": _json("sampling_parameters.max_token: no such key", {"max_token": 4}, "max_tokens"),
        "sampling too long": _json("sampling_parameters: has", {"cache_salt": "a" * 70000}, "at most 65536 bytes"),
        "sampling not UTF-8": _json("sampling_parameters: is not valid UTF-8", b'{"cache_salt": "\xff"}'),
        "sampling too deep": _json("sampling_parameters", '{"stop": ' + "[" * 30000 + "]" * 30000 + "}"),
        "unknown parameter": _with("request parameters.tempreture: no such key", parameters={"tempreture": "1"}),
        "bad parameter": _with("request parameters.max_tokens: is 'many'", parameters={"max_tokens": "many"}),
        "parameter is a prompt": _with("request parameters.input_ids: no such key", parameters={"input_ids": "1"}),
    }


def _numbers(limits: Limits) -> dict[str, BadInput]:
    return {
        "max_tokens 0": _with("max_tokens: is 0", "1 or more", max_tokens=_int(0)),
        "max_tokens negative": _with("max_tokens: is -5", max_tokens=_int(-5)),
        "max_tokens beyond context": _with("max_tokens", "max_model_len", max_tokens=_int(limits.max_model_len)),
        "max_tokens a word": _json("sampling_parameters.max_tokens: is 'ten'", {"max_tokens": "ten"}),
        "max_tokens a fraction": _json("sampling_parameters.max_tokens: is 1.5", {"max_tokens": 1.5}),
        "max_tokens a boolean": _json("sampling_parameters.max_tokens: is True", {"max_tokens": True}),
        "max_tokens a list": _json("sampling_parameters.max_tokens: is [4]", {"max_tokens": [4]}),
        "max_tokens beyond int32": _json("sampling_parameters.max_tokens: is", {"max_tokens": 2**40}, "below 2^31"),
        "max_tokens endless digits": _json("sampling_parameters.max_tokens: is", {"max_tokens": "9" * 5000}, "5002 characters"),
        "min_tokens above max_tokens": _with("min_tokens: is 9 with max_tokens 4", max_tokens=_int(4), min_tokens=_int(9)),
        "min_tokens negative": _with("min_tokens: is -1", min_tokens=_int(-1)),
        "min_length above max_tokens": _json("min_length: is 9", {"min_length": 9, "max_tokens": 4}),
        "min_length and min_tokens": _json("min_length: is given with min_tokens", {"min_length": 1, "min_tokens": 1}),
        "temperature negative": _with("temperature: is -0.5", "from 0 to 100", temperature=_float(-0.5)),
        "temperature NaN": _with("temperature: is nan", temperature=_float(float("nan"))),
        "temperature infinite": _with("temperature: is inf", temperature=_float(float("inf"))),
        "temperature too high": _with("temperature: is 101", temperature=_float(101)),
        "temperature a word": _json("sampling_parameters.temperature: is 'warm'", {"temperature": "warm"}),
        "top_p 0": _with("top_p: is 0.0", "above 0 and at most 1", top_p=_float(0)),
        "top_p above 1": _with("top_p: is 1.5", top_p=_float(1.5)),
        "top_k negative": _with("top_k: is -1", top_k=_int(-1)),
        "min_p above 1": _with("min_p: is 2.0", min_p=_float(2)),
        "presence_penalty 3": _with("presence_penalty: is 3.0", "from -2 to 2", presence_penalty=_float(3)),
        "frequency_penalty -3": _with("frequency_penalty: is -3.0", frequency_penalty=_float(-3)),
        "repetition_penalty 0": _with("repetition_penalty: is 0.0", repetition_penalty=_float(0)),
        "seed negative": _json("sampling_parameters.seed: is -1", {"seed": -1}),
        "seed beyond 64 bits": _json("sampling_parameters.seed: is", {"seed": 2**64}),
        "end_id beyond vocabulary": _with("end_id", "token ids from 0", end_id=_int(limits.vocab_size)),
        "end_id negative": _with("end_id: is -1", end_id=_int(-1)),
        "logprobs 21": _json("sampling_parameters.logprobs: is 21", {"logprobs": 21}, "from 0 to 20"),
        "prompt_logprobs negative": _with("prompt_logprobs: is -1", prompt_logprobs=_int(-1)),
        "two completions": _json("sampling_parameters.n: is 2", {"n": 2}, "allowed: 1"),
        "priority beyond int32": _json("sampling_parameters.priority: is", {"priority": 2**31}),
        "timeout negative": _with("timeout_ms: is -1", timeout_ms=_int(-1)),
    }


def _others(limits: Limits) -> dict[str, BadInput]:
    return {
        "empty stop word": _with("stop_words[0]: is ''", stop_words=text("")),
        "too many stop words": _with("stop_words", "at most 16", stop_words=text(*map(str, range(17)))),
        "stop word too long": _with("stop_words[1]", "1 to 256", stop_words=text("a", "b" * 257)),
        "stop word not UTF-8": _with("stop_words[0]: is not valid UTF-8", stop_words=text(b"\xff")),
        "stop a number": _json("sampling_parameters.stop: is 5", {"stop": 5}),
        "stop list with a number": _json("sampling_parameters.stop[1]: is 5", {"stop": ["a", 5]}),
        "stop half a surrogate": _json("sampling_parameters.stop: character 0", '{"stop": "\\ud800"}'),
        "stop_token_ids a number": _json("sampling_parameters.stop_token_ids: is 5", {"stop_token_ids": 5}),
        "stop_token_ids beyond": _json("stop_token_ids", {"stop_token_ids": [limits.vocab_size]}, "token ids from 0"),
        "stop_token_ids negative": _json("stop_token_ids[0]: is -4", {"stop_token_ids": [-4]}),
        "key empty": _with("request_key: has 0 characters", request_key=text("")),
        "key too long": _with("request_key: has 129 characters", request_key=text("k" * 129)),
        "key not UTF-8": _with("request_key: is not valid UTF-8", request_key=text(b"\xff")),
        "cancel without key": BadInput({"cancel": _flag(True)}, ("cancel: is given without request_key",)),
        "cancel with prompt": _with("cancel: is given with text_input", cancel=_flag(True), request_key=text("k")),
        "echo while streaming": _with("exclude_input_in_output: is false with stream", exclude_input_in_output=_flag(False)),
        "echo of ids": BadInput(
            {"input_ids": _ids(5), "stream": _flag(False), "exclude_input_in_output": _flag(False)},
            ("exclude_input_in_output: is false with input_ids",),
        ),
        "stream a word": _json("sampling_parameters.stream: is 'maybe'", {"stream": "maybe"}),
        "return flag a number": _json("return_finish_reason: is 3", {"return_finish_reason": 3}),
        "encoder_replay exact": _json("encoder_replay: is 'exact'", {"encoder_replay": "exact"}, "bounded or off"),
        "decoder_replay unknown": _json("decoder_replay: is 'none'", {"decoder_replay": "none"}, "bounded, exact or off"),
        "salt too long": _json("cache_salt", {"cache_salt": "s" * 257}, "at most 256 characters"),
        "salt a number": _json("cache_salt: is 5", {"cache_salt": 5}),
        "wrong type": _with("max_tokens", max_tokens=_float(4), ours=False),
        "wrong shape": _with("max_tokens", max_tokens=np.array([1, 2], np.int32), ours=False),
        "wrong rank": _with("text_input", text_input=np.array([[b"a"]], dtype=object), ours=False),
        "unknown tensor": _with("max_new_tokens", max_new_tokens=_int(4), ours=False),
    }


def bad_inputs(limits: Limits) -> dict[str, BadInput]:
    """All of them by name, for a server with these limits."""
    return {**_prompts(limits), **_objects(), **_numbers(limits), **_others(limits)}


NAMES = tuple(bad_inputs(Limits(4096, 512, 511, MAX_PROMPT_BYTES, 0)))
