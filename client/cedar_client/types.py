# SPDX-License-Identifier: Apache-2.0
"""What goes in and what comes out, typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class Parameters(TypedDict, total=False):
    """Settings of a request; each is explained in Cedar's README. What is left out has the server's default."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    end_id: int
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    return_cumulative_logprob: bool
    return_perf_metrics: bool
    priority: int
    timeout_ms: int
    request_key: str
    cache_salt: str
    encoder_replay: Literal["bounded", "off"]
    decoder_replay: Literal["bounded", "exact", "off"]


class Chat(TypedDict, total=False):
    """The object form of ``messages``."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    thinking: bool
    reasoning_effort: int | str
    response_format: Mapping[str, Any]
    drop_thinking: bool


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-softmax of the raw logits, before temperature and penalties. ``top``: the likeliest alternatives."""

    id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Perf:
    """The server's clock on one request: unix time in ns, durations in s."""

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Delta:
    """One response of a stream: what is new since the last.

    ``text`` holds whole characters only. ``finish_reason`` is None until the last delta. ``num_output_tokens`` is
    ``len(token_ids)``; tokens may come without text yet. ``logprobs``: one entry per token id, None if not asked for;
    ``prompt_logprobs``: in the first delta, if asked for (the first prompt token has None).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_input_tokens: int
    num_output_tokens: int
    cached_tokens: int
    replayed_tokens: int
    seed: int
    cumulative_logprob: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    perf: Perf | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole result: the deltas of one request put together."""

    key: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_input_tokens: int
    num_output_tokens: int
    cached_tokens: int
    replayed_tokens: int
    seed: int
    cumulative_logprob: float
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    perf: Perf | None

    @classmethod
    def join(cls, key: str, deltas: Sequence[Delta]) -> Completion:
        """``deltas``: all of a request, the last one with a finish_reason."""
        last = deltas[-1]
        assert last.finish_reason is not None
        logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        return cls(
            key=key,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(i for delta in deltas for i in delta.token_ids),
            finish_reason=last.finish_reason,
            num_input_tokens=last.num_input_tokens,
            num_output_tokens=sum(delta.num_output_tokens for delta in deltas),
            cached_tokens=last.cached_tokens,
            replayed_tokens=last.replayed_tokens,
            seed=last.seed,
            cumulative_logprob=last.cumulative_logprob,
            logprobs=tuple(entry for part in logprobs for entry in part) if logprobs else None,
            prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
            perf=last.perf,
        )
