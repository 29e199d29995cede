# SPDX-License-Identifier: Apache-2.0
"""Decode steps as recorded passes.

A decode step is a few hundred operations of microseconds; saying which costs more than carrying them out. So the operations of a
whole pass are recorded once per number of rows, and a step then only moves the pass's inputs to its sequences and has the kernel
library repeat it. A recorded pass and one that is run operation by operation give the same bits. A pass with an operation that
the library refuses is not recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cedar.cache.decode_rows import DecodeRows
from cedar.cache.rows import RowGeometry, Segment
from cedar.cache.store import BlockTable, Int64Array, KVCache
from cedar.model.transformer import Transformer
from cedar.ops.native import Recording, recording

MOST_GRAPHS, MOST_BYTES = 32, 512 << 20
"""Each holds the activations of its rows; those whose last use is longest ago are dropped."""


class DecodeGraph:
    """One recorded pass of ``rows`` single-row segments that see at most ``most`` entries each."""

    def __init__(
        self, model: Transformer, cache: KVCache, geometry: RowGeometry, tables: Mapping[int, BlockTable], rows: int, most: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._rows = DecodeRows(rows, geometry, tables, most)
        self._rotations = model.rotations(self._rows.plan)
        self._streams = torch.empty(rows, model.config.hc_mult, model.config.hidden_size, dtype=model.dtype)
        columns = model.config.engram_columns
        self._engram_rows = {layer: torch.zeros(rows, columns, dtype=torch.int64) for layer in model.config.engram_layer_ids}
        self._logits: Tensor
        self._recording: Recording | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._recording is None else self._recording.num_bytes

    def run(self, segments: Sequence[Segment], token_ids: Tensor, engram_rows: Mapping[int, Int64Array]) -> Tensor:
        """Logits float32 [rows, vocab] of one token of each segment."""
        self._rows.fill(segments)
        self._rotations.refresh()
        self._streams.copy_(self._model.streams(token_ids))
        for layer, rows in engram_rows.items():
            self._engram_rows[layer].copy_(torch.from_numpy(rows))
        if self._recording is None:
            self._record()
        else:
            self._recording.replay()
            self._model.work.repeat(len(segments))
        return self._logits.clone()

    def _record(self) -> None:
        plan, cache, rotations = self._rows.plan, self._cache, self._rotations
        with recording() as recorded:
            boundary = self._model.encode(self._streams, self._engram_rows, plan, cache, rotations)
            self._logits = self._model.logits(self._model.decode(boundary, plan, cache, rotations))
        if recorded.whole:
            self._recording = recorded


class DecodeGraphs:
    """Recorded passes by their number of rows and how many entries a row may see."""

    def __init__(self, model: Transformer, cache: KVCache, tables: Mapping[int, BlockTable]) -> None:
        self._model = model
        self._cache = cache
        self._geometry = RowGeometry.of(model.config)
        self._tables = {layer.ratio: tables[layer.ratio] for layer in model.config.layers if layer.ratio}
        self._graphs: OrderedDict[tuple[int, int], DecodeGraph] = OrderedDict()

    def run(self, segments: Sequence[Segment], token_ids: Tensor, engram_rows: Mapping[int, Int64Array]) -> Tensor:
        """See `DecodeGraph.run`."""
        longest = max(segment.start + 1 for segment in segments)
        most = max(self._geometry.topk + 1, 1 << (longest - 1).bit_length())
        key = len(segments), most
        graph = self._graphs.get(key) or DecodeGraph(self._model, self._cache, self._geometry, self._tables, *key)
        logits = graph.run(segments, token_ids, engram_rows)
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > 1 and (
            len(self._graphs) > MOST_GRAPHS or sum(other.num_bytes for other in self._graphs.values()) > MOST_BYTES
        ):
            self._graphs.popitem(last=False)
        return logits
