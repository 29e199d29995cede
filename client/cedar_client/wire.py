# SPDX-License-Identifier: Apache-2.0
"""The messages on the wire: one request out, its responses in. Shared by both clients; does no I/O.

A request is a ModelStreamInfer call of its own that sends one message and half-closes. The server ends the call with the
request, cancelling the call cancels the request, and one channel carries any number of them at a time.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike
from tritonclient.grpc import service_pb2 as pb

from cedar_client.errors import CedarError, InvalidArgument, ServerError, from_message
from cedar_client.types import Chat, Completion, Delta, Perf, TokenLogprob

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
CHANNEL_ARGS: Mapping[str, int | str] = {
    # a whole answer with log-probabilities outgrows gRPC's default of 4 MiB
    "grpc.max_receive_message_length": 2**31 - 1,
    "grpc.max_send_message_length": 2**31 - 1,
    # finds a dead peer whose connection stays open; servers punish pings more often than every 300 s
    "grpc.keepalive_time_ms": 310_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.http2.ping_timeout_ms": 20_000,
    "grpc.http2.max_pings_without_data": 0,
}
PROBED_MODEL = "decoder_generate"
"""The step whose readiness follows the engine's; the ensemble's own says only that it is loaded."""


def channel_options(given: Sequence[tuple[str, int | str]]) -> list[tuple[str, int | str]]:
    """Ours, and the caller's over them: gRPC itself lets the first of two win."""
    return list({**CHANNEL_ARGS, **dict(given)}.items())


def checked_url(url: str) -> str:
    """``url`` unless it is a web address, which gRPC would look up as a host name. Its own schemes (unix:, dns:) pass."""
    if url.lower().startswith(("http://", "https://", "grpc://", "grpcs://")):
        scheme = url.partition("//")[0]
        raise InvalidArgument(f"url: is {url!r}; allowed: host:port without {scheme}//, such as localhost:8001")
    return url


def new_key() -> str:
    return secrets.token_hex(16)


def generate_request(
    model: str,
    key: str,
    prompt: str | None,
    input_ids: ArrayLike | None,
    messages: Chat | Sequence[Mapping[str, Any]] | None,
    parameters: Mapping[str, object],
) -> pb.ModelInferRequest:
    """A generation. Exactly one of the prompts; all settings travel as one JSON text."""
    given = {"prompt": prompt, "input_ids": input_ids, "messages": messages}
    present = [name for name, value in given.items() if value is not None]
    if len(present) != 1:
        raise InvalidArgument(f"{' and '.join(present) or 'no prompt'} given; allowed: exactly one of {', '.join(given)}", key)
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidArgument(
            f"prompt: is a {type(prompt).__name__}; allowed: one text, one request per prompt (for many: "
            "ThreadPoolExecutor().map(client.complete, prompts), or asyncio.gather with AsyncClient)",
            key,
        )
    request = pb.ModelInferRequest(model_name=model, id=key)
    if prompt is not None:
        _add_text(request, "text_input", prompt, "prompt")
    elif input_ids is not None:
        _add_ids(request, input_ids, key)
    else:
        _add_text(request, "messages", json.dumps(messages, ensure_ascii=False))
    _add_text(request, "sampling_parameters", json.dumps({**parameters, "request_key": key}, ensure_ascii=False, default=_plain))
    return request


def chat_payload(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    thinking: bool | None,
    reasoning_effort: int | str | None,
    response_format: Mapping[str, Any] | None,
) -> Chat:
    """The object form of a chat, without what was left open."""
    payload: Chat = {"messages": messages}
    if tools is not None:
        payload["tools"] = tools
    if thinking is not None:
        payload["thinking"] = thinking
    if reasoning_effort is not None:
        payload["reasoning_effort"] = reasoning_effort
    if response_format is not None:
        payload["response_format"] = response_format
    return payload


def cancel_request(model: str, key: str) -> pb.ModelInferRequest:
    """Asks the server to cancel the request ``key``."""
    request = pb.ModelInferRequest(model_name=model)
    _add_text(request, "request_key", key)
    _add(request, "cancel", "BOOL", [1], b"\x01")
    return request


def read_response(response: pb.ModelStreamInferResponse, key: str) -> Delta | None:
    """The delta of a response; None for an empty one that only ends the stream. Raises what the server reports."""
    if response.error_message:
        raise from_message(response.error_message, key)
    try:
        values = _outputs(response.infer_response)
        return _delta(values) if values else None
    except (KeyError, ValueError, struct.error) as error:
        raise ServerError(f"request {key}: the response is not Cedar's ({error!r})", key) from error


def cancel_result(response: pb.ModelStreamInferResponse, key: str) -> bool:
    """True: the request was live and is cancelled. False: no such request."""
    if response.error_message:
        raise from_message(response.error_message, key)
    return _outputs(response.infer_response).get("finish_reason") == "cancelled"


def completion(key: str, deltas: Sequence[Delta]) -> Completion:
    """All deltas of a request put together; an error when it was closed before its end."""
    if not deltas or deltas[-1].finish_reason is None:
        raise CedarError(f"request {key}: the stream was closed before its end", key)
    return Completion.join(key, deltas)


def incomplete(key: str) -> CedarError:
    """The stream ended in good order but without a finish_reason."""
    return ServerError(f"request {key}: the server ended the stream without a finish_reason", key)


def _add(request: pb.ModelInferRequest, name: str, datatype: str, shape: list[int], raw: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)


def _add_text(request: pb.ModelInferRequest, name: str, text: str, own_name: str = "") -> None:
    """``own_name``: what callers know the tensor ``name`` as, if not by that."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{own_name or name}: holds half of a surrogate pair; allowed: well-formed Unicode") from error
    _add(request, name, "BYTES", [1], struct.pack("<I", len(data)) + data)


def _add_ids(request: pb.ModelInferRequest, input_ids: ArrayLike, key: str) -> None:
    ids = np.asarray(input_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (len(ids) and not (ids.min() >= -(2**31) and ids.max() < 2**31)):
        raise InvalidArgument("input_ids: not a flat list of 32-bit integers; allowed: token ids", key)
    _add(request, "input_ids", "INT32", [len(ids)], ids.astype("<i4").tobytes())


def _plain(value: Any) -> Any:
    """numpy scalars and arrays among the settings."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    """Output tensors by name: text, number, or list of numbers for ``output_ids``."""
    return {
        tensor.name: _DECODERS[tensor.datatype](raw)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        if tensor.datatype in _DECODERS
    }


_DECODERS: dict[str, Any] = {
    "BYTES": lambda raw: raw[4:].decode(),
    "INT32": lambda raw: tuple(np.frombuffer(raw, "<i4").tolist()),
    "UINT32": lambda raw: struct.unpack("<I", raw)[0],
    "UINT64": lambda raw: struct.unpack("<Q", raw)[0],
    "FP32": lambda raw: struct.unpack("<f", raw)[0],
}


def _delta(values: Mapping[str, Any]) -> Delta:
    logprobs = json.loads(values["logprobs"] or "{}")
    perf = json.loads(values["perf_metrics"] or "null")
    return Delta(
        text=values["text_output"],
        token_ids=values["output_ids"],
        finish_reason=values["finish_reason"] or None,
        num_input_tokens=values["num_input_tokens"],
        num_output_tokens=values["num_output_tokens"],
        cached_tokens=values["cached_tokens"],
        replayed_tokens=values["replayed_tokens"],
        seed=values["seed_used"],
        cumulative_logprob=values["cumulative_logprob"],
        logprobs=tuple(map(_logprob, logprobs["tokens"])) if "tokens" in logprobs else None,
        prompt_logprobs=tuple(_logprob(e) if e else None for e in logprobs["prompt"]) if "prompt" in logprobs else None,
        perf=perf and _perf(perf),
    )


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(map(_logprob, entry.get("top", ())))
    return TokenLogprob(entry["id"], entry["token"], entry["logprob"], top)


def _perf(entry: Mapping[str, Any]) -> Perf:
    moments = {f"{name}_ns": int(entry[name]) for name in ("arrival", "first_scheduled", "first_token", "last_token")}
    spans = {f"{name}_s": float(entry[name]) for name in ("queue", "prefill", "decode")}
    return Perf(**cast(Any, moments | spans))
