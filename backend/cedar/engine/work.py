# SPDX-License-Identifier: Apache-2.0
"""The messages between the engine (what runs next) and the runner (running it).

One step is one ragged batch: prompt chunks, first decoder passes of encoded sequences ("tails") and single-token
decodes, of as many sequences as fit the token budget. The engine never touches a tensor but the logits it samples from;
the runner never knows about requests, queues or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cedar.cache.prefix import TokenChain
from cedar.engine.request import DecoderReplay, EncoderReplay

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """What `Runner.open` needs to know of a sequence.

    chain: its tokens, prompt and output so far, and the names of their pages. reuse: False: every row must be computed
    (prompt log-probabilities), so nothing cached is used; its own pages are published all the same.
    """

    chain: TokenChain
    encoder_replay: EncoderReplay
    decoder_replay: DecoderReplay
    reuse: bool = True

    def serves(self, other: Prompt) -> bool:
        """Can ``other`` use what this one leaves behind? Without encoder-side replay it needs snapshots, which only sequences
        in that mode take; for decoder-side replay OFF, snapshots of all layers.
        """
        if other.encoder_replay is EncoderReplay.BOUNDED:
            return True
        all_layers = self.decoder_replay is DecoderReplay.OFF
        return self.encoder_replay is EncoderReplay.OFF and (all_layers or other.decoder_replay is not DecoderReplay.OFF)


class SequenceMemory(Protocol):
    """A sequence's memory (rings, pages, boundary rows): made by `Runner.open`, opaque to the engine."""

    num_computed: int
    """Positions whose encoder work is done; the next chunk must start here."""
    num_cached: int
    """H: tokens at the beginning whose compressed entries were found."""

    @property
    def num_replayed(self) -> int:
        """Of these, how many are run again to rebuild windows: H - R."""


@dataclass(frozen=True)
class PrefillWork:
    """One chunk of a prompt: positions [start, start + len(token_ids)).

    With decoder mode BOUNDED or EXACT it runs layers 0..cut-1 and the cut layer's KV projection, and keeps the boundary
    rows. With OFF it runs all layers. ``last``: the chunk ends the prompt. ``all_logits`` (OFF only): return the logits of
    every row (prompt_logprobs, score).
    """

    seq: SequenceMemory
    start: int
    token_ids: Sequence[int]
    last: bool
    all_logits: bool = False


@dataclass(frozen=True)
class TailWork:
    """The first decoder pass of a wholly encoded sequence: layers >= cut on its kept rows; gives the last row's logits.

    In OFF mode the rows are done already and only the head runs.
    """

    seq: SequenceMemory


@dataclass(frozen=True)
class DecodeWork:
    """One generated token through all layers; gives its logits."""

    seq: SequenceMemory
    position: int
    token_id: int


@dataclass(frozen=True)
class StepWork:
    """What one step runs. At least one list is not empty. A sequence appears at most once."""

    prefills: Sequence[PrefillWork] = ()
    tails: Sequence[TailWork] = ()
    decodes: Sequence[DecodeWork] = ()


@dataclass
class StepResult:
    """``logits`` float32 [len(tails) + len(decodes), vocab], tails first, in the order of the work.

    ``prompt_logits``: for each prefill with ``all_logits``, its index in ``prefills`` -> float32 [rows, vocab].
    """

    logits: torch.Tensor | None
    prompt_logits: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of the KV budget and what holds them."""

    bytes_total: int
    bytes_used: int
    pages_total: int
    pages_used: int
    sequences: int
    kv_bytes_per_token: float
    bytes_cached: int = 0
    """Held by nobody, findable, and given up when somebody needs memory; no part of ``bytes_used``."""


class Runner(Protocol):
    """Runs steps and owns all device memory. Not thread-safe: one engine thread calls it."""

    vocab_size: int
    max_model_len: int
    page_tokens: int

    def open(self, prompt: Prompt, num_tokens: int) -> SequenceMemory | None:
        """Memory for one sequence: rings, boundary rows, and pages for positions [0, num_tokens), shared where they are cached.

        All is charged to the budget. None, and nothing changed, when there is no room.
        """

    def gains(self, leader: SequenceMemory, seq: SequenceMemory, prompt: Prompt, num_tokens: int) -> bool:
        """Will ``seq`` find clearly more when ``leader`` has encoded the first ``num_tokens`` tokens, which both have?"""

    def finds_more(self, seq: SequenceMemory, prompt: Prompt) -> bool:
        """Would ``seq``, of which nothing has run, find clearly more now if it was opened again?"""

    def reserve(self, seq: SequenceMemory, num_tokens: int) -> bool:
        """Make sure that positions [0, num_tokens) have pages. False (and nothing changed) when there is no room."""

    def close(self, seq: SequenceMemory, *, forget: bool = False) -> None:
        """Give back everything ``seq`` holds. Exactly once per `open`. forget: nobody may find any of its pages again."""

    def clear_cache(self) -> int:
        """Forget everything cached for later sequences. Returns the tokens forgotten; open sequences keep what they use."""

    def fits(self, num_tokens: int, decoder_replay: DecoderReplay) -> bool:
        """Could one sequence of this length run if it were alone? False: refuse the request at the door."""

    def step(self, work: StepWork) -> StepResult:
        """Run one step. All pages must have been reserved. Raises RuntimeError with the reason on a broken invariant."""

    def usage(self) -> MemoryUsage:
        """Current use of the budget."""
