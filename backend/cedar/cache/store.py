# SPDX-License-Identifier: Apache-2.0
"""`KVCache`: the memory that sequences keep between steps, charged to one budget in bytes.

Shared and paged: the compressed KV and the index keys of every KV source. A page covers ``page_tokens`` tokens and holds
their ``page_tokens / ratio`` entries of every source, so one block table per sequence serves all sources.
Private to a sequence, in a slot: the window ring of every layer (position p lives in ring row ``p % W``) and the open row of
every ratio-2 compressor. Boundary rows (`cedar.engine.replay`) live with their owner and are charged here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cedar.cache.records import CacheFormats, RecordPool, lazy_zeros, record_bytes
from cedar.config.model import ModelConfig
from cedar.errors import invalid

Int64Array = npt.NDArray[np.int64]


class SequenceBlocks:
    """What one sequence holds: a private slot, pages, and bytes charged for boundary rows. Made by `KVCache.open`."""

    def __init__(self, slot: int, ratios: tuple[int, ...]) -> None:
        self.slot = slot
        self.pages: list[int] = []
        self.charged_bytes = 0
        self.closed = False
        self._entries: dict[int, Int64Array] = {ratio: np.empty(0, np.int64) for ratio in ratios}
        self._length = dict.fromkeys(ratios, 0)

    def entries(self, ratio: int) -> Int64Array:
        """Row number in the ratio's pools of every compressed position that has a page: int64 [reserved tokens / ratio]."""
        return self._entries[ratio][: self._length[ratio]]

    def append_pages(self, pages: list[int], page_tokens: int) -> None:
        """Extend the block table and, amortised, the entry table derived from it."""
        self.pages.extend(pages)
        for ratio, table in self._entries.items():
            per_page = page_tokens // ratio
            new = (np.asarray(pages, np.int64)[:, None] * per_page + np.arange(per_page)).reshape(-1)
            end = self._length[ratio] + new.size
            if end > table.size:
                grown = np.empty(max(end, 2 * table.size), np.int64)
                grown[: self._length[ratio]] = table[: self._length[ratio]]
                self._entries[ratio] = table = grown
            table[self._length[ratio] : end] = new
            self._length[ratio] = end


@dataclass(frozen=True)
class CacheSizes:
    """What a budget buys. ``page_bytes``: one page of all sources; ``slot_bytes``: one sequence's rings and open rows."""

    budget_bytes: int
    page_tokens: int
    page_bytes: int
    slot_bytes: int
    num_pages: int
    num_slots: int

    @property
    def shared_bytes(self) -> int:
        """The part of the budget that pages and boundary rows compete for; the rest are the slots."""
        return self.budget_bytes - self.num_slots * self.slot_bytes

    @classmethod
    def plan(
        cls, config: ModelConfig, formats: CacheFormats, *, budget_bytes: int, max_sequences: int, page_tokens: int
    ) -> CacheSizes:
        """Divide the budget: slots for ``max_sequences`` but at most half of it, pages from the rest.

        Raises `CedarError` when not even one sequence of one page fits.
        """
        entry = record_bytes(formats.kv) + record_bytes(formats.index_key)
        page = sum(page_tokens // config.compress_ratios[source] * entry for source in config.kv_source_layer_ids)
        slot = config.num_hidden_layers * config.sliding_window * record_bytes(formats.window)
        slot += sum(2 * config.head_dim * 4 for source in config.kv_source_layer_ids if config.compress_ratios[source] == 2)
        if budget_bytes < page + slot:
            raise invalid(
                "kv_cache_bytes", f"is {budget_bytes}", f"at least {page + slot} for this model (one sequence of one page)"
            )
        slots = min(max_sequences, max(1, budget_bytes // 2 // slot))
        return cls(budget_bytes, page_tokens, page, slot, (budget_bytes - slots * slot) // page, slots)


class KVCache:
    """Pools, free lists and the budget. Not thread-safe: one engine thread owns it.

    Every page and slot belongs to at most one open sequence. Page 0 and slot 0 of the pools are the null page and slot.
    """

    def __init__(self, config: ModelConfig, formats: CacheFormats, sizes: CacheSizes, device: torch.device) -> None:
        self.sizes = sizes
        self.page_tokens = sizes.page_tokens
        self.window_size = config.sliding_window
        self.ratios = tuple(sorted({config.compress_ratios[source] for source in config.kv_source_layer_ids}))
        ring_rows = (sizes.num_slots + 1) * config.sliding_window
        self._rings = [RecordPool.allocate(formats.window, ring_rows, device) for _ in range(config.num_hidden_layers)]
        self._kv: dict[int, RecordPool] = {}
        self._index_keys: dict[int, RecordPool] = {}
        self._open_rows: dict[int, Tensor] = {}
        for source in config.kv_source_layer_ids:
            ratio = config.compress_ratios[source]
            rows = (sizes.num_pages + 1) * (sizes.page_tokens // ratio)
            self._kv[source] = RecordPool.allocate(formats.kv, rows, device)
            self._index_keys[source] = RecordPool.allocate(formats.index_key, rows, device)
            if ratio == 2:
                self._open_rows[source] = lazy_zeros((sizes.num_slots + 1, 2 * config.head_dim), torch.float32, device)
        self._free_pages = list(range(sizes.num_pages, 0, -1))
        self._free_slots = list(range(sizes.num_slots, 0, -1))
        self._charged_bytes = 0

    def window(self, layer: int) -> RecordPool:
        """Window rings of a layer: row ``slot * W + p % W`` holds position p's window KV."""
        return self._rings[layer]

    def kv(self, source: int) -> RecordPool:
        """Compressed KV of a KV source, addressed by `SequenceBlocks.entries`."""
        return self._kv[source]

    def index_keys(self, source: int) -> RecordPool:
        """Index keys of a KV source, addressed like `kv`."""
        return self._index_keys[source]

    def open_rows(self, source: int) -> Tensor:
        """float32 [slots, 2 * head_dim]: ``kv | gate`` of the first token of the open group of a ratio-2 source, by slot."""
        return self._open_rows[source]

    @property
    def pages_used(self) -> int:
        return self.sizes.num_pages - len(self._free_pages)

    @property
    def sequences(self) -> int:
        return self.sizes.num_slots - len(self._free_slots)

    @property
    def bytes_used(self) -> int:
        return self.sequences * self.sizes.slot_bytes + self.pages_used * self.sizes.page_bytes + self._charged_bytes

    def open(self, charged_bytes: int = 0) -> SequenceBlocks | None:
        """A slot, and ``charged_bytes`` for boundary rows; None when either does not fit."""
        if not self._free_slots or not self._has_room(charged_bytes):
            return None
        blocks = SequenceBlocks(self._free_slots.pop(), self.ratios)
        blocks.charged_bytes = charged_bytes
        self._charged_bytes += charged_bytes
        return blocks

    def reserve(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Pages for positions [0, num_tokens). False, and nothing changes, when they do not fit."""
        self._check_open(blocks)
        missing = -(-num_tokens // self.page_tokens) - len(blocks.pages)
        if missing <= 0:
            return True
        if missing > len(self._free_pages) or not self._has_room(missing * self.sizes.page_bytes):
            return False
        blocks.append_pages([self._free_pages.pop() for _ in range(missing)], self.page_tokens)
        return True

    def discharge(self, blocks: SequenceBlocks) -> None:
        """The sequence's boundary rows are gone."""
        self._check_open(blocks)
        self._charged_bytes -= blocks.charged_bytes
        blocks.charged_bytes = 0

    def close(self, blocks: SequenceBlocks) -> None:
        """Give everything back. Closing twice raises RuntimeError."""
        self.discharge(blocks)
        blocks.closed = True
        self._free_pages.extend(reversed(blocks.pages))
        self._free_slots.append(blocks.slot)

    def fits(self, num_tokens: int, charged_bytes: int) -> bool:
        """Could a sequence of ``num_tokens`` that also holds ``charged_bytes`` run if it were alone?"""
        pages = -(-num_tokens // self.page_tokens)
        return pages * self.sizes.page_bytes + charged_bytes <= self.sizes.shared_bytes and pages <= self.sizes.num_pages

    def _has_room(self, more_bytes: int) -> bool:
        used = self.pages_used * self.sizes.page_bytes + self._charged_bytes
        return used + more_bytes <= self.sizes.shared_bytes

    @staticmethod
    def _check_open(blocks: SequenceBlocks) -> None:
        if blocks.closed:
            raise RuntimeError(f"sequence in slot {blocks.slot} was closed already")
