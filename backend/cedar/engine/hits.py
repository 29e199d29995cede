# SPDX-License-Identifier: Apache-2.0
"""Prefix hits: how much of a prompt need not be encoded again, and what is left behind for later prompts.

A hit of H tokens always ends with a page and leaves at least the last token, whose logits are wanted. What it must bring back
is the window of every layer; encoder-side replay decides how (V4.1 report, bounded replay):

* BOUNDED: the last W tokens of the hit are run again from R = H - W with no window key below R. Cached are global pages
  alone. A hit of at most W tokens would save nothing and is dropped.
* OFF: the hit ends where a snapshot of the rings is, and nothing is run again. Snapshots are taken every `SNAPSHOT_TOKENS`
  tokens and at the last positions of a prompt that it, or one that continues it, can end a hit at, of sequences in this mode.
  Rows that the decoder half will run on are not in a snapshot: the hit leaves that many rows, so the result is a cold run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cedar.cache.slots import Snapshot
from cedar.cache.store import KVCache
from cedar.engine.memory import ModelSequence
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.engine.work import Prompt

SNAPSHOT_TOKENS = 256
"""Distance of snapshots, rounded up to whole pages. One takes as much memory as about 3,000 tokens of global pages."""

LEAST_SPARE_SLOTS = 2
"""With fewer, a snapshot on the way is gone before a sequence that waits for it could use it."""


@dataclass(frozen=True)
class Hit:
    """``tokens`` in ``pages``; OFF: with the windows behind them."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class SnapshotTask:
    """The rings of ``seq`` before ``position`` go to ``slot`` in this step."""

    seq: ModelSequence
    position: int
    slot: int


class PrefixHits:
    """Finds, applies and publishes prefixes in one `KVCache`. kept_rows: rows of a prompt that its decoder pass runs on."""

    def __init__(self, cache: KVCache, window: int, kept_rows: Mapping[DecoderReplay, int], *, enabled: bool) -> None:
        self._cache = cache
        self._window = window
        self._kept_rows = kept_rows
        self._enabled = enabled
        self._page = cache.page_tokens
        self._interval = -(-SNAPSHOT_TOKENS // self._page) * self._page

    def find(self, prompt: Prompt) -> Hit:
        """The longest useful hit. Its pages stay findable until something takes pages."""
        if not (self._enabled and prompt.reuse):
            return Hit()
        if prompt.encoder_replay is EncoderReplay.BOUNDED:
            pages = self._cache.match(prompt.chain, self._longest(prompt), exact=False)
            tokens = len(pages) * self._page
            return Hit(tokens, pages) if tokens > self._window else Hit()
        all_layers = prompt.decoder_replay is DecoderReplay.OFF
        pages, snapshot = self._cache.match_snapshot(prompt.chain, self._longest(prompt), all_layers=all_layers)
        return Hit(len(pages) * self._page, pages, snapshot)

    def promises(self, leader: ModelSequence, prompt: Prompt) -> bool:
        """Will what ``leader`` encodes be found? Not after its pages were cleared, nor without room for its snapshots."""
        if prompt.encoder_replay is EncoderReplay.OFF and self._cache.spare_slots < LEAST_SPARE_SLOTS:
            return False
        return leader.finite and self._cache.publishes(leader.blocks)

    def gains(self, seq: ModelSequence, prompt: Prompt, num_tokens: int) -> bool:
        """Would a hit of ``num_tokens`` save clearly more rows, at least W, than what ``seq`` has found?"""
        if not (self._enabled and prompt.reuse):
            return False
        bounded = prompt.encoder_replay is EncoderReplay.BOUNDED
        usable = min(num_tokens, self._longest(prompt)) // self._page * self._page
        return usable - max(seq.num_cached, self._window if bounded else 0) >= self._window

    def begin(self, seq: ModelSequence, prompt: Prompt, hit: Hit) -> None:
        """Bring a sequence that was just opened with ``hit.pages`` to where its first chunk starts."""
        ids = prompt.chain.token_ids
        longest = (len(ids) - 1, self._longest(prompt))
        seq.last_snapshots = frozenset(tokens // self._page * self._page for tokens in longest)
        if hit.snapshot is not None:
            self._cache.restore(seq.blocks, hit.snapshot)
            self._seed(seq, hit.tokens)
            seq.resume(hit.tokens, hit.tokens, ids)
        elif hit.tokens:
            seq.replay(hit.tokens - self._window, hit.tokens, ids)

    def tasks(self, seq: ModelSequence, end: int) -> list[SnapshotTask]:
        """Slots for the snapshots that fall into positions (num_computed, end], as far as there is room: the last ones first."""
        prompt = seq.prompt
        if not self._enabled or prompt is None or prompt.encoder_replay is EncoderReplay.BOUNDED:
            return []
        first = seq.num_computed // self._interval + 1
        positions = {number * self._interval for number in range(first, end // self._interval + 1)}
        positions |= {position for position in seq.last_snapshots if seq.num_computed < position <= end}
        found = []
        for position in sorted(positions, reverse=True):
            digest = prompt.chain.digest(position // self._page - 1)
            slot = self._cache.snapshot_slot(digest, all_layers=seq.mode is DecoderReplay.OFF)
            if slot is not None:
                found.append(SnapshotTask(seq, position, slot))
        return found

    def publish(self, seqs: Sequence[ModelSequence], tasks: Sequence[SnapshotTask]) -> None:
        """After a step: what it completed can be found from now on."""
        for seq in seqs:
            if self._enabled and seq.prompt is not None and seq.finite:
                self._cache.publish(seq.blocks, seq.prompt.chain, seq.num_computed, exact=seq.exact)
        for task in tasks:
            assert task.seq.prompt is not None
            digest = task.seq.prompt.chain.digest(task.position // self._page - 1)
            snapshot = Snapshot(task.slot, task.seq.mode is DecoderReplay.OFF)
            self._cache.keep_snapshot(digest, snapshot, likely=task.position in task.seq.last_snapshots)

    def drop(self, tasks: Sequence[SnapshotTask]) -> None:
        """The step failed."""
        for task in tasks:
            self._cache.drop_slot(task.slot)

    def _longest(self, prompt: Prompt) -> int:
        """Tokens that a hit may cover: all but the rows that must be run."""
        least = 1 if prompt.encoder_replay is EncoderReplay.BOUNDED else max(1, self._kept_rows[prompt.decoder_replay])
        return max(0, len(prompt.chain.token_ids) - least)

    def _seed(self, seq: ModelSequence, hit: int) -> None:
        """The cut layer attends from kept rows into the window before them, which the seam must hold."""
        if seq.mode is DecoderReplay.OFF:
            return
        start = max(0, hit - self._window)
        seq.seam.seed(start, self._cache.cut_window(seq.blocks, start, hit))
