# SPDX-License-Identifier: Apache-2.0
"""One typed description of a request, parsed once at the door and trusted from there on.

Free of torch, gRPC and Triton: the Triton steps, the service and the engine all import it. The JSON form
(`GenerationRequest.model_dump_json`) is what the ensemble's internal tensor ``_request`` carries.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
DEFAULT_MAX_TOKENS = 1024


class FinishReason(StrEnum):
    """Why a request ended (contract: output tensor ``finish_reason``)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class EncoderReplay(StrEnum):
    """What happens on a prefix hit of H tokens: rerun the last W of them, or restore a window snapshot."""

    BOUNDED = "bounded"
    OFF = "off"


class DecoderReplay(StrEnum):
    """On which rows of a prompt layers >= cut run: the last W, the dependency halo, or all."""

    BOUNDED = "bounded"
    EXACT = "exact"
    OFF = "off"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SamplingParams(_Strict):
    """How tokens are chosen and when generation ends. Ranges are those of the public contract."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...],
        Field(max_length=MAX_STOP_STRINGS),
    ] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)] = ()
    end_id: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _min_not_above_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class GenerationRequest(_Strict):
    """Everything the engine needs to know about one request.

    input_ids: prompt token ids, at least one. deadline: ``timeout_ms`` from ``arrival_unix_ns``; 0 = none.
    priority: lower runs first. Replay modes: None = the engine's setting.
    """

    key: Annotated[str, Field(min_length=1, max_length=128)]
    input_ids: Annotated[tuple[int, ...], Field(min_length=1)]
    sampling: SamplingParams = SamplingParams()
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    arrival_unix_ns: int = 0
    timeout_ms: Annotated[int, Field(ge=0)] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    encoder_replay: EncoderReplay | None = None
    decoder_replay: DecoderReplay | None = None
