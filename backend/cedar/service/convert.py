# SPDX-License-Identifier: Apache-2.0
"""Between our types and the wire. A message says the same on both sides: floats are doubles, absent is absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import grpc
from pydantic import ValidationError

from cedar.engine.request import DecoderReplay, EncoderReplay, GenerationRequest, SamplingParams
from cedar.engine.updates import SequenceUpdate, TokenLogprobs
from cedar.errors import CedarError, ErrorCode, invalid
from cedar.v1 import engine_pb2 as pb

_STATUS_OF = {
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}
_CODE_OF = {status: code for code, status in _STATUS_OF.items()}
ERROR_MARK = "cedar-error"
"""Trailing metadata of a status that is a `CedarError` of the engine and not the transport's."""
_OPTIONAL_SAMPLING = ("max_tokens", "seed", "end_id", "logprobs", "prompt_logprobs")
_PLAIN_SAMPLING = (
    *("min_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def status_of(error: CedarError) -> grpc.StatusCode:
    """Its gRPC status; the details are ``error.message`` as it is."""
    return _STATUS_OF[error.code]


def is_ours(error: grpc.aio.AioRpcError) -> bool:
    """Whether the engine itself has sent this status (and not the transport, a timeout or a shutdown)."""
    return ERROR_MARK in cast("Mapping[str, str]", error.trailing_metadata() or {})


def rpc_error(error: grpc.aio.AioRpcError) -> CedarError:
    """What a failed call means: our own error when the engine sent one, else what became of the connection."""
    code, details = error.code(), error.details() or "no details"
    if is_ours(error) and code in _CODE_OF:
        return CedarError(_CODE_OF[code], details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CedarError(ErrorCode.DEADLINE_EXCEEDED, f"engine did not answer in time: {details}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return CedarError(ErrorCode.UNAVAILABLE, f"connection to the engine lost: {details}")
    return CedarError(ErrorCode.INTERNAL, f"engine call failed: {code.name}: {details}")


def parse_error(text: str) -> CedarError:
    """``str(CedarError)`` back to the error; text without one of our code words is INTERNAL."""
    word, _, message = text.partition(": ")
    if word in ErrorCode.__members__:
        return CedarError(ErrorCode(word), message)
    return CedarError(ErrorCode.INTERNAL, text)


def request_to_proto(request: GenerationRequest) -> pb.EncodeRequest:
    """INVALID_ARGUMENT names a field whose number does not fit the wire's type."""
    try:
        return pb.EncodeRequest(
            request_key=request.key,
            input_ids=request.input_ids,
            sampling=_sampling_to_proto(request.sampling),
            priority=request.priority,
            arrival_unix_ns=request.arrival_unix_ns,
            timeout_ms=request.timeout_ms,
            cache_salt=request.cache_salt,
            encoder_replay=request.encoder_replay or "",
            decoder_replay=request.decoder_replay or "",
        )
    except ValueError as error:
        raise invalid(_unfit_field(request), f"does not fit ({error})", "0 to 2^32 - 1 (2^64 - 1 for times)") from None


def _unfit_field(request: GenerationRequest) -> str:
    """Which number the wire refused: protobuf's own error names none."""
    for name, limit in (("arrival_unix_ns", 2**64), ("timeout_ms", 2**64)):
        if not 0 <= getattr(request, name) < limit:
            return name
    if any(not 0 <= token < 2**32 for token in request.input_ids):
        return "input_ids"
    if any(token >= 2**32 for token in request.sampling.stop_token_ids):
        return "stop_token_ids"
    names = ("max_tokens", "min_tokens", "top_k", "end_id")
    return next((name for name in names if (getattr(request.sampling, name) or 0) >= 2**32), "request")


def _sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(stop=sampling.stop, stop_token_ids=sampling.stop_token_ids)
    for name in _PLAIN_SAMPLING:
        setattr(message, name, getattr(sampling, name))
    for name in _OPTIONAL_SAMPLING:
        if (value := getattr(sampling, name)) is not None:
            setattr(message, name, value)
    return message


def request_from_proto(message: pb.EncodeRequest) -> GenerationRequest:
    """Validated like any request: INVALID_ARGUMENT names the first field that is out of range."""
    try:
        return GenerationRequest(
            key=message.request_key,
            input_ids=tuple(message.input_ids),
            sampling=_sampling_from_proto(message.sampling) if message.HasField("sampling") else SamplingParams(),
            priority=message.priority,
            arrival_unix_ns=message.arrival_unix_ns,
            timeout_ms=message.timeout_ms,
            cache_salt=message.cache_salt,
            encoder_replay=EncoderReplay(message.encoder_replay) if message.encoder_replay else None,
            decoder_replay=DecoderReplay(message.decoder_replay) if message.decoder_replay else None,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join("request_key" if part == "key" else str(part) for part in first["loc"]) or "sampling"
        raise invalid(field, f"is {first['input']!r:.80}", str(first["msg"])) from None
    except ValueError as error:  # an enumeration's value
        raise invalid("encoder_replay, decoder_replay", str(error), "bounded | off, bounded | exact | off") from None


def _sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    present = {field.name for field, _ in message.ListFields()}
    names = (*_PLAIN_SAMPLING, *present.intersection(_OPTIONAL_SAMPLING))
    values = {name: getattr(message, name) for name in names}
    return SamplingParams(stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids), **values)


def progress_to_proto(update: SequenceUpdate) -> pb.EncodeProgress:
    """The encoding side of an update."""
    return pb.EncodeProgress(
        handle=update.handle,
        ready=update.ready,
        num_input_tokens=update.num_input_tokens,
        cached_tokens=update.cached_tokens,
        replayed_tokens=update.replayed_tokens,
        encoded_tokens=update.encoded_tokens,
    )


def merge_tokens(message: pb.SequenceTokens, update: SequenceUpdate) -> None:
    """Add an update's tokens to a message that has not been sent yet, which so stands for several steps."""
    message.token_ids.extend(update.token_ids)
    message.logprobs.extend(_logprobs_to_proto(entry) for entry in update.logprobs)
    message.prompt_logprobs.extend(_logprobs_to_proto(entry) for entry in update.prompt_logprobs)
    message.num_output_tokens = update.num_output_tokens
    if update.finish_reason is not None:
        message.finish_reason = update.finish_reason.value
        if update.error is not None:
            message.error_code, message.error_message = update.error.code.value, update.error.message
    if (timing := update.timing) is not None:
        message.timing.arrival_ns = timing.arrival_ns
        message.timing.first_scheduled_ns = timing.first_scheduled_ns
        message.timing.first_token_ns = timing.first_token_ns
        message.timing.last_token_ns = timing.last_token_ns


def _logprobs_to_proto(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob or 0.0,
        top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
        absent=entry.logprob is None,
    )
