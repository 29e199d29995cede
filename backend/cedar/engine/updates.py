# SPDX-License-Identifier: Apache-2.0
"""What the engine tells about its sequences after a step. The service turns these into the messages of `engine.proto`."""

from __future__ import annotations

from dataclasses import dataclass, field

from cedar.engine.request import FinishReason
from cedar.errors import CedarError


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-softmax of the raw logits of all existing ids (before temperature, penalties and masks) for one token.

    ``logprob`` is None for the first prompt token, which nothing predicts. ``top``: (id, logprob), best first, as many
    as were asked for; equal values in the order of the ids.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened, unix nanoseconds; 0: it did not happen."""

    arrival_ns: int
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    @property
    def queue_s(self) -> float:
        """Arrival to the first chunk of the prompt, seconds."""
        return _seconds(self.arrival_ns, self.first_scheduled_ns)

    @property
    def prefill_s(self) -> float:
        """First chunk of the prompt to the first token, seconds."""
        return _seconds(self.first_scheduled_ns, self.first_token_ns)

    @property
    def decode_s(self) -> float:
        """First to last token, seconds."""
        return _seconds(self.first_token_ns, self.last_token_ns)


def _seconds(start_ns: int, end_ns: int) -> float:
    return max(0, end_ns - start_ns) / 1e9 if start_ns and end_ns else 0.0


@dataclass(slots=True)
class SequenceUpdate:
    """All that one step changed of one sequence; a sequence that did not change has none.

    ``encoded_tokens`` is meant for a prompt's first encoding only (0 afterwards): a preempted sequence is encoded again
    unseen. ``ready`` is true once, in the step that finished that encoding. ``prompt_logprobs`` come once, with the first
    token. The update with a ``finish_reason`` is the last of its handle; there is exactly one.
    """

    handle: str
    num_input_tokens: int
    cached_tokens: int = 0
    replayed_tokens: int = 0
    encoded_tokens: int = 0
    ready: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_output_tokens: int = 0
    """Total so far."""
    finish_reason: FinishReason | None = None
    error: CedarError | None = None
    """With finish reason ``error`` and ``deadline``."""
    timing: Timing | None = None
    """In the last update."""
