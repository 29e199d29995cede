# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine: its tokens, its memory, and the states it goes through.

    WAITING ──> ENCODING ──> ENCODED ──> DECODING ──> FINISHED
                  ^  │          │           │
                  │  v          v           v
                  PREEMPTED (its memory was taken; encoded again, prompt and output together)

Every state may also go straight to FINISHED (cancel, deadline, lease, error).
"""

from __future__ import annotations

from enum import Enum, auto

from cedar.cache.prefix import TokenChain
from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason, GenerationRequest
from cedar.engine.updates import Timing, TokenLogprobs
from cedar.engine.work import Prompt, SequenceMemory


class SequenceState(Enum):
    """Who holds memory: ENCODING, ENCODED and DECODING do, the others do not."""

    WAITING = auto()
    ENCODING = auto()
    ENCODED = auto()
    DECODING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


_NEXT: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.ENCODING, SequenceState.FINISHED}),
    SequenceState.ENCODING: frozenset({SequenceState.ENCODED, SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.ENCODED: frozenset({SequenceState.DECODING, SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.DECODING: frozenset({SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.ENCODING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class Sequence:
    """The mutable side of a request. Times are nanoseconds of the engine's monotonic clock; None: not yet.

    The engine and its scheduler alone call the transitions; each asserts that it is allowed.
    """

    def __init__(
        self,
        handle: str,
        serial: int,
        request: GenerationRequest,
        *,
        max_tokens: int,
        encoder_replay: EncoderReplay,
        decoder_replay: DecoderReplay,
        page_tokens: int,
        end_ids: frozenset[int],
        arrival_ns: int,
        deadline_ns: int | None,
    ) -> None:
        self.handle = handle
        self.request = request
        self.max_tokens = max_tokens
        self.encoder_replay = encoder_replay
        self.decoder_replay = decoder_replay
        self.end_ids = end_ids
        self.deadline_ns = deadline_ns
        self.rank = (request.priority, serial)
        """Lower runs first and is preempted last. The serial number makes it a total order, in order of admission."""

        self.state = SequenceState.WAITING
        self.memory: SequenceMemory | None = None
        self.ids = list(request.input_ids)
        """Prompt, then output."""
        self.num_prompt_tokens = len(self.ids)
        self.chain = TokenChain(self.ids, request.cache_salt, page_tokens)
        """Names of the pages that the tokens fill."""
        self.num_cached_tokens = 0
        """Of the prompt, what the first encoding found; ``num_replayed_tokens``: of these, what it ran again."""
        self.num_replayed_tokens = 0
        self.encode_start = 0
        """Where the current encoding began: what a prefix hit left to do."""
        self.leader: tuple[Sequence, int] | None = None
        """Whom an `untouched` sequence yields to, and how many first tokens they have in common."""
        self.hit_counted = False
        """The metrics know of the current encoding's hit."""
        self.attached = False
        self.announced = False
        """The caller was told that the prompt is encoded."""
        self.needs_tail = False
        """Encoded, but the first decoder pass has not run."""
        self.lease_ns: int | None = None
        self.encoded_ns: int | None = None
        self.last_decode_step = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None

        self.arrival_ns = arrival_ns
        self.first_scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None

    # sizes

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated so far, an end token included."""
        return len(self.ids) - self.num_prompt_tokens

    @property
    def max_positions(self) -> int:
        """Positions that ever need memory: the last token is never computed."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_encoded(self) -> int:
        """Positions whose encoder work is done."""
        return self.memory.num_computed if self.memory is not None else 0

    @property
    def num_to_encode(self) -> int:
        """Positions that an ENCODING sequence still has to encode."""
        return self.num_tokens - self.num_encoded

    @property
    def prompt(self) -> Prompt:
        """What memory has to be opened for."""
        return Prompt(self.chain, self.encoder_replay, self.decoder_replay, reuse=not self.wants_prompt_logits)

    @property
    def wants_prompt_logits(self) -> bool:
        """Prompt log-probabilities were asked for and have not been sent."""
        return self.request.sampling.prompt_logprobs is not None and self.first_token_ns is None

    @property
    def untouched(self) -> bool:
        """Opened, and nothing was encoded since."""
        return self.state is SequenceState.ENCODING and self.num_encoded == self.encode_start

    @property
    def has_memory(self) -> bool:
        """True from `start` to `preempt` or `finish`."""
        return self.memory is not None

    # transitions

    def start(self, memory: SequenceMemory) -> None:
        """Memory was found: WAITING or PREEMPTED -> ENCODING."""
        self._to(SequenceState.ENCODING)
        self.reopened(memory)

    def release(self) -> SequenceMemory:
        """An `untouched` sequence is about to be opened again, as more of it can be found now. Returns its memory."""
        assert self.untouched
        return self._take_memory()

    def reopened(self, memory: SequenceMemory) -> None:
        """This is where the encoding begins."""
        self.memory = memory
        self.leader = None
        self.encode_start = memory.num_computed
        self.hit_counted = False
        if not self.announced:
            self.num_cached_tokens, self.num_replayed_tokens = memory.num_cached, memory.num_replayed

    def encoded(self, now_ns: int, lease_ns: int) -> None:
        """All tokens are encoded: ENCODING -> ENCODED, and on to DECODING if somebody is attached.

        Whoever is to attach has ``lease_ns`` to do so from the first time on; an encoding after a preemption does not
        extend that.
        """
        assert self.num_to_encode == 0, f"{self.handle}: {self.num_to_encode} tokens are not encoded"
        self._to(SequenceState.ENCODED)
        self.needs_tail = True
        self.encoded_ns = now_ns
        if self.attached:
            self._to(SequenceState.DECODING)
        elif self.lease_ns is None:
            self.lease_ns = now_ns + lease_ns

    def attach(self) -> None:
        """Somebody listens from now on: no lease any more; ENCODED -> DECODING, at once or as soon as it is encoded."""
        self.attached = True
        self.lease_ns = None
        if self.state is SequenceState.ENCODED:
            self._to(SequenceState.DECODING)

    def append(self, token_id: int, now_ns: int) -> None:
        """A token was generated."""
        assert self.state is SequenceState.DECODING, f"{self.handle}: token in state {self.state.name}"
        self.needs_tail = False
        self.ids.append(token_id)
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns

    def preempt(self) -> SequenceMemory:
        """The memory is needed elsewhere: -> PREEMPTED. Returns it. Tokens, sampling state and attachment stay."""
        self._to(SequenceState.PREEMPTED)
        self.needs_tail = False
        if self.first_token_ns is None:
            self.prompt_logprobs.clear()
        return self._take_memory()

    def finish(self, reason: FinishReason) -> SequenceMemory | None:
        """-> FINISHED. Returns the memory to close, if any is held."""
        self._to(SequenceState.FINISHED)
        self.finish_reason = reason
        return self._take_memory() if self.memory is not None else None

    def timing(self, unix_offset_ns: int) -> Timing:
        """The times so far as unix time: monotonic + ``unix_offset_ns``."""

        def unix(time_ns: int | None) -> int:
            return time_ns + unix_offset_ns if time_ns is not None else 0

        return Timing(
            arrival_ns=unix(self.arrival_ns),
            first_scheduled_ns=unix(self.first_scheduled_ns),
            first_token_ns=unix(self.first_token_ns),
            last_token_ns=unix(self.last_token_ns),
        )

    def _to(self, state: SequenceState) -> None:
        assert state in _NEXT[self.state], f"{self.handle}: {self.state.name} -> {state.name} is not a transition"
        self.state = state

    def _take_memory(self) -> SequenceMemory:
        memory, self.memory = self.memory, None
        assert memory is not None, f"{self.handle}: no memory in state {self.state.name}"
        return memory
