# SPDX-License-Identifier: Apache-2.0
"""`RowPlan`: every index tensor that the layers of one ragged batch need, computed once per step on the host.

A batch is a list of segments: consecutive positions of one sequence each. Rows are the segments' positions laid end to end,
so nothing is padded to the longest sequence and no layer loops over sequences. The work depends on the rows, not on how far
their sequences are: where a compressed entry lies is looked up in the block table on the device, when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cedar.cache.store import BlockTable, Int64Array, SequenceBlocks
from cedar.config.model import ModelConfig

BoolArray = npt.NDArray[np.bool_]

TILE_ELEMENTS = 1 << 23
"""float32 elements that one tile of index scores or gathered keys may hold (32 MiB)."""


@dataclass(frozen=True)
class Segment:
    """Rows [start, start + count) of one sequence.

    window_floor: no window key below this position is visible (replay start, or first kept row).
    write_floor: compressed groups that end at or below this position exist already and are not written again.
    snapshots: (position, slot): the rings as they are after positions below it are copied to that slot; start < position <= end.
    """

    blocks: SequenceBlocks
    start: int
    count: int
    window_floor: int = 0
    write_floor: int = 0
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RowGeometry:
    """The sizes that decide index tensors."""

    window: int
    topk: int
    index_heads: int
    index_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> RowGeometry:
        return cls(config.sliding_window, config.index_topk, config.index_n_heads, config.index_head_dim)


@dataclass(frozen=True)
class WindowPlan:
    """Where the window keys of a step's rows come from and go. Ring rows are those of `KVCache.window`.

    history: int64 [h] ring rows to read before this step's records are stored; keys are looked up in (those records ++ the
    step's own, in row order). None when every segment has one row: then the step's records are stored first and keys are
    looked up in the ring itself, because a new position replaces exactly the one that left its window.
    store_from: int64 rows whose records go into the ring (the last W of each segment); None: all. store_to: their ring rows.
    snapshot_from: int64 records of that table that snapshots take; None: there are no snapshots. snapshot_to: their ring rows.
    """

    history: Tensor | None
    store_from: Tensor | None
    store_to: Tensor
    snapshot_from: Tensor | None = None
    snapshot_to: Tensor | None = None


@dataclass(frozen=True)
class WindowView:
    """The window keys of each row, in a table of records whose row 0 is null.

    index: int64 [T, W] by ascending position; 0: masked.
    """

    index: Tensor


@dataclass(frozen=True)
class WritePlan:
    """The compressed groups of one ratio that end in this step (and are not suppressed).

    rows: int64 [g] the row that ends each group; None: every row. slots: int64 [g] entry rows of the pools.
    positions: int64 [g] first token of the group. first: int64 [g] the other row of a ratio-2 group, in the table
    (open rows of slots ``open_from`` ++ the step's rows). open_rows/open_to: rows that leave their group open, and their slots.
    masked: slots and open_to may hold -1, where nothing is stored.
    """

    rows: Tensor | None
    slots: Tensor
    positions: Tensor
    first: Tensor | None = None
    open_from: Tensor | None = None
    open_rows: Tensor | None = None
    open_to: Tensor | None = None
    masked: bool = False


@dataclass(frozen=True)
class ScoreTile:
    """Rows [start, stop) scored together: ``groups`` sequences with equally many rows each.

    num_keys: the most entries that a row of the tile sees. slots: int64 [groups] of the sequences, None when ``num_keys`` is at
    most top-k and nothing needs a score. visible: int64 [rows], None when all rows see all keys.
    """

    start: int
    stop: int
    groups: int
    num_keys: int
    slots: Tensor | None
    visible: Tensor | None


@dataclass(frozen=True)
class EntryPlan:
    """What rows see of the compressed entries of one ratio: row p sees entries j < n(p) = (p + 1) // ratio.

    table: where entries lie. width: selected entries per row, min(top-k, largest n). visible: int64 [T] n(p). base: int64
    [T, 1] the rows' `BlockTable.base`. index/slots: int64 [T, width] the whole selection (-1 / 0: none) and its pool rows when
    no row sees more than top-k; None: score the tiles. ragged: some row selects fewer than ``width``.
    """

    table: BlockTable
    width: int
    visible: Tensor
    base: Tensor
    index: Tensor | None
    slots: Tensor | None
    tiles: tuple[ScoreTile, ...]
    ragged: bool
    write: WritePlan | None

    def pool_rows(self, index: Tensor) -> Tensor:
        """Pool rows int64 [T, width] of a selection int64 [T, width]; -1, and only in a ragged one: row 0."""
        if not self.ragged:
            return self.table.rows(self.base, index)
        return self.table.rows(self.base, index.clamp_min(0)).masked_fill_(index < 0, 0)


@dataclass(frozen=True)
class RowPlan:
    """Index tensors of one batch, on the device.

    offsets (host): first row of each segment, and the number of rows. positions: int64 [T]. view: the window keys in the table
    that ``window`` describes. cut_view: those of the cut layer's queries; another table when rows were kept from earlier steps.
    window_index (host): ``view.index``.
    """

    num_rows: int
    offsets: Int64Array
    positions: Tensor
    window: WindowPlan
    view: WindowView
    cut_view: WindowView
    window_index: Int64Array
    entries: dict[int, EntryPlan]

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        geometry: RowGeometry,
        tables: Mapping[int, BlockTable],
        device: torch.device,
        *,
        writes: bool,
        cut_index: Int64Array | None = None,
        tile_elements: int = TILE_ELEMENTS,
    ) -> RowPlan:
        """Plan a batch of at least one segment, each of at least one row and of a different sequence.

        tables: block table of each compress ratio that the batch's layers use. writes: its layers write compressed entries
        (encoder rows).
        cut_index: [T, W] index of ``cut_view``, 0: masked; None: the same as ``view``.
        Raises RuntimeError when positions have no pages.
        """
        return _Builder(segments, geometry, device, writes, tile_elements).plan(tables, cut_index)


def ragged_arange(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """starts[0], starts[0]+1, … (counts[0] numbers), starts[1], …"""
    before = np.cumsum(counts) - counts
    numbers: Int64Array = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return numbers


def window_positions(positions: Int64Array, floor: Int64Array, window: int) -> tuple[Int64Array, BoolArray]:
    """The W positions ending at each row's own, ascending [T, W], and which of them are at or above the row's floor."""
    seen = positions[:, None] + np.arange(1 - window, 1)
    return seen, seen >= floor[:, None]


class _Builder:
    """The batch's arithmetic: one numpy array per quantity, a row or a segment per element."""

    def __init__(
        self, segments: Sequence[Segment], geometry: RowGeometry, device: torch.device, writes: bool, tile_elements: int
    ) -> None:
        self.segments = segments
        self.geometry = geometry
        self.device = device
        self.writes = writes
        self.tile_elements = tile_elements
        self.start = np.array([s.start for s in segments], np.int64)
        self.count = np.array([s.count for s in segments], np.int64)
        self.end = self.start + self.count
        self.slot = np.array([s.blocks.slot for s in segments], np.int64)
        self.window_floor = np.array([max(s.window_floor, 0) for s in segments], np.int64)
        self.write_floor = np.array([s.write_floor for s in segments], np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.count)])
        self.offset = self.offsets[:-1]
        self.num_rows = int(self.offsets[-1])
        self.segment_of = np.repeat(np.arange(len(segments)), self.count)
        self.position = ragged_arange(self.start, self.count)
        self.seen, self.in_window = window_positions(self.position, self.window_floor[self.segment_of], geometry.window)

    def plan(self, tables: Mapping[int, BlockTable], cut_index: Int64Array | None) -> RowPlan:
        """Where these rows read and write, by ratio. cut_index: the cut layer's window if it reads another than the rings."""
        window, index = self._window()
        entries = {ratio: self._entry_plan(ratio, table) for ratio, table in tables.items()}
        view = WindowView(self._tensor(index))
        return RowPlan(
            num_rows=self.num_rows,
            offsets=self.offsets,
            positions=self._tensor(self.position),
            window=window,
            view=view,
            cut_view=view if cut_index is None else WindowView(self._tensor(cut_index)),
            window_index=index,
            entries=entries,
        )

    def _selected(self, ratio: int, width: int) -> BoolArray:
        """Which of ``width`` selected entries a row has: as many as it sees, first ones first."""
        return np.arange(width) < ((self.position + 1) // ratio)[:, None]

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def _window(self) -> tuple[WindowPlan, Int64Array]:
        size = self.geometry.window
        kept = np.minimum(self.count, size)
        from_rows = ragged_arange(self.offset + self.count - kept, kept)
        to_rings = np.repeat(self.slot, kept) * size + ragged_arange(self.end - kept, kept) % size
        store_from = None if from_rows.size == self.num_rows else self._tensor(from_rows)
        if self.num_rows == len(self.segments):
            index = np.where(self.in_window, self.slot[:, None] * size + self.seen % size, 0)
            return WindowPlan(None, store_from, self._tensor(to_rings), *self._snapshots(index)), index
        first = np.minimum(np.maximum(self.start - size + 1, self.window_floor), self.start)
        before = self.start - first
        history = np.repeat(self.slot, before) * size + ragged_arange(first, before) % size
        history = np.concatenate([[0], history])
        in_history = (1 + np.cumsum(before) - before - first)[self.segment_of]
        in_step = (history.size + self.offset - self.start)[self.segment_of]
        table_offset = np.where(self.seen < self.start[self.segment_of][:, None], in_history[:, None], in_step[:, None])
        index = np.where(self.in_window, self.seen + table_offset, 0)
        return WindowPlan(self._tensor(history), store_from, self._tensor(to_rings), *self._snapshots(index)), index

    def _snapshots(self, index: Int64Array) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What the row before a snapshot's position sees is what its rings hold."""
        size = self.geometry.window
        taken = [(n, position, slot) for n, segment in enumerate(self.segments) for position, slot in segment.snapshots]
        if not taken:
            return None, None
        rows = np.array([self.offset[n] + position - 1 - self.start[n] for n, position, _ in taken])
        slots = np.array([slot for *_, slot in taken])
        seen = self.in_window[rows]
        to_rings = slots[:, None] * size + self.seen[rows] % size
        return self._tensor(index[rows][seen]), self._tensor(to_rings[seen])

    def _entry_plan(self, ratio: int, table: BlockTable) -> EntryPlan:
        self._check_reserved(ratio, table)
        visible = (self.position + 1) // ratio
        largest = int(visible.max())
        width = min(self.geometry.topk, largest)
        selected = self._selected(ratio, width)
        scored = largest > self.geometry.topk
        plan = EntryPlan(
            table=table,
            width=width,
            visible=self._tensor(visible),
            base=self._tensor(table.base(self.slot)[self.segment_of][:, None]),
            index=None if scored else self._tensor(np.where(selected, np.arange(width), -1)),
            slots=None,
            tiles=self._tiles(visible, ratio) if scored else (),
            ragged=not bool(selected.all()),
            write=self._write(ratio, table) if self.writes else None,
        )
        return plan if plan.index is None else replace(plan, slots=plan.pool_rows(plan.index))

    def _check_reserved(self, ratio: int, table: BlockTable) -> None:
        for segment in self.segments:
            end, entries = segment.start + segment.count, len(segment.blocks.pages) * table.per_page
            if entries < end // ratio:
                raise RuntimeError(f"positions up to {end} are not reserved: {entries} of {end // ratio} entries have pages")

    def _write(self, ratio: int, table: BlockTable) -> WritePlan:
        ends = (self.position + 1) % ratio == 0
        ends &= self.position >= self.write_floor[self.segment_of]
        rows = np.flatnonzero(ends)
        group = self.position[rows] // ratio
        segment = self.segment_of[rows]
        slots = table.rows(self._tensor(table.base(self.slot[segment])), self._tensor(group))
        positions = self._tensor(group * ratio)
        if ratio == 1:
            return WritePlan(None if rows.size == self.num_rows else self._tensor(rows), slots, positions)
        from_open = self.position[rows] == self.start[segment]
        open_from = self.slot[segment[from_open]]
        first = np.where(from_open, np.cumsum(from_open) - 1, open_from.size + rows - 1)
        left_open = np.flatnonzero(self.end % 2)
        return WritePlan(
            rows=self._tensor(rows),
            slots=slots,
            positions=positions,
            first=self._tensor(first),
            open_from=self._tensor(open_from) if open_from.size else None,
            open_rows=self._tensor(self.offset[left_open] + self.count[left_open] - 1) if left_open.size else None,
            open_to=self._tensor(self.slot[left_open]) if left_open.size else None,
        )

    def _tiles(self, visible: Int64Array, ratio: int) -> tuple[ScoreTile, ...]:
        """Cut the rows into tiles: single-row segments in runs, longer ones alone, each within the element budget."""
        key_cost = self.geometry.index_heads + self.geometry.index_dim
        tiles: list[ScoreTile] = []
        slots = self._tensor(self.slot)
        segment = 0
        while segment < len(self.segments):
            if self.count[segment] > 1:
                start, end = self.offset[segment], self.offset[segment] + self.count[segment]
                most = max(1, self.tile_elements // (int(visible[end - 1]) * self.geometry.index_heads))
                here = slots[segment : segment + 1]
                tiles.extend(self._tile(visible, here, row, min(row + most, end)) for row in range(start, end, most))
                segment += 1
                continue
            run, largest = segment, 0
            while segment < len(self.segments) and self.count[segment] == 1:
                longer = max(largest, int(self.end[segment]) // ratio)
                if segment > run and (segment + 1 - run) * longer * key_cost > self.tile_elements:
                    break
                segment, largest = segment + 1, longer
            tiles.append(self._tile(visible, slots[run:segment], self.offset[run], self.offsets[segment]))
        return tuple(tiles)

    def _tile(self, visible: Int64Array, slots: Tensor, start: int, stop: int) -> ScoreTile:
        rows = visible[start:stop]
        num_keys = int(rows.max())
        ragged = bool((rows < num_keys).any())
        scored = num_keys > self.geometry.topk
        return ScoreTile(
            int(start), int(stop), len(slots), num_keys, slots if scored else None, self._tensor(rows) if ragged else None
        )
