# SPDX-License-Identifier: Apache-2.0
"""What the internal tensor ``_request`` carries from step to step, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason, GenerationRequest, SamplingParams


class Reply(BaseModel):
    """How a request wants to be answered. ``echo``: text that stands before the output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: bool = True
    echo: str = ""
    logprobs: bool = False
    cumulative_logprob: bool = False
    perf_metrics: bool = False


class Envelope(BaseModel):
    """A validated request without its prompt, which travels as ``_input_ids``.

    ``ended``: the request needs no engine (a cancel request, or one that ended before it had a token); the later steps
    answer with this finish reason at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    arrival_unix_ns: int = 0
    timeout_ms: int = 0
    cache_salt: str = ""
    encoder_replay: EncoderReplay | None = None
    decoder_replay: DecoderReplay | None = None
    reply: Reply = Reply()
    ended: Annotated[FinishReason | Literal["not_found", ""], Field()] = ""

    def generation_request(self, input_ids: Sequence[int]) -> GenerationRequest:
        """What the engine is asked to do."""
        return GenerationRequest(
            key=self.key,
            input_ids=tuple(input_ids),
            sampling=self.sampling,
            priority=self.priority,
            arrival_unix_ns=self.arrival_unix_ns,
            timeout_ms=self.timeout_ms,
            cache_salt=self.cache_salt,
            encoder_replay=self.encoder_replay,
            decoder_replay=self.decoder_replay,
        )

    def ending(self, reason: FinishReason | Literal["not_found"]) -> Envelope:
        """The same request, ended without tokens."""
        return self.model_copy(update={"ended": reason})
