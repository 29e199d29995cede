# SPDX-License-Identifier: Apache-2.0
"""`DecodeRows`: the plan of a step in which every sequence has one row, in tensors that stay where they are.

A recorded pass (`cedar.engine.graphs`) reads them again and again, so their shapes do not depend on where the sequences are: the
selection always has top-k columns, every row has a group to write, and what a row does not have is masked by a negative number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cedar.cache.rows import EntryPlan, RowGeometry, RowPlan, ScoreTile, Segment, WindowPlan, WindowView, WritePlan
from cedar.cache.store import BlockTable, Int64Array


class DecodeRows:
    """``plan`` is that of ``rows`` single-row segments of a CPU batch; `fill` moves it to a step's segments.

    most: the entries that a row may see at most, by ratio.
    """

    def __init__(self, rows: int, geometry: RowGeometry, tables: Mapping[int, BlockTable], most: int) -> None:
        self._window = geometry.window
        self._tables = tables
        self._numbers: Int64Array = np.arange(rows, dtype=np.int64)
        self._position, position = _pair(rows)
        self._index, index = _pair(rows, geometry.window)
        self._store_to, store_to = _pair(rows)
        self._visible, self._base, self._slots, self._first_token = {}, {}, {}, {}
        self._open_from, open_from = _pair(rows)
        self._open_to, open_to = _pair(rows)
        numbers = torch.from_numpy(self._numbers)
        entries = {}
        for ratio, table in tables.items():
            self._visible[ratio], visible = _pair(rows)
            self._base[ratio], base = _pair(rows, 1)
            self._slots[ratio], slots = _pair(rows)
            self._first_token[ratio], first_token = _pair(rows)
            write = WritePlan(numbers, slots, first_token, masked=True)
            if ratio == 2:
                write = replace(write, first=numbers, open_from=open_from, open_rows=numbers, open_to=open_to)
            entries[ratio] = EntryPlan(
                table=table,
                width=geometry.topk,
                visible=visible,
                base=base,
                index=None,
                slots=None,
                tiles=(ScoreTile(0, rows, rows, most, None, visible),),
                ragged=True,
                write=write,
            )
        view = WindowView(index)
        window = WindowPlan(None, None, store_to)
        self.plan = RowPlan(rows, np.arange(rows + 1), position, window, view, view, self._index, entries)

    def fill(self, segments: Sequence[Segment]) -> None:
        """Segments of one row each, as many as the plan has rows, without snapshots. Raises RuntimeError if pages are missing."""
        position = self._position
        position[:] = [segment.start for segment in segments]
        slot = np.array([segment.blocks.slot for segment in segments], np.int64)
        floor = np.array([max(segment.window_floor, 0) for segment in segments], np.int64)
        seen = position[:, None] + np.arange(1 - self._window, 1)
        np.copyto(self._index, np.where(seen >= floor[:, None], slot[:, None] * self._window + seen % self._window, 0))
        np.copyto(self._store_to, slot * self._window + position % self._window)
        written = position >= [segment.write_floor for segment in segments]
        np.copyto(self._open_from, slot)
        np.copyto(self._open_to, np.where(position % 2 == 0, slot, -1))
        for ratio, table in self._tables.items():
            group = position // ratio
            ends = ((position + 1) % ratio == 0) & written
            pages = [_page(segment, number) for segment, number in zip(segments, (group // table.per_page).tolist(), strict=True)]
            np.copyto(self._visible[ratio], (position + 1) // ratio)
            np.copyto(self._base[ratio], table.base(slot)[:, None])
            np.copyto(self._slots[ratio], np.where(ends, np.array(pages) * table.per_page + group % table.per_page, -1))
            np.copyto(self._first_token[ratio], group * ratio)


def _pair(*shape: int) -> tuple[Int64Array, Tensor]:
    """An array and a tensor on the same memory."""
    array: npt.NDArray[np.int64] = np.zeros(shape, np.int64)
    return array, torch.from_numpy(array)


def _page(segment: Segment, number: int) -> int:
    pages = segment.blocks.pages
    if number >= len(pages):
        raise RuntimeError(f"position {segment.start} is not reserved: it lies in page {number} of {len(pages)}")
    return pages[number]
