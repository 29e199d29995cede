# SPDX-License-Identifier: Apache-2.0
"""From a `StepWork` to the two ragged batches of a step: encoder rows and decoder rows.

Encoder rows: prefill chunks, then decodes. Decoder rows: kept rows of tails, then chunks of sequences without decoder-side
replay, then decodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cedar.cache.rows import RowGeometry, RowPlan, Segment, ragged_arange, window_positions
from cedar.cache.store import BlockTable, Int64Array
from cedar.config.model import ModelConfig
from cedar.engine.memory import ModelSequence
from cedar.engine.replay import KeptRows
from cedar.model.engram import EngramHasher
from cedar.model.state import WindowKeys
from cedar.model.transformer import Boundary


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one sequence: a prefill chunk or a decode. snapshots: see `Segment`."""

    seq: ModelSequence
    token_ids: Sequence[int]
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def segment(self) -> Segment:
        seq = self.seq
        return Segment(seq.blocks, seq.num_computed, len(self.token_ids), seq.replay_start, seq.write_floor, self.snapshots)


@dataclass(frozen=True)
class EncoderBatch:
    """Input of `Transformer.encode`. ``segments``, ``spans``: each chunk's and its rows."""

    segments: list[Segment]
    plan: RowPlan
    token_ids: Tensor
    engram_rows: dict[int, Tensor]
    spans: list[slice]


@dataclass(frozen=True)
class DecoderBatch:
    """Input of `Transformer.decode`. ``spans``: the rows of each tail, then of each decoder chunk."""

    plan: RowPlan
    boundary: Boundary
    spans: list[slice]


class BatchBuilder:
    """Builds batches for one model on one device."""

    def __init__(self, config: ModelConfig, hasher: EngramHasher, tables: Mapping[int, BlockTable], device: torch.device) -> None:
        self._geometry = RowGeometry.of(config)
        self._hasher = hasher
        self._device = device
        layers = config.layers
        self._encoder_tables = {layer.ratio: tables[layer.ratio] for layer in layers if layer.ratio}
        self._decoder_tables = {layer.ratio: tables[layer.ratio] for layer in layers[config.cut :] if layer.ratio}
        self.lookback = hasher.ngram - 1 if config.engram_layer_ids else 0

    def encoder(self, chunks: Sequence[Chunk]) -> EncoderBatch:
        """Rows of at least one chunk, each of a different sequence."""
        segments = [chunk.segment for chunk in chunks]
        plan = RowPlan.build(segments, self._geometry, self._encoder_tables, self._device, writes=True)
        ids, hashed = self.tokens(chunks)
        engram_rows = {layer: torch.from_numpy(rows) for layer, rows in hashed.items()}
        token_ids = torch.from_numpy(ids).to(self._device, non_blocking=True)
        return EncoderBatch(segments, plan, token_ids, engram_rows, _spans(plan))

    def tokens(self, chunks: Sequence[Chunk]) -> tuple[Int64Array, dict[int, Int64Array]]:
        """Token ids int64 [T] of the chunks' rows, and the table rows int64 [T, columns] of each Engram layer."""
        ids = np.concatenate([chunk.seq.with_history(chunk.token_ids) for chunk in chunks])
        counts = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
        at = ragged_arange(np.cumsum(counts) - counts + self.lookback * np.arange(1, len(chunks) + 1), counts)
        return ids[at], self._hasher.rows(ids[at[:, None] - np.arange(self.lookback + 1)]) if self.lookback else {}

    def decoder(
        self, tails: Sequence[ModelSequence], chunks: Sequence[int], encoded: tuple[EncoderBatch, Boundary] | None
    ) -> DecoderBatch:
        """Rows of ``tails`` and of some of the encoder batch's chunks (by number); at least one of either.

        When those are all rows of the encoder batch, its plan and boundary are used as they are.
        """
        if encoded is not None and not tails and len(chunks) == len(encoded[0].spans):
            return DecoderBatch(encoded[0].plan, encoded[1], encoded[0].spans)
        kept = [seq.seam.kept(seq.num_computed, seq.replay_start) for seq in tails]
        segments = [
            Segment(seq.blocks, rows.first, seq.num_computed - rows.first, max(rows.first, seq.replay_start))
            for seq, rows in zip(tails, kept, strict=True)
        ]
        streams, pre = [rows.streams for rows in kept], [rows.pre for rows in kept]
        table = _CutTable(self._geometry.window)
        for seq, rows in zip(tails, kept, strict=True):
            table.add_kept(rows, seq)
        if encoded is not None and chunks:
            batch, boundary = encoded
            spans = [batch.spans[number] for number in chunks]
            numbers = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            selected = torch.from_numpy(numbers).to(self._device)
            segments += [batch.segments[number] for number in chunks]
            streams.append(boundary.streams.index_select(0, selected))
            pre.append(boundary.pre.index_select(0, selected))
            table.add_rows(boundary.window.table, batch.plan.window_index[numbers], self._device)
        plan = RowPlan.build(segments, self._geometry, self._decoder_tables, self._device, writes=False, cut_index=table.index())
        records = table.records()
        return DecoderBatch(plan, Boundary(torch.cat(streams), torch.cat(pre), WindowKeys(records, records)), _spans(plan))


class _CutTable:
    """The window records that the cut layer's queries read when some rows come from seams, and each row's index into them."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._size = 1  # the null row
        self._records: list[Tensor] = []
        self._index: list[Int64Array] = []

    def add_kept(self, rows: KeptRows, seq: ModelSequence) -> None:
        """All kept rows of a sequence; their window reaches down to the replay start."""
        positions = np.arange(rows.first, seq.num_computed)
        seen, visible = window_positions(positions, np.full(positions.size, seq.replay_start), self._window)
        self._index.append(np.where(visible, seen - rows.window_first + self._size, 0))
        self._append(rows.records)

    def add_rows(self, table: Tensor, index: Int64Array, device: torch.device) -> None:
        """Rows of this step's encoder batch: ``index`` [n, W] into its ``table``. Only what they see is copied."""
        copied = np.arange(index.size).reshape(index.shape) + self._size
        self._index.append(np.where(index != 0, copied, 0))
        self._append(table.index_select(0, torch.from_numpy(index.reshape(-1)).to(device)))

    def _append(self, records: Tensor) -> None:
        self._records.append(records)
        self._size += records.shape[0]

    def index(self) -> Int64Array:
        return np.concatenate(self._index)

    def records(self) -> Tensor:
        null = torch.zeros_like(self._records[0][:1])
        return torch.cat([null, *self._records])


def _spans(plan: RowPlan) -> list[slice]:
    return [slice(start, stop) for start, stop in itertools.pairwise(plan.offsets.tolist())]
