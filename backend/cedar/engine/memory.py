# SPDX-License-Identifier: Apache-2.0
"""`ModelSequence`: what the runner knows about one open sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cedar.cache.store import Int64Array, SequenceBlocks
from cedar.engine.replay import EncodedSequence
from cedar.engine.request import DecoderReplay

NO_TOKEN = -1


class ModelSequence:
    """A sequence's caches, its seam and how far it is (a `SequenceMemory`).

    num_computed: positions whose encoder work is done. replay_start: no window key below it exists. write_floor: compressed
    groups that end at or below it came with a prefix hit. ``encoded``: the prompt's last chunk is done, its tail is not.
    ``decoding``: the tail is done.
    """

    def __init__(self, blocks: SequenceBlocks, seam: EncodedSequence, lookback: int) -> None:
        self.blocks = blocks
        self.seam = seam
        self.num_computed = 0
        self.replay_start = 0
        self.write_floor = 0
        self.encoded = False
        self.decoding = False
        self._history: Int64Array = np.full(lookback, NO_TOKEN, np.int64)

    @property
    def mode(self) -> DecoderReplay:
        return self.seam.mode

    def with_history(self, token_ids: Sequence[int]) -> Int64Array:
        """The next tokens behind the ``lookback`` ids before them (-1: before position 0)."""
        return np.concatenate([self._history, np.asarray(token_ids, np.int64)])

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens are computed."""
        self.num_computed += len(token_ids)
        if self._history.size:
            self._history = self.with_history(token_ids)[-self._history.size :]

    def rewind(self, position: int, prefix_ids: Sequence[int], write_floor: int) -> None:
        """Continue at ``position`` with no window state; ``prefix_ids`` are the ids of positions [0, position)."""
        self.num_computed = self.replay_start = position
        self.write_floor = write_floor
        lookback = self._history.size
        self._history = np.full(lookback, NO_TOKEN, np.int64)
        known = np.asarray(prefix_ids[max(0, position - lookback) : position], np.int64)
        self._history[lookback - known.size :] = known
