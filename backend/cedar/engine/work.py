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

from cedar.engine.request import DecoderReplay

if TYPE_CHECKING:
    import torch


class SequenceMemory(Protocol):
    """A sequence's private memory (rings, block table, boundary rows): made by `Runner.open`, opaque to the engine."""

    num_computed: int
    """Positions whose encoder work is done; the next chunk must start here."""


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


class Runner(Protocol):
    """Runs steps and owns all device memory. Not thread-safe: one engine thread calls it."""

    vocab_size: int
    max_model_len: int

    def open(self, decoder_replay: DecoderReplay) -> SequenceMemory | None:
        """Private memory for one sequence (rings, boundary rows), charged to the budget; None when there is no room."""

    def reserve(self, seq: SequenceMemory, num_tokens: int) -> bool:
        """Make sure that positions [0, num_tokens) have pages. False (and nothing changed) when there is no room."""

    def close(self, seq: SequenceMemory) -> None:
        """Give back everything ``seq`` holds. Exactly once per `open`."""

    def fits(self, num_tokens: int, decoder_replay: DecoderReplay) -> bool:
        """Could one sequence of this length run if it were alone? False: refuse the request at the door."""

    def step(self, work: StepWork) -> StepResult:
        """Run one step. All pages must have been reserved. Raises RuntimeError with the reason on a broken invariant."""

    def usage(self) -> MemoryUsage:
        """Current use of the budget."""
