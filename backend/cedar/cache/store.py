# SPDX-License-Identifier: Apache-2.0
"""`KVCache`: the memory that sequences keep between steps, charged to one budget in bytes.

Shared and paged: the compressed KV and the index keys of every KV source. A page covers ``page_tokens`` tokens and holds
their ``page_tokens / ratio`` entries of every source, so one block table serves all sources.
Private to a sequence, in a slot: its row of the block table, the window ring of every layer (position p lives in ring row
``p % W``) and the open row of every ratio-2 compressor. Boundary rows (`cedar.engine.replay`) live with their owner, who
allocates them later; they are charged here, to a part of the budget that no pool takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cedar.cache.records import CacheFormats, RecordPool, lazy_zeros, record_bytes
from cedar.config.model import ModelConfig
from cedar.errors import invalid

Int64Array = npt.NDArray[np.int64]


@dataclass
class SequenceBlocks:
    """What one sequence holds: a private slot, pages, and bytes charged for boundary rows. Made by `KVCache.open`."""

    slot: int
    charged_bytes: int = 0
    pages: list[int] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True)
class BlockTable:
    """Where the compressed entries of a ratio lie in its pools.

    pages: int64 [slots + 1, pages of the longest sequence], on the device, shared by all ratios; 0, the null page, where
    nothing is reserved. per_page: entries of a page.
    """

    pages: Tensor
    per_page: int

    def base(self, slot: Int64Array) -> Int64Array:
        """Places of the slots' first pages in the flat table."""
        return slot * self.pages.shape[1]

    def rows(self, base: Tensor, entry: Tensor) -> Tensor:
        """Pool rows of entries >= 0, int64 like ``entry``; base: int64 that broadcasts to it (`base` of each one's slot).

        That is page * per_page + entry % per_page, which the number of the page in its sequence says without a remainder.
        """
        number = entry.div(self.per_page, rounding_mode="floor")
        return torch.add(entry, self.pages.take(base + number).sub_(number), alpha=self.per_page)

    def pages_of(self, slots: Tensor, num_entries: int) -> Tensor:
        """The pages of the first ``num_entries`` entries of slots int64 [n]: int64 [n, pages]."""
        return self.pages[:, : -(-num_entries // self.per_page)].index_select(0, slots)


@dataclass(frozen=True)
class CacheSizes:
    """What a budget buys, null page and null slot included.

    page_bytes: one page of all sources. slot_bytes: one sequence's rings, open rows and row of the block table.
    boundary_bytes: the part that boundary rows are charged to.
    """

    budget_bytes: int
    page_tokens: int
    page_bytes: int
    slot_bytes: int
    boundary_bytes: int
    num_pages: int
    num_slots: int

    @classmethod
    def plan(
        cls,
        config: ModelConfig,
        formats: CacheFormats,
        *,
        budget_bytes: int,
        max_sequences: int,
        page_tokens: int,
        seam_bytes: int,
        largest_seam_bytes: int,
    ) -> CacheSizes:
        """Divide the budget: private memory of ``max_sequences`` sequences, but at most half of it, and pages from the rest.

        seam_bytes: boundary rows of one sequence in the server's own replay mode; every slot has that much. A request that
        asks for another mode is charged to the same part, which holds ``largest_seam_bytes`` for one of them if there is room.
        Raises `CedarError` when not even one sequence of one page fits.
        """
        entry = record_bytes(formats.kv) + record_bytes(formats.index_key)
        page = sum(page_tokens // config.compress_ratios[source] * entry for source in config.kv_source_layer_ids)
        slot = config.num_hidden_layers * config.sliding_window * record_bytes(formats.window)
        slot += sum(2 * config.head_dim * 4 for source in config.kv_source_layer_ids if config.compress_ratios[source] == 2)
        slot += table_width(config, page_tokens) * 8
        least = 2 * (page + slot) + seam_bytes
        if budget_bytes < least:
            allowed = f"at least {least} for this model and decoder replay mode (one sequence of one page)"
            raise invalid("kv_cache_bytes", f"is {budget_bytes}", allowed)
        left = budget_bytes - page - slot
        private = min(left // 2, left - page)
        slots = min(max_sequences, max(1, private // (slot + seam_bytes)))
        boundary = max(slots * seam_bytes, min((slots - 1) * seam_bytes + largest_seam_bytes, private - slots * slot))
        pages = (left - slots * slot - boundary) // page
        return cls(budget_bytes, page_tokens, page, slot, boundary, pages, slots)


def table_width(config: ModelConfig, page_tokens: int) -> int:
    """Pages of the longest sequence."""
    return -(-config.max_position_embeddings // page_tokens)


class KVCache:
    """Pools, free lists and the budget. Not thread-safe: one engine thread owns it.

    Every page and slot belongs to at most one open sequence. Page 0 and slot 0 of the pools are the null page and slot.
    """

    def __init__(self, config: ModelConfig, formats: CacheFormats, sizes: CacheSizes, device: torch.device) -> None:
        self.sizes = sizes
        self.page_tokens = sizes.page_tokens
        self.window_size = config.sliding_window
        table = lazy_zeros((sizes.num_slots + 1, table_width(config, sizes.page_tokens)), torch.int64, device)
        ratios = {config.compress_ratios[source] for source in config.kv_source_layer_ids}
        self._table = table
        self.tables = {ratio: BlockTable(table, sizes.page_tokens // ratio) for ratio in sorted(ratios)}
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
        """Compressed KV of a KV source, addressed through the `BlockTable` of its ratio."""
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
        if not self._free_slots or self._charged_bytes + charged_bytes > self.sizes.boundary_bytes:
            return None
        self._charged_bytes += charged_bytes
        return SequenceBlocks(self._free_slots.pop(), charged_bytes)

    def reserve(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Pages for positions [0, num_tokens). False, and nothing changes, when they do not fit."""
        self._check_open(blocks)
        had, needed = len(blocks.pages), -(-num_tokens // self.page_tokens)
        if needed <= had:
            return True
        if needed - had > len(self._free_pages) or needed > self._table.shape[1]:
            return False
        new = [self._free_pages.pop() for _ in range(needed - had)]
        blocks.pages.extend(new)
        self._table[blocks.slot, had:needed] = torch.tensor(new, device=self._table.device)
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
        self._table[blocks.slot, : len(blocks.pages)] = 0
        self._free_pages.extend(reversed(blocks.pages))
        self._free_slots.append(blocks.slot)

    def fits(self, num_tokens: int, charged_bytes: int) -> bool:
        """Could a sequence of ``num_tokens`` that also holds ``charged_bytes`` run if it were alone?"""
        pages = -(-num_tokens // self.page_tokens)
        return pages <= min(self.sizes.num_pages, self._table.shape[1]) and charged_bytes <= self.sizes.boundary_bytes

    @staticmethod
    def _check_open(blocks: SequenceBlocks) -> None:
        if blocks.closed:
            raise RuntimeError(f"sequence in slot {blocks.slot} was closed already")
