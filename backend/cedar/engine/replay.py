# SPDX-License-Identifier: Apache-2.0
"""`EncodedSequence`: the seam between layers < cut and layers >= cut of one sequence.

A prompt's tokens all run through the encoder half, in chunks. The decoder half runs once, on the last rows only, when the prompt
is encoded. What it needs of them is kept here, in two rolling buffers: the boundary rows (the cut layer's input) and the cut
layer's window records, which reach W - 1 positions further back because that layer's own window is not clamped.

The number of rows kept decides what the result is (V4.1 report, bounded replay; n layers follow the cut layer, window W):

* BOUNDED: W rows. The layers after the cut see no window key of earlier rows, which changes the result slightly.
* EXACT: W + (n - 1)(W - 1) rows. Each layer after the cut loses W - 1 rows at the front to the clamp; enough are left that the
  last row's output and every window ring of the last W positions are those of the full run.
* OFF: none. Every chunk runs all layers when it is encoded, and the last row's final hidden state waits here for its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.cache.records import RecordFormat, record_bytes
from cedar.config.model import ModelConfig
from cedar.engine.request import DecoderReplay


def boundary_rows(config: ModelConfig) -> dict[DecoderReplay, int]:
    """Rows that each mode keeps of a prompt that is long enough."""
    window, after = config.sliding_window, config.num_hidden_layers - 1 - config.cut
    halo = max(window, window + (after - 1) * (window - 1))
    return {DecoderReplay.BOUNDED: window, DecoderReplay.EXACT: halo, DecoderReplay.OFF: 0}


@dataclass(frozen=True)
class SeamSizes:
    """What the seams of a model hold. rows: boundary rows by mode; a row is streams [hc, D] and pre float32 [hc]."""

    rows: dict[DecoderReplay, int]
    window: int
    layers_after_cut: int
    streams: tuple[int, int]
    dtype: torch.dtype
    record: RecordFormat

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, record: RecordFormat) -> SeamSizes:
        window, after = config.sliding_window, config.num_hidden_layers - 1 - config.cut
        return cls(boundary_rows(config), window, after, (config.hc_mult, config.hidden_size), dtype, record)

    def kept_rows(self, mode: DecoderReplay, num_tokens: int | None = None) -> int:
        """Boundary rows kept of a prompt of ``num_tokens``; None: of one that is long enough."""
        return self.rows[mode] if num_tokens is None else min(self.rows[mode], num_tokens)

    def record_rows(self, mode: DecoderReplay, num_tokens: int | None = None) -> int:
        """Window records kept: those of the boundary rows and of the W - 1 positions before the first."""
        if not self.rows[mode]:
            return 0
        rows = self.rows[mode] + self.window - 1
        return rows if num_tokens is None else min(rows, num_tokens)

    def bytes(self, mode: DecoderReplay, num_tokens: int | None = None) -> int:
        """What a sequence is charged for from its opening to the end of its first decoder pass."""
        hc, hidden = self.streams
        if not self.rows[mode]:
            return hidden * self.dtype.itemsize
        rows, records = self.kept_rows(mode, num_tokens), self.record_rows(mode, num_tokens)
        return rows * (hc * hidden * self.dtype.itemsize + hc * 4) + records * record_bytes(self.record)


@dataclass(frozen=True)
class KeptRows:
    """Boundary rows [first, end) and the cut layer's window records [window_first, end) of one sequence."""

    first: int
    streams: Tensor
    pre: Tensor
    window_first: int
    records: Tensor


class EncodedSequence:
    """Rolling buffers of one sequence; position p lives in row p % size. Allocated by the first `append`: a sequence may be
    opened and closed again many times before it has memory for its prompt. Gone after `release`."""

    def __init__(self, sizes: SeamSizes, mode: DecoderReplay, device: torch.device, num_tokens: int | None = None) -> None:
        """num_tokens: of the prompt, if it is known; a short one needs fewer rows."""
        self.sizes = sizes
        self.mode = mode
        self._num_tokens = num_tokens
        self.last_hidden: Tensor | None = None
        self._device = device
        self._buffers: tuple[Tensor, ...] = ()

    def append(self, start: int, streams: Tensor, pre: Tensor, records: Tensor) -> None:
        """Boundary rows and window records of positions [start, start + rows), which follow those appended before."""
        end = start + streams.shape[0]
        self._buffers = self._buffers or self._allocate()
        for buffer, new in zip(self._buffers, (streams, pre, records), strict=True):
            kept = min(new.shape[0], buffer.shape[0])
            buffer.index_copy_(0, self._rows(buffer, end - kept, end), new[new.shape[0] - kept :])

    def seed(self, start: int, records: Tensor) -> None:
        """Window records of positions [start, start + rows) from before the first `append`: a restored window."""
        self._buffers = self._buffers or self._allocate()
        if self._buffers[2].shape[0]:
            self._buffers[2].index_copy_(0, self._rows(self._buffers[2], start, start + records.shape[0]), records)

    def first_kept(self, end: int, floor: int) -> int:
        """The first row that the decoder half runs on when positions [floor, end) were encoded."""
        return max(floor, end - self.sizes.rows[self.mode], 0)

    def first_exact(self, end: int, floor: int) -> int:
        """The first row whose output is what the mode promises: all kept rows, except the halo of EXACT."""
        first = self.first_kept(end, floor)
        if self.mode is not DecoderReplay.EXACT or first == max(floor, 0):
            return first
        return first + self.sizes.layers_after_cut * (self.sizes.window - 1)

    def kept(self, end: int, floor: int) -> KeptRows:
        """The kept rows of a sequence whose positions [floor, end) were encoded."""
        first = self.first_kept(end, floor)
        window_first = max(floor, first - self.sizes.window + 1, 0)
        streams, pre, records = (
            buffer.index_select(0, self._rows(buffer, begin, end))
            for buffer, begin in zip(self._buffers, (first, first, window_first), strict=True)
        )
        return KeptRows(first, streams, pre, window_first, records)

    def release(self) -> None:
        """Drop the rows; the memory is free at once."""
        self.last_hidden = None
        self._buffers = ()

    def _allocate(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        rows, records = sizes.kept_rows(self.mode, self._num_tokens), sizes.record_rows(self.mode, self._num_tokens)
        return (
            torch.empty(rows, *sizes.streams, dtype=sizes.dtype, device=self._device),
            torch.empty(rows, sizes.streams[0], device=self._device),
            torch.empty(records, sizes.record.width, dtype=sizes.record.dtype, device=self._device),
        )

    @staticmethod
    def _rows(buffer: Tensor, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=buffer.device) % buffer.shape[0]
