# SPDX-License-Identifier: Apache-2.0
"""`KVCache`: the memory that sequences keep between steps, charged to one budget in bytes.

Shared and paged: the compressed KV and the index keys of every KV source. A page covers ``page_tokens`` tokens and holds
their ``page_tokens / ratio`` entries of every source, so one block table serves all sources. A full page may be published under
its name (`cedar.cache.prefix`); from then on it is never written again, and outlives the sequence until its memory is needed.
Private to a sequence, in a slot: its row of the block table, the window ring of every layer (position p lives in ring row
``p % W``) and the open row of every ratio-2 compressor. A slot that no sequence needs may hold a snapshot of rings.
Boundary rows (`cedar.engine.replay`) live with their owner, who allocates them later; they are charged here, to a part of the
budget that no pool takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cedar.cache.pages import PageName, PagePool
from cedar.cache.prefix import Digest, TokenChain
from cedar.cache.records import CacheFormats, RecordPool, lazy_zeros, record_bytes
from cedar.cache.slots import SlotPool, Snapshot
from cedar.config.model import ModelConfig
from cedar.errors import invalid

Int64Array = npt.NDArray[np.int64]


@dataclass
class SequenceBlocks:
    """What one sequence holds: a private slot, pages, and bytes charged for boundary rows. Made by `KVCache.open`.

    num_published: leading pages that were given names: not to be written any more.
    """

    slot: int
    charged_bytes: int = 0
    pages: list[int] = field(default_factory=list)
    num_published: int = 0
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
    boundary_bytes: the part that boundary rows are charged to. num_slots: of sequences and of snapshots.
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
        snapshots: bool = False,
    ) -> CacheSizes:
        """Divide the budget: private memory of ``max_sequences`` sequences, but at most half of it, and pages from the rest.

        seam_bytes: boundary rows of one sequence in the server's own replay mode; every slot has that much. A request that
        asks for another mode is charged to the same part, which holds ``largest_seam_bytes`` for one of them if there is room.
        snapshots: the server finds prefixes by snapshots; half of the rest becomes slots for them.
        Raises `CedarError` when not even one sequence of one page fits.
        """
        page, slot = page_bytes(config, formats, page_tokens), slot_bytes(config, formats, page_tokens)
        least = 2 * (page + slot) + seam_bytes
        if budget_bytes < least:
            allowed = f"at least {least} for this model and decoder replay mode (one sequence of one page)"
            raise invalid("kv_cache_bytes", f"is {budget_bytes}", allowed)
        left = budget_bytes - page - slot
        private = min(left // 2, left - page)
        slots = min(max_sequences, max(1, private // (slot + seam_bytes)))
        boundary = max(slots * seam_bytes, min((slots - 1) * seam_bytes + largest_seam_bytes, private - slots * slot))
        left -= slots * slot + boundary
        if snapshots:
            kept = (left - page) // 2 // slot
            slots, left = slots + kept, left - kept * slot
        return cls(budget_bytes, page_tokens, page, slot, boundary, left // page, slots)


def page_bytes(config: ModelConfig, formats: CacheFormats, page_tokens: int) -> int:
    """Bytes of one page: the entries of ``page_tokens`` tokens of every source."""
    entry = record_bytes(formats.kv) + record_bytes(formats.index_key)
    return sum(page_tokens // config.compress_ratios[source] * entry for source in config.kv_source_layer_ids)


def slot_bytes(config: ModelConfig, formats: CacheFormats, page_tokens: int) -> int:
    """Bytes of one slot: a window ring per layer, an open row per ratio-2 source, a row of the block table."""
    rings = config.num_hidden_layers * config.sliding_window * record_bytes(formats.window)
    pairs = sum(config.compress_ratios[source] == 2 for source in config.kv_source_layer_ids)
    return rings + pairs * 2 * config.head_dim * 4 + table_width(config, page_tokens) * 8


def table_width(config: ModelConfig, page_tokens: int) -> int:
    """Pages of the longest sequence."""
    return -(-config.max_position_embeddings // page_tokens)


class KVCache:
    """Pools and the budget. Not thread-safe: one engine thread owns it.

    A slot belongs to one open sequence, a page to all that share it. Page 0 and slot 0 of the pools are the null page and slot.
    """

    def __init__(self, config: ModelConfig, formats: CacheFormats, sizes: CacheSizes, device: torch.device) -> None:
        self.sizes = sizes
        self.page_tokens = sizes.page_tokens
        self.window_size = config.sliding_window
        self._cut = config.cut
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
        self._slots = SlotPool(sizes.num_slots)
        self._pages = PagePool(sizes.num_pages, self._forget_snapshot)
        self._charged_bytes = 0

    def window(self, layer: int) -> RecordPool:
        """Window rings of a layer: row ``slot * W + p % W`` holds position p's window KV."""
        return self._rings[layer]

    def cut_window(self, blocks: SequenceBlocks, start: int, end: int) -> Tensor:
        """Window records [end - start, width] of the cut layer for positions [start, end), at most the last W computed."""
        rows = torch.arange(start, end, device=self._table.device) % self.window_size
        return self._rings[self._cut].load(rows + blocks.slot * self.window_size)

    def kv(self, source: int) -> RecordPool:
        """Compressed KV of a KV source, addressed through the `BlockTable` of its ratio."""
        return self._kv[source]

    def index_keys(self, source: int) -> RecordPool:
        """Index keys of a KV source, addressed like `kv`."""
        return self._index_keys[source]

    def open_rows(self, source: int) -> Tensor:
        """float32 [slots, 2 * head_dim]: ``kv | gate`` of the first token of the open group of a ratio-2 source, by slot."""
        return self._open_rows[source]

    # what is in use

    @property
    def pages_used(self) -> int:
        """Pages of open sequences, each counted once however many share it."""
        return self._pages.num_in_use

    @property
    def pages_cached(self) -> int:
        """Pages of no open sequence that a later one may find."""
        return self._pages.num_idle

    @property
    def sequences(self) -> int:
        """Slots of open sequences."""
        return self._slots.num_in_use

    @property
    def snapshots(self) -> int:
        """Slots that hold a snapshot."""
        return self._slots.num_snapshots

    @property
    def spare_slots(self) -> int:
        """Slots of no open sequence."""
        return self.sizes.num_slots - self.sequences

    @property
    def bytes_used(self) -> int:
        """What open sequences hold."""
        return self.sequences * self.sizes.slot_bytes + self.pages_used * self.sizes.page_bytes + self._charged_bytes

    @property
    def bytes_cached(self) -> int:
        """What nobody holds and a later sequence may find: it gives way to whoever needs the memory."""
        return self.snapshots * self.sizes.slot_bytes + self.pages_cached * self.sizes.page_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the shared pools, as allocated, per token that they hold."""
        pools = (*self._kv.values(), *self._index_keys.values())
        return sum(pool.nbytes for pool in pools) / ((self.sizes.num_pages + 1) * self.page_tokens)

    def allocated(self) -> dict[str, int]:
        """Bytes that lie in memory, by what they are for, null page and null slot included."""
        return {
            "global_kv": sum(pool.nbytes for pool in self._kv.values()),
            "index_keys": sum(pool.nbytes for pool in self._index_keys.values()),
            "windows": sum(ring.nbytes for ring in self._rings),
            "compressor_rows": sum(rows.nbytes for rows in self._open_rows.values()),
            "block_table": self._table.nbytes,
        }

    # sequences

    def open(self, charged_bytes: int = 0, shared: Sequence[int] = (), num_tokens: int = 0) -> SequenceBlocks | None:
        """A slot, ``charged_bytes`` for boundary rows, and pages for positions [0, num_tokens), the first ones ``shared``
        with others (from `match`).

        None, and nothing changes, when any of it is not there.
        """
        needed = max(len(shared), -(-num_tokens // self.page_tokens))
        if self._charged_bytes + charged_bytes > self.sizes.boundary_bytes or needed > self._table.shape[1]:
            return None
        if not self._pages.has_room(needed - len(shared), beside=shared):
            return None
        slot = self._slots.take()
        if slot is None:
            return None
        self._charged_bytes += charged_bytes
        blocks = SequenceBlocks(slot, charged_bytes, num_published=len(shared))
        self._pages.share(shared)
        new = self._pages.take(needed - len(shared))
        assert new is not None
        if needed:
            self._append(blocks, [*shared, *new])
        return blocks

    def reserve(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Pages for positions [0, num_tokens). False, and nothing changes, when they do not fit."""
        self._check_open(blocks)
        needed = -(-num_tokens // self.page_tokens)
        missing = needed - len(blocks.pages)
        if missing <= 0:
            return True
        if needed > self._table.shape[1]:
            return False
        new = self._pages.take(missing)
        if new is None:
            return False
        self._append(blocks, new)
        return True

    def discharge(self, blocks: SequenceBlocks) -> None:
        """The sequence's boundary rows are gone."""
        self._check_open(blocks)
        self._charged_bytes -= blocks.charged_bytes
        blocks.charged_bytes = 0

    def close(self, blocks: SequenceBlocks, *, forget: bool = False) -> None:
        """Give everything back. Published pages stay findable. Closing twice raises RuntimeError.

        forget: neither its pages nor any that others computed behind them can be found again.
        """
        self.discharge(blocks)
        blocks.closed = True
        if forget:
            self._pages.forget(blocks.pages)
        self._table[blocks.slot, : len(blocks.pages)] = 0
        self._pages.give_back(reversed(blocks.pages))
        self._slots.give_back(blocks.slot)

    def fits(self, num_tokens: int, charged_bytes: int) -> bool:
        """Could a sequence of ``num_tokens`` that also holds ``charged_bytes`` run if it were alone?"""
        pages = -(-num_tokens // self.page_tokens)
        return pages <= min(self.sizes.num_pages, self._table.shape[1]) and charged_bytes <= self.sizes.boundary_bytes

    # prefixes

    def match(self, chain: TokenChain, num_tokens: int, *, exact: bool) -> list[int]:
        """Published pages that hold the beginning of a chain, at most its first ``num_tokens`` tokens.

        exact: only pages of exact provenance. They stay findable until the next call that takes pages: `open` with them first.
        """
        return self._pages.find(chain, num_tokens // self.page_tokens, exact=exact)

    def match_snapshot(self, chain: TokenChain, num_tokens: int, *, all_layers: bool) -> tuple[list[int], Snapshot | None]:
        """As `match`, exact, cut down to the last page that has a snapshot; no pages and None when none has."""
        pages = self.match(chain, num_tokens, exact=True)
        for number in range(len(pages), 0, -1):
            snapshot = self._slots.find(chain.digest(number - 1), all_layers=all_layers)
            if snapshot is not None:
                return pages[:number], snapshot
        return [], None

    def publish(self, blocks: SequenceBlocks, chain: TokenChain, num_tokens: int, *, exact: bool) -> None:
        """The entries of positions [0, num_tokens) are all written: let the pages that they fill be found.

        Nothing more of a sequence is published once its beginning was forgotten (`clear`): it could not be found.
        """
        self._check_open(blocks)
        for number in range(blocks.num_published, num_tokens // self.page_tokens):
            if number and not self._pages.is_published(blocks.pages[number - 1]):
                return
            before = chain.digest(number - 1) if number else b""
            self._pages.publish(blocks.pages[number], PageName(chain.digest(number), exact, before))
            blocks.num_published = number + 1

    def publishes(self, blocks: SequenceBlocks) -> bool:
        """Can pages that a sequence will fill be found? Not after those before them were forgotten."""
        return not blocks.num_published or self._pages.is_published(blocks.pages[blocks.num_published - 1])

    def snapshot_slot(self, digest: Digest, *, all_layers: bool) -> int | None:
        """A slot for a snapshot under a name; None when there is one already, or no room. `keep_snapshot` or `drop_slot` it."""
        if self._slots.has(digest, all_layers=all_layers):
            return None
        return self._slots.take()

    def keep_snapshot(self, digest: Digest, snapshot: Snapshot, *, likely: bool = True) -> None:
        """The rings of a `snapshot_slot` are written. It lives as long as an exact page of its name (likely: `SlotPool.keep`)."""
        if self._pages.is_known(PageName(digest, True)):
            self._slots.keep(digest, snapshot, likely=likely)
        else:
            self._slots.give_back(snapshot.slot)

    def drop_slot(self, slot: int) -> None:
        """A `snapshot_slot` will not be written."""
        self._slots.give_back(slot)

    def restore(self, blocks: SequenceBlocks, snapshot: Snapshot) -> None:
        """Copy a snapshot's rings into a sequence's slot. Legal right after `open`, even if that took the snapshot's slot."""
        if snapshot.slot == blocks.slot:
            return
        for ring in self._rings:
            rows = ring.rows.view(self.sizes.num_slots + 1, -1)
            rows[blocks.slot].copy_(rows[snapshot.slot])

    def clear(self) -> int:
        """Forget all published pages and snapshots; sequences keep what they use. Returns the tokens forgotten."""
        return self._pages.clear() * self.page_tokens

    def _append(self, blocks: SequenceBlocks, pages: list[int]) -> None:
        had = len(blocks.pages)
        blocks.pages.extend(pages)
        self._table[blocks.slot, had : had + len(pages)] = torch.tensor(pages, device=self._table.device)

    def _forget_snapshot(self, name: PageName) -> None:
        if name.exact:
            self._slots.forget(name.digest)

    @staticmethod
    def _check_open(blocks: SequenceBlocks) -> None:
        if blocks.closed:
            raise RuntimeError(f"sequence in slot {blocks.slot} was closed already")
