# SPDX-License-Identifier: Apache-2.0
"""A Triton request, parsed once: tensors and request parameters in, a validated request or an error out.

Pure Python and numpy: no server, no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from cedar.engine.request import SamplingParams
from cedar.errors import CedarError, invalid
from cedar.triton.envelope import Envelope, Reply
from cedar.triton.tensors import INPUTS, MAX_KEY_LENGTH, MAX_SAMPLING_PARAMETERS_BYTES, json_keys
from cedar.triton.values import CONVERT, as_text, check_tensor, json_object, scalar, shown

Tensors = Mapping[str, NDArray[Any]]
_INPUTS = {tensor.name: tensor for tensor in INPUTS}
_KEYS = json_keys()
_PROMPTS = ("text_input", "input_ids", "messages")
_SAMPLING = frozenset(SamplingParams.model_fields)
_TRITON_PARAMETERS = frozenset({"sequence_id", "sequence_start", "sequence_end", "headers", "binary_data_output"})
"""Request parameters that belong to the server's protocol; so does everything that starts with ``triton_``."""


class PromptEncoder(Protocol):
    """Prompts to token ids; both methods raise `cedar.errors.CedarError` on what they refuse."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of ``text_input``."""

    def encode_messages(self, messages: str) -> list[int]:
        """Ids of ``messages`` (JSON)."""


@dataclass(frozen=True)
class Limits:
    """What the served model and the configuration allow. ``image_token_id``: -1 if the vocabulary has none."""

    max_model_len: int
    vocab_size: int
    image_token_id: int
    max_prompt_bytes: int
    default_timeout_ms: int
    longest_token: int = 1 << 20

    def bytes_of(self, name: str) -> tuple[int, str]:
        """The most bytes that an input may have and why: more cannot fit the context, and need not be tokenised to know."""
        text = self.max_model_len * self.longest_token
        # JSON writes a byte as up to six, and has its own structure around the text
        context = text if name == "text_input" else 6 * text + (1 << 16)
        if context < self.max_prompt_bytes:
            return context, f"a context of {self.max_model_len} tokens"
        return self.max_prompt_bytes, "max_prompt_bytes"


@dataclass(frozen=True)
class Cancel:
    """A request to cancel the request ``key``."""

    key: str


@dataclass(frozen=True)
class Admission:
    """A valid request: its prompt and everything else."""

    input_ids: NDArray[np.int32]
    envelope: Envelope


def parse_request(
    tensors: Tensors, parameters: str, timeout_us: int, prompts: PromptEncoder, limits: Limits, arrival_unix_ns: int
) -> Admission | Cancel:
    """Parse one request of the ensemble.

    tensors: the inputs that were given. parameters: Triton's request parameters, a JSON object or empty.
    timeout_us: Triton's own request timeout, 0 if none; ``timeout_ms`` wins over it.
    Raises `cedar.errors.CedarError` (INVALID_ARGUMENT) naming the field, the problem and what is allowed.
    """
    values = _Values.collect(tensors, parameters)
    given = [name for name in _PROMPTS if name in tensors]
    if "cancel" in tensors and scalar(_INPUTS["cancel"], tensors["cancel"]):
        return _cancel(values, given)
    if len(given) != 1:
        problem = f"{' and '.join(given)} are given" if given else "none is given"
        raise invalid("text_input, input_ids, messages", problem, "exactly one of the three")
    ids, text = _prompt(given[0], tensors[given[0]], prompts, limits)
    sampling = _sampling(values, limits, len(ids))
    reply = _reply(values, given[0], text)
    envelope = Envelope(
        key=_key(values) or secrets.token_hex(16),
        sampling=_with_logprobs(sampling, reply),
        arrival_unix_ns=arrival_unix_ns,
        reply=reply,
        **_scheduling(values, limits, timeout_us),
    )
    return Admission(ids, envelope)


class _Values:
    """The settings of a request, merged: scalar tensor > ``sampling_parameters`` > request parameters."""

    def __init__(self) -> None:
        self._raw: dict[str, tuple[str, object]] = {}

    @classmethod
    def collect(cls, tensors: Tensors, parameters: str) -> _Values:
        """Check every name and shape, convert nothing yet."""
        values = cls()
        values._merge_parameters(parameters)
        if "sampling_parameters" in tensors:
            values._merge_sampling(tensors["sampling_parameters"])
        for name, array in tensors.items():
            if name not in _INPUTS:
                raise invalid(name, "no such input", ", ".join(_INPUTS))
            if _INPUTS[name].key:
                values._raw[name] = (name, scalar(_INPUTS[name], array))
        if "min_tokens" in tensors:
            values._raw.pop("min_length", None)
        if "stop_words" in tensors:
            tensor = _INPUTS["stop_words"]
            check_tensor(tensor, tensors["stop_words"])
            words = [as_text(f"stop_words[{i}]", word, tensor.allowed) for i, word in enumerate(tensors["stop_words"])]
            values._raw["stop"] = ("stop_words", words)
        return values

    def _merge_parameters(self, parameters: str) -> None:
        # Triton hands its own parameters on with the user's
        found = json_object("request parameters", parameters or "{}", "an object of texts, numbers and booleans")
        ours = {k: v for k, v in found.items() if k not in _TRITON_PARAMETERS and not k.startswith("triton_")}
        self._merge("request parameters", ours)

    def _merge_sampling(self, array: NDArray[Any]) -> None:
        tensor = _INPUTS["sampling_parameters"]
        raw = scalar(tensor, array)
        if isinstance(raw, bytes) and len(raw) > MAX_SAMPLING_PARAMETERS_BYTES:
            raise invalid(tensor.name, f"has {len(raw)} bytes", tensor.allowed)
        text = as_text(tensor.name, raw, tensor.allowed)
        self._merge(tensor.name, json_object(tensor.name, text, tensor.allowed))

    def _merge(self, source: str, found: Mapping[str, object]) -> None:
        unknown = [name for name in found if name not in _KEYS]
        if unknown:
            raise invalid(f"{source}.{shown(unknown[0])[1:-1]}", "no such key", ", ".join(sorted(_KEYS)))
        # null means: as if it were not there
        given = {name: value for name, value in found.items() if value is not None}
        if "min_tokens" in given and "min_length" in given:
            raise invalid(f"{source}.min_length", "is given with min_tokens", "one of the two")
        for name, other in (("min_tokens", "min_length"), ("min_length", "min_tokens")):
            if name in given:
                self._raw.pop(other, None)
        self._raw |= {name: (f"{source}.{name}", value) for name, value in given.items()}

    def get(self, name: str, default: Any = None) -> Any:
        """The converted value, or ``default``."""
        if name not in self._raw:
            return default
        field, value = self._raw[name]
        key = _KEYS[name]
        return CONVERT[key.kind](field, value, key.allowed)

    def field(self, name: str) -> str:
        """Where the value came from, for an error message."""
        return self._raw[name][0] if name in self._raw else name


def _cancel(values: _Values, prompts: list[str]) -> Cancel:
    allowed = _INPUTS["cancel"].allowed
    if prompts:
        raise invalid("cancel", f"is given with {prompts[0]}", allowed)
    key = _key(values)
    if key is None:
        raise invalid("cancel", "is given without request_key", allowed)
    return Cancel(key)


def _key(values: _Values) -> str | None:
    key: str | None = values.get("request_key")
    if key is not None and not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise invalid(values.field("request_key"), f"has {len(key)} characters", _KEYS["request_key"].allowed)
    if key is not None and not key.isprintable():
        raise invalid(values.field("request_key"), f"is {key!r}", "printable characters; it stands in logs")
    return key


def _prompt(name: str, array: NDArray[Any], prompts: PromptEncoder, limits: Limits) -> tuple[NDArray[np.int32], str]:
    """Token ids, and the text that ``exclude_input_in_output = false`` puts before the output."""
    tensor = _INPUTS[name]
    text = ""
    if name == "input_ids":
        check_tensor(tensor, array)
        ids = array
    else:
        raw = scalar(tensor, array)
        size = len(raw) if isinstance(raw, (bytes, str)) else 0
        if not size:
            raise invalid(name, "is empty", tensor.allowed)
        most, why = limits.bytes_of(name)
        if size > most:
            raise invalid(name, f"has {size} bytes", f"at most {most} bytes ({why})")
        text = as_text(name, raw, tensor.allowed)
        encode = prompts.encode_text if name == "text_input" else prompts.encode_messages
        ids = np.asarray(encode(text), dtype=np.int32)
    _check_ids(name, ids, limits)
    return ids, text


def _check_ids(name: str, ids: NDArray[np.int32], limits: Limits) -> None:
    if not len(ids):
        raise invalid(name, "is empty", _INPUTS[name].allowed)
    if len(ids) >= limits.max_model_len:
        raise invalid(name, f"has {len(ids)} tokens", f"at most {limits.max_model_len - 1} (max_model_len less one output token)")
    outside = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if len(outside):
        at = int(outside[0])
        raise invalid(f"{name}[{at}]", f"is {int(ids[at])}", f"0 to {limits.vocab_size - 1}")
    images = np.flatnonzero(ids == limits.image_token_id)
    if len(images):
        raise invalid(f"{name}[{int(images[0])}]", "is the image token", "text tokens; this server has no vision tower")


def _sampling(values: _Values, limits: Limits, prompt_tokens: int) -> SamplingParams:
    if values.get("n", 1) != 1:
        raise invalid(values.field("n"), f"is {values.get('n')}", "1")
    found = {name: values.get(name) for name in _SAMPLING if name in _KEYS}
    found = {name: value for name, value in found.items() if value is not None}
    if "min_tokens" not in found and (least := values.get("min_length")) is not None:
        found["min_tokens"] = least
    found.setdefault("seed", secrets.randbits(64))
    try:
        sampling = SamplingParams(**found)
    except ValidationError as error:
        raise _translate(error, values, found) from None
    room = limits.max_model_len - prompt_tokens
    for name, tokens in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
        if tokens is not None and tokens > room:
            problem = f"is {tokens} with {prompt_tokens} prompt tokens"
            raise invalid(values.field(name), problem, f"at most {room} here (max_model_len {limits.max_model_len})")
    for name, ids in (("end_id", (sampling.end_id,)), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if token is not None and token >= limits.vocab_size:
                raise invalid(values.field(name), f"holds {token}", f"token ids from 0 to {limits.vocab_size - 1}")
    return sampling


def _translate(error: ValidationError, values: _Values, found: Mapping[str, object]) -> CedarError:
    """The first of pydantic's complaints in our wording."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # the one rule between two fields
        name = "min_length" if values.field("min_length") != "min_length" else "min_tokens"
        return invalid(values.field(name), f"is {found['min_tokens']} with max_tokens {found['max_tokens']}", _KEYS[name].allowed)
    name = str(first["loc"][0])
    if name == "min_tokens" and values.field("min_length") != "min_length":
        name = "min_length"
    place = values.field(name) + "".join(f"[{at}]" for at in first["loc"][1:])
    return invalid(place, f"is {shown(first['input'])}", _KEYS[name].allowed)


def _scheduling(values: _Values, limits: Limits, timeout_us: int) -> dict[str, Any]:
    """priority, timeout_ms, cache_salt and the replay modes, in range."""
    priority = values.get("priority", 0)
    timeout = values.get("timeout_ms", -(-timeout_us // 1000) or limits.default_timeout_ms)
    salt = values.get("cache_salt", "")
    for name, value, ok in (
        ("priority", priority, -(2**31) <= priority < 2**31),
        ("timeout_ms", timeout, 0 <= timeout < 2**31),
        ("cache_salt", salt, len(salt) <= 256),
        ("encoder_replay", values.get("encoder_replay"), values.get("encoder_replay") in (None, "bounded", "off")),
        ("decoder_replay", values.get("decoder_replay"), values.get("decoder_replay") in (None, "bounded", "exact", "off")),
    ):
        if not ok:
            raise invalid(values.field(name), f"is {shown(value)}", _KEYS[name].allowed)
    return {
        "priority": priority,
        "timeout_ms": timeout,
        "cache_salt": salt,
        "encoder_replay": values.get("encoder_replay"),
        "decoder_replay": values.get("decoder_replay"),
    }


def _reply(values: _Values, prompt: str, text: str) -> Reply:
    stream = values.get("stream", True)
    exclude = values.get("exclude_input_in_output", stream or prompt != "text_input")
    if not exclude and (stream or prompt != "text_input"):
        problem = "is false with stream = true" if stream else f"is false with {prompt}"
        raise invalid(values.field("exclude_input_in_output"), problem, "false only with text_input and stream = false")
    for name in ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"):
        values.get(name)  # always filled, but a wrong value is still an error
    asked = values.get("logprobs") is not None or values.get("prompt_logprobs") is not None
    return Reply(
        stream=stream,
        echo="" if exclude else text,
        logprobs=values.get("return_logprobs", asked),
        cumulative_logprob=values.get("return_cumulative_logprob", False),
        perf_metrics=values.get("return_perf_metrics", False),
    )


def _with_logprobs(sampling: SamplingParams, reply: Reply) -> SamplingParams:
    """Ask the engine for the chosen tokens' logprobs when only the outputs were asked for."""
    if sampling.logprobs is None and (reply.logprobs or reply.cumulative_logprob):
        return sampling.model_copy(update={"logprobs": 0})
    return sampling
