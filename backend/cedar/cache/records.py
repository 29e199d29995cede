# SPDX-License-Identifier: Apache-2.0
"""Cache records: how one vector is stored, and pools of such records addressed by row number.

Model code writes records to row numbers and reads them back through index tensors; only this file and the pools' owner
(`cedar.cache.store`) know what a record looks like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class RecordFormat(Protocol):
    """One way to store a vector of ``dim`` values in ``width`` elements of ``dtype``."""

    @property
    def dim(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def encode(self, values: Tensor) -> Tensor:
        """Values [..., dim] in the compute dtype -> records [..., width]."""

    def decode(self, records: Tensor) -> Tensor:
        """Records [..., width] -> the values [..., dim] they stand for, in the compute dtype. Zero records are zeros."""


def record_bytes(record: RecordFormat) -> int:
    """Bytes of one record."""
    return record.width * record.dtype.itemsize


@dataclass(frozen=True)
class FloatRecords:
    """Values in the compute dtype after ``quantise`` (a fake quantiser of `cedar.model.quantize`, or None for the identity)."""

    dim: int
    dtype: torch.dtype
    quantise: Callable[[Tensor], Tensor] | None = None

    @property
    def width(self) -> int:
        return self.dim

    def encode(self, values: Tensor) -> Tensor:
        return values if self.quantise is None else self.quantise(values)

    def decode(self, records: Tensor) -> Tensor:
        return records


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

    @classmethod
    def allocate(cls, record: RecordFormat, num_rows: int, device: torch.device) -> RecordPool:
        return cls(record, lazy_zeros((num_rows, record.width), record.dtype, device))

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


@dataclass(frozen=True)
class RecordView:
    """Keys that rows of a batch attend to: row t's are the records ``index[t]`` (int64 [T, n]; 0: none) of a pool."""

    pool: RecordPool
    index: Tensor

    def values(self, start: int, stop: int) -> Tensor:
        """Decoded keys of rows [start, stop): [stop - start, n, dim]."""
        rows = self.index[start:stop]
        return self.pool.record.decode(self.pool.load(rows.flatten())).view(*rows.shape, self.pool.record.dim)
