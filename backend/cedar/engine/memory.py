# SPDX-License-Identifier: Apache-2.0
"""`ModelSequence`: what the runner knows about one open sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cedar.cache.store import Int64Array, SequenceBlocks
from cedar.engine.replay import EncodedSequence
from cedar.engine.request import DecoderReplay
from cedar.engine.work import Prompt

NO_TOKEN = -1


class ModelSequence:
    """A sequence's caches, its seam and how far it is (a `SequenceMemory`).

    num_computed: positions whose encoder work is done. replay_start: no window key below it exists. write_floor: compressed
    groups that end at or below it came with a prefix hit. ``encoded``: the prompt's last chunk is done, its tail is not.
    ``decoding``: the tail is done. ``prompt``: what it was opened for; None: a sequence that shares nothing (`cedar score`).
    ``last_snapshots``: where snapshots of a prompt's end belong. ``finite``: so far, all that was encoded is; what is not is
    never published.
    """

    def __init__(self, blocks: SequenceBlocks, seam: EncodedSequence, lookback: int, prompt: Prompt | None = None) -> None:
        self.blocks = blocks
        self.seam = seam
        self.prompt = prompt
        self.last_snapshots: frozenset[int] = frozenset()
        self.finite = True
        self.num_cached = 0
        self.num_computed = 0
        self.replay_start = 0
        self.write_floor = 0
        self.encoded = False
        self.decoding = False
        self._history: Int64Array = np.full(lookback, NO_TOKEN, np.int64)

    @property
    def mode(self) -> DecoderReplay:
        return self.seam.mode

    @property
    def exact(self) -> bool:
        """No window was ever clamped, so what it publishes is what a cold run computes."""
        return self.replay_start == 0

    @property
    def num_replayed(self) -> int:
        """Tokens of the prefix hit that are run again."""
        return self.num_cached - self.replay_start if self.replay_start else 0

    def with_history(self, token_ids: Sequence[int]) -> Int64Array:
        """The next tokens behind the ``lookback`` ids before them (-1: before position 0)."""
        return np.concatenate([self._history, np.asarray(token_ids, np.int64)])

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens are computed."""
        self.num_computed += len(token_ids)
        if self._history.size:
            self._history = self.with_history(token_ids)[-self._history.size :]

    def replay(self, start: int, hit: int, prefix_ids: Sequence[int]) -> None:
        """Continue at ``start`` with no window state, after a hit of ``hit`` tokens (0: none), whose ids are ``prefix_ids``."""
        self.replay_start = start
        self.write_floor = hit
        self.resume(start, hit, prefix_ids)

    def resume(self, position: int, hit: int, prefix_ids: Sequence[int]) -> None:
        """Continue at ``position`` after a hit of ``hit`` tokens; ``prefix_ids`` begin with the ids below ``position``."""
        self.num_computed, self.num_cached = position, hit
        lookback = self._history.size
        self._history = np.full(lookback, NO_TOKEN, np.int64)
        known = np.asarray(prefix_ids[max(0, position - lookback) : position], np.int64)
        self._history[lookback - known.size :] = known
