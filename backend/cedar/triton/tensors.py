# SPDX-License-Identifier: Apache-2.0
"""The one table of every tensor of the five models.

The config.pbtxt files, the README's tables, the client's and the parser's view and the schema test are all made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

SCALAR: Final = (1,)
VECTOR: Final = (-1,)
NUMPY: Final = {
    "BOOL": np.dtype(np.bool_),
    "INT32": np.dtype(np.int32),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "FP32": np.dtype(np.float32),
    "BYTES": np.dtype(np.object_),
}
"""KServe datatype -> the numpy type that Triton's Python backend gives and takes."""

MAX_SAMPLING_PARAMETERS_BYTES: Final = 1 << 16
MAX_KEY_LENGTH: Final = 128


@dataclass(frozen=True)
class Tensor:
    """One tensor: ``dims`` as in config.pbtxt (-1: any length).

    ``allowed``: the range that error messages state. ``key``: its name is also a key of ``sampling_parameters`` and a
    request parameter.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    doc: str
    allowed: str = ""
    key: bool = False

    @property
    def type_and_dims(self) -> str:
        """E.g. ``INT32 [-1]``: the README's column."""
        return f"{self.dtype} [{', '.join(map(str, self.dims))}]"


def _scalar(name: str, dtype: str, allowed: str, doc: str) -> Tensor:
    return Tensor(name, dtype, SCALAR, doc, allowed, key=True)


def _flag(name: str, doc: str) -> Tensor:
    return _scalar(name, "BOOL", "true or false", doc)


INPUTS: Final[tuple[Tensor, ...]] = (
    Tensor("text_input", "BYTES", SCALAR, "prompt text, tokenised as it is (BOS added)", "one UTF-8 text that is not empty"),
    Tensor("input_ids", "INT32", VECTOR, "prompt tokens", "one or more token ids of the vocabulary"),
    Tensor(
        "messages",
        "BYTES",
        SCALAR,
        "chat as JSON: a list of {role, content, tool_calls…}, or an object {messages, tools, thinking, reasoning_effort, "
        "response_format}",
        "one JSON list or object that is not empty",
    ),
    _flag("stream", "default true; false: one response with the whole text (HTTP `generate` needs it)"),
    Tensor(
        "sampling_parameters",
        "BYTES",
        SCALAR,
        "JSON object, keys below; numeric strings are coerced",
        f"one JSON object of at most {MAX_SAMPLING_PARAMETERS_BYTES} bytes",
    ),
    _scalar("max_tokens", "INT32", "a whole number, 1 or more", "default: 1024, or what context and KV budget leave if less"),
    _scalar("min_tokens", "INT32", "a whole number, 0 or more and at most max_tokens", "no end of text before; default 0"),
    _scalar("top_k", "INT32", "a whole number, 0 (off) or more", "default 0: off"),
    _scalar("end_id", "INT32", "a token id of the vocabulary", "the token that ends the text; default: the tokenizer's"),
    _scalar("temperature", "FP32", "a number from 0 to 100", "default 1; 0: greedy"),
    _scalar("top_p", "FP32", "a number above 0 and at most 1", "default 1"),
    _scalar("min_p", "FP32", "a number from 0 to 1", "default 0"),
    _scalar("presence_penalty", "FP32", "a number from -2 to 2", "default 0"),
    _scalar("frequency_penalty", "FP32", "a number from -2 to 2", "default 0"),
    _scalar("repetition_penalty", "FP32", "a number above 0 and at most 100", "default 1"),
    _scalar("seed", "UINT64", "a whole number from 0 to 2^64 - 1", "absent: random, and reported back"),
    Tensor(
        "stop_words",
        "BYTES",
        VECTOR,
        "never emitted; partial matches are held back",
        "at most 16 UTF-8 texts of 1 to 256 characters",
    ),
    _flag("ignore_eos", "go on after the end of text; default false"),
    _scalar("priority", "INT32", "a whole number from -2^31 to 2^31 - 1", "lower runs first; default 0"),
    _scalar("timeout_ms", "INT32", "a whole number, 0 (none) or more", "deadline from arrival, queueing included"),
    _flag(
        "exclude_input_in_output",
        "default: true when streaming or with input_ids or messages, else false: the prompt text stands before the output; "
        "false with stream = true is an error",
    ),
    _flag("return_finish_reason", "accepted; finish_reason is always filled"),
    _flag("return_logprobs", "fill `logprobs`; default: true when logprobs or prompt_logprobs are asked for"),
    _flag("return_cumulative_logprob", "fill `cumulative_logprob`"),
    _flag("return_num_input_tokens", "accepted; num_input_tokens is always filled"),
    _flag("return_num_output_tokens", "accepted; num_output_tokens is always filled"),
    _flag("return_perf_metrics", "fill `perf_metrics` in the last response"),
    _scalar(
        "prompt_logprobs",
        "INT32",
        "a whole number from 0 to 20",
        "alternatives per prompt token; needs exact prefill: no prefix hit and no decoder-side replay for this request",
    ),
    _scalar(
        "request_key",
        "BYTES",
        f"a UTF-8 text of 1 to {MAX_KEY_LENGTH} characters",
        "caller's key; one that is live is refused; reusable after its end; default: 128 random bits",
    ),
    Tensor(
        "cancel",
        "BOOL",
        SCALAR,
        "with `request_key`: cancels that request, bypassing queue limits; one final response, finish_reason `cancelled` (was "
        "live) or `not_found`",
        "true or false, with request_key and without a prompt",
    ),
)

OUTPUTS: Final[tuple[Tensor, ...]] = (
    Tensor("text_output", "BYTES", SCALAR, "new text since the last response"),
    Tensor("output_ids", "INT32", VECTOR, "new token ids"),
    Tensor("finish_reason", "BYTES", SCALAR, "empty until the last: stop length cancelled deadline error not_found"),
    Tensor(
        "logprobs",
        "BYTES",
        SCALAR,
        '`{"tokens": [{"id", "token", "logprob", "top": [{"id", "token", "logprob"}]}], "prompt": [null, {…}]}`: natural '
        "log-softmax of the raw logits, before temperature and penalties; one entry per id in `output_ids`; `prompt` only in "
        "the first response",
    ),
    Tensor("cumulative_logprob", "FP32", SCALAR, "sum of the tokens' logprobs so far"),
    Tensor("num_input_tokens", "UINT32", SCALAR, "prompt tokens"),
    Tensor("cached_tokens", "UINT32", SCALAR, "prompt tokens found in the prefix cache"),
    Tensor("replayed_tokens", "UINT32", SCALAR, "cached tokens that were run again to restore the window"),
    Tensor("num_output_tokens", "UINT32", SCALAR, "tokens of this response; their sum is the total"),
    Tensor("seed_used", "UINT64", SCALAR, "the seed of the sampling"),
    Tensor(
        "perf_metrics",
        "BYTES",
        SCALAR,
        "JSON: arrival, first_scheduled, first_token, last_token in ns of unix time; queue, prefill, decode in s",
    ),
)


@dataclass(frozen=True)
class JsonKey:
    """A key of ``sampling_parameters`` (and a request parameter) that has no tensor."""

    name: str
    kind: str
    allowed: str
    doc: str


EXTRA_KEYS: Final[tuple[JsonKey, ...]] = (
    JsonKey("stop", "TEXTS", "a text or a list of at most 16 texts of 1 to 256 characters", "as `stop_words`"),
    JsonKey("stop_token_ids", "IDS", "a list of at most 64 token ids of the vocabulary", "tokens that end the text"),
    JsonKey("logprobs", "INT32", "a whole number from 0 to 20", "alternatives per output token"),
    JsonKey("n", "INT32", "1", "number of completions: 1 only"),
    JsonKey("min_length", "INT32", "a whole number, 0 or more and at most max_tokens; not with min_tokens", "= min_tokens"),
    JsonKey("cache_salt", "BYTES", "a text of at most 256 characters", "requests share prefixes only with equal salts"),
    JsonKey("encoder_replay", "BYTES", "bounded or off", "encoder-side replay of this request"),
    JsonKey("decoder_replay", "BYTES", "bounded, exact or off", "decoder-side replay of this request"),
)

HANDLE: Final = Tensor("_sequence_handle", "BYTES", SCALAR, "names the sequence in the engine; empty: not admitted yet, or never")
REQUEST: Final = Tensor("_request", "BYTES", SCALAR, "the validated request as JSON (cedar.triton.envelope)")
COUNTS: Final = (
    Tensor("_num_input_tokens", "UINT32", SCALAR, "prompt tokens"),
    Tensor("_cached_tokens", "UINT32", SCALAR, "prompt tokens found in the prefix cache"),
    Tensor("_replayed_tokens", "UINT32", SCALAR, "cached tokens that were run again"),
)


@dataclass(frozen=True)
class Step:
    """One Python model of the ensemble. ``reads``: the step whose outputs are its inputs ("": the public inputs).

    ``instances`` above 1 only where order does not matter.
    """

    name: str
    doc: str
    reads: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool = True
    instances: int = 1
    optional_inputs: bool = field(default=False)


_TOKENIZED: Final = (Tensor("_input_ids", "INT32", VECTOR, "prompt tokens; empty for a cancel request"), REQUEST)
_ENCODED: Final = (
    HANDLE,
    REQUEST,
    Tensor("_ready", "BOOL", SCALAR, "false: a progress tick; true: the prompt is encoded"),
    *COUNTS,
)
_GENERATED: Final = (
    *OUTPUTS,
    HANDLE,
    Tensor("_keep_alive", "BOOL", SCALAR, "true: no data, only a sign of life that lets a cancel be seen"),
    Tensor("_stream", "BOOL", SCALAR, "false: only the last response goes out"),
)

ENSEMBLE: Final = "cedar"
STEPS: Final[tuple[Step, ...]] = (
    Step("tokenize", "validates a request and makes token ids of it", "", INPUTS, _TOKENIZED, False, 2, True),
    Step("encoder_prefill", "has the engine encode the prompt", "tokenize", _TOKENIZED, _ENCODED),
    Step("decoder_generate", "has the engine generate; detokenises", "encoder_prefill", _ENCODED, _GENERATED),
    Step("deliver", "passes responses on in order and sees that a client is gone", "decoder_generate", _GENERATED, OUTPUTS),
)
INSTANCES: Final = {step.name: step.instances for step in STEPS}
MODELS: Final = (ENSEMBLE, *(step.name for step in STEPS))


def json_keys() -> dict[str, JsonKey]:
    """Every key of ``sampling_parameters``, by name: the scalar tensors and `EXTRA_KEYS`."""
    scalars = [JsonKey(t.name, t.dtype, t.allowed, t.doc) for t in INPUTS if t.key]
    return {key.name: key for key in (*scalars, *EXTRA_KEYS)}
