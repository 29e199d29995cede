# SPDX-License-Identifier: Apache-2.0
"""Cache records: how one vector is stored, and pools of such records addressed by row number.

Model code writes records to row numbers and reads them back through index tensors; only `cedar.cache` knows what a record
looks like. The packed formats are in `cedar.cache.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PLANAR_ROWS = 8
"""Rows that share a block of a planar pool."""


class RecordFormat(Protocol):
    """One way to store a vector of ``dim`` values in ``width`` elements of ``dtype``."""

    @property
    def dim(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the parts that a pool keeps in planes of their own, in order; one part: records stay whole."""

    def encode(self, values: Tensor) -> Tensor:
        """Values [..., dim] in the compute dtype -> records [..., width]."""

    def decode(self, records: Tensor) -> Tensor:
        """Records [..., width] -> float32 [..., dim], exactly the values they stand for. Zero records are zeros."""


def record_bytes(record: RecordFormat) -> int:
    """Bytes of one record."""
    return record.width * record.dtype.itemsize


@dataclass(frozen=True)
class FloatRecords:
    """The values themselves, in the compute dtype."""

    dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return self.dim

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.dim,)

    def encode(self, values: Tensor) -> Tensor:
        return values

    def decode(self, records: Tensor) -> Tensor:
        return records.float()


@dataclass(frozen=True)
class CacheFormats:
    """The record format of each kind of cache."""

    window: RecordFormat
    kv: RecordFormat
    index_key: RecordFormat


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU untouched pages take no memory and no time, unlike those of `torch.zeros`."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class RecordPool:
    """``rows`` [num_rows, width]. Row 0 is the null row: zeros, never written; masked indices read it.

    A null row rather than a clamped index keeps one sequence's non-finite values out of another's sums (0 * nan is nan).
    """

    def __init__(self, record: RecordFormat, rows: Tensor) -> None:
        self.record = record
        self.rows = rows

    @staticmethod
    def allocate(record: RecordFormat, num_rows: int, device: torch.device) -> RecordPool:
        """A pool of zeros, planar when the format has planes."""
        pool = RecordPool if len(record.planes) == 1 else PlanarPool
        return pool(record, lazy_zeros((num_rows, record.width), record.dtype, device))

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.rows.nbytes

    def store(self, records: Tensor, rows: Tensor) -> None:
        """Write records [n, width] to row numbers int64 [n] (distinct)."""
        self.rows.index_copy_(0, rows, records)

    def load(self, rows: Tensor) -> Tensor:
        """Records [n, width] of row numbers int64 [n]."""
        return self.rows.index_select(0, rows)

    def load_pages(self, pages: Tensor, per_page: int) -> Tensor:
        """Records [n, pages * per_page, width] of whole pages int64 [n, pages], ``per_page`` rows each."""
        records = self.rows.view(-1, per_page * self.record.width).index_select(0, pages.flatten())
        return records.view(pages.shape[0], -1, self.record.width)


class PlanarPool(RecordPool):
    """Blocks of 8 rows hold the first part of the 8 records, then their second part, and so on (`RecordFormat.planes`).

    Row r is lane r % 8 of block r // 8; a whole page of rows is the same bytes in both kinds of pool. ``rows`` is the memory:
    what one of its rows holds is part of a block, not a record. Records are whole outside of the pool.
    """

    def __init__(self, record: RecordFormat, rows: Tensor) -> None:
        if rows.dtype != torch.uint8 or rows.shape[0] % PLANAR_ROWS:
            raise ValueError(f"planar pool: needs uint8 rows in blocks of {PLANAR_ROWS}, got {rows.dtype} {tuple(rows.shape)}")
        super().__init__(record, rows)
        self._planes = [_widest(plane) for plane in self._split(rows.view(-1, PLANAR_ROWS * record.width))]

    def _split(self, blocks: Tensor) -> list[Tensor]:
        """Bytes of blocks [..., 8 * width] -> for each part of the records a view [..., 8, bytes of the part]."""
        parts = self.record.planes
        planes = blocks.split_with_sizes([PLANAR_ROWS * part for part in parts], -1)
        return [plane.view(*plane.shape[:-1], PLANAR_ROWS, part) for plane, part in zip(planes, parts, strict=True)]

    def store(self, records: Tensor, rows: Tensor) -> None:
        place = (rows >> 3, rows & 7)
        for plane, part in zip(self._planes, records.split_with_sizes(self.record.planes, 1), strict=True):
            plane.view(torch.uint8).index_put_(place, part)

    def load(self, rows: Tensor) -> Tensor:
        place = (rows >> 3, rows & 7)
        return torch.cat([plane[place].view(torch.uint8) for plane in self._planes], 1)

    def load_pages(self, pages: Tensor, per_page: int) -> Tensor:
        blocks = super().load_pages(pages, per_page).view(pages.shape[0], -1, PLANAR_ROWS * self.record.width)
        return torch.cat(self._split(blocks), -1).flatten(1, 2)


def _widest(plane: Tensor) -> Tensor:
    """The same bytes [..., n] in the largest integers that n is a multiple of: fewer elements to index one by one."""
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return plane.view(next(dtype for size, dtype in sizes.items() if plane.shape[-1] % size == 0))


@dataclass(frozen=True)
class RecordView:
    """Keys that rows of a batch attend to: row t's are the records ``index[t]`` (int64 [T, n]; 0: none) of a pool."""

    pool: RecordPool
    index: Tensor

    @cached_property
    def _decoded(self) -> Tensor | None:
        """The whole pool decoded, when that is less work than decoding whatever each row looks up."""
        whole = len(self.pool.record.planes) == 1 and self.pool.rows.shape[0] <= self.index.numel()
        return self.pool.record.decode(self.pool.rows) if whole else None

    def values(self, start: int, stop: int) -> Tensor:
        """Keys of rows [start, stop): float32 [stop - start, n, dim]."""
        index = self.index[start:stop]
        rows = index.flatten()
        table = self._decoded
        keys = self.pool.record.decode(self.pool.load(rows)) if table is None else table.index_select(0, rows)
        return keys.view(*index.shape, self.pool.record.dim)
