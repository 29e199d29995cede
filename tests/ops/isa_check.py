# SPDX-License-Identifier: Apache-2.0
"""Run by `test_native_abi` in a process of its own: every operation with one instruction set, its results in a file."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cedar.cache.formats import pack_fp8
from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import FloatRecords, RecordFormat, RecordPool
from cedar.ops import native
from cedar.ops.abi import OPERATIONS

ROWS, HEADS, DIM, INDEX_DIM, PAIRS = 9, 3, 96, 64, 10
POOL, PAGE, VISIBLE, TOP_K, BLOCK, PUBLISH = 160, 16, 130, 12, 4, 9
Results = list[Tensor]


class Cases:
    """Inputs of one compute dtype; ``packed``: records as released, and rounded activations. Sizes leave tails everywhere."""

    def __init__(self, dtype: torch.dtype, packed: bool) -> None:
        self._g = torch.Generator().manual_seed(0)
        self.dtype, self.packed = dtype, packed
        angle = self._normal(ROWS, PAIRS)
        self.angle = (angle.cos(), angle.sin())

    def _normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """float32."""
        return torch.randn(shape, generator=self._g) * scale

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Compute dtype."""
        return self._normal(*shape, scale=scale).to(self.dtype)

    def _below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=self._g)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype)

    def _pool(self, packed: RecordFormat) -> tuple[RecordPool, int]:
        """A pool full of records and the code of its format."""
        record = packed if self.packed else FloatRecords(packed.dim, self.dtype)
        pool = RecordPool.allocate(record, POOL, torch.device("cpu"))
        pool.store(record.encode(self._draw(POOL - 1, record.dim)), torch.arange(1, POOL))
        return pool, native.record_code(record)

    def _weight(self, outputs: int, inputs: int) -> list[tuple[Tensor, Tensor | None]]:
        """A weight in each type that linears read: compute dtype, bfloat16, E4M3 with a scale per 32 x 32."""
        weight = self._normal(outputs, inputs, scale=inputs**-0.5)
        tiles = (-(-outputs // 32), -(-inputs // 32))
        scale = (120 + self._below(4, *tiles)).to(torch.uint8)
        return [(weight.to(self.dtype), None), (weight.bfloat16(), None), ((weight * 99).to(torch.float8_e4m3fn), scale)]

    def mega_mhc(self, run: Any) -> Results:
        hidden, hc = 50, 4
        new = [self._empty(ROWS, hc, hidden), *(torch.zeros(ROWS, *shape) for shape in ((hc,), (hc,), (hc, hc)))]
        new.append(self._empty(ROWS, hidden))
        written = (self._normal(ROWS, hc), self._normal(ROWS, hc, hc), self._normal(ROWS, hc))
        mixing = (self._normal(24, hc * hidden, scale=0.1), self._normal(24), self._normal(24))
        streams = (self._draw(ROWS, hidden), self._draw(ROWS, hc, hidden))
        run(*streams, *written, *mixing, self._normal(hidden), *new, 20, 1e-6, 1e-20, 1e-20)
        return new

    def mega_gate(self, run: Any) -> Results:
        ids, weights = self._empty(ROWS, 3, dtype=torch.int64), torch.zeros(ROWS, 3)
        image = torch.arange(ROWS) % 2 == 0
        bias = (self._normal(17), self._normal(17))
        run(self._draw(ROWS, 77), self._draw(17, 77, scale=0.1), *bias, image, ids, weights, 1.5)
        return [ids, weights]

    def moe_fp4(self, run: Any) -> Results:
        hidden, inner, experts = (64, 96, 5) if self.packed else (50, 35, 5)
        routed = [self._draw(experts, 2 * inner, hidden, scale=0.1), self._draw(experts, hidden, inner, scale=0.1)]
        shared = [self._draw(2 * inner, hidden, scale=0.1), self._draw(hidden, inner, scale=0.1)]
        weights = [part for weight in (*routed, *shared) for part in (weight, None)]
        out = self._empty(ROWS, hidden)
        run(self._draw(ROWS, hidden), self._below(experts, ROWS, 2), self._normal(ROWS, 2), *weights, out, self.packed, 1.0)
        return [out]

    def mxfp8_linear(self, run: Any) -> Results:
        outputs, inputs = 35, 96 if self.packed else 77
        results = []
        for weight, norm in product(self._weight(outputs, inputs), (None, self._normal(outputs))):
            y = self._empty(ROWS, outputs)
            run(self._draw(ROWS, inputs), *weight, norm, y, self.packed, 1e-6)
            results.append(y)
        return results

    def wo_a(self, run: Any) -> Results:
        groups, inputs, rank = 3, 77, 21
        results = []
        for weight in self._weight(groups * rank, inputs):
            results.append(self._empty(ROWS, groups * rank))
            run(self._draw(ROWS, groups * inputs), *weight, results[-1], groups, inputs, rank)
        return results

    def window_store(self, run: Any) -> Results:
        ring, code = self._pool(WindowRecords(DIM))
        table = ring.rows.new_zeros(5 + ROWS, ring.record.width)
        store = (torch.tensor([1, 4, 8]), torch.tensor([30, 2, 77]))
        run(self._draw(ROWS, DIM), self._normal(DIM), *self.angle, self._below(POOL, 5), *store, ring.rows, table, code, 1e-6)
        return [ring.record.decode(table), ring.record.decode(ring.load(torch.arange(POOL)))]

    def compress_store(self, run: Any) -> Results:
        results = []
        weights = (self._normal(DIM), self._draw(INDEX_DIM, DIM, scale=0.1), self._normal(INDEX_DIM))
        for ratio in (1, 2):
            (kv, kv_code), (keys, key_code) = self._pool(GlobalRecords(DIM)), self._pool(IndexKeyRecords(INDEX_DIM))
            opened = self._normal(4, 2 * DIM) if ratio == 2 else None
            plan: list[Tensor | None] = [torch.arange(ROWS), None, None, None, None]
            if ratio == 2:
                plan[1:] = [self._below(2 + ROWS, ROWS), torch.tensor([1, 3]), torch.tensor([7]), torch.tensor([3])]
            projected = self._draw(ROWS, DIM) if ratio == 1 else self._normal(ROWS, 2 * DIM)
            slots = torch.arange(40, 40 + ROWS)
            run(projected, *plan, opened, *weights, *self.angle, slots, kv.rows, keys.rows, kv_code, key_code, ratio, 1e-6)
            everywhere = torch.arange(POOL)
            results += [kv.record.decode(kv.load(everywhere)), keys.record.decode(keys.load(everywhere))]
            results += [] if opened is None else [opened]
        return results

    def mqa_logits_topk(self, run: Any) -> Results:
        keys, code = self._pool(IndexKeyRecords(INDEX_DIM))
        pages = torch.arange(1, 10).repeat(2)
        base, visible = torch.where(torch.arange(ROWS) < 5, 0, 9), torch.arange(VISIBLE - ROWS, VISIBLE)
        inputs = (self._draw(ROWS, HEADS, INDEX_DIM), self._draw(ROWS, HEADS), *self.angle, keys.rows, pages, base, visible)
        scalars = (code, TOP_K, VISIBLE, PAGE, BLOCK, self.packed, 0.1)
        results: Results = []
        for candidates in (False, True):
            index, slots = (self._empty(ROWS, TOP_K, dtype=torch.int64) for _ in range(2))
            blocks = None if candidates else self._empty(ROWS, PUBLISH, dtype=torch.int64)
            run(*inputs, results[2] if candidates else None, index, slots, blocks, *scalars)
            results += [index, slots] if blocks is None else [index, slots, blocks]
        return results

    def mega_attention(self, run: Any) -> Results:
        window, window_code = self._pool(WindowRecords(DIM))
        entries, entry_code = self._pool(GlobalRecords(DIM))
        query, out = self._draw(ROWS, HEADS, DIM), self._empty(ROWS, HEADS, DIM)
        keys = (window.rows, self._below(POOL, ROWS, 7), entries.rows, self._below(POOL, ROWS, 13))
        run(query, *self.angle, self._normal(HEADS), *keys, out, window_code, entry_code, DIM**-0.5)
        return [out]

    def engram_gather(self, run: Any) -> Results:
        table, scale = pack_fp8(self._normal(50, 64))
        out = self._empty(ROWS, 7, 64)
        run(self._below(51, ROWS, 7) - 1, table, scale, out)
        return [out]

    def engram_gate(self, run: Any) -> Results:
        out = self._empty(ROWS, 4, 50)
        run(self._draw(ROWS, 4, 50), self._draw(ROWS, 5, 50), self._normal(4, 50), out, 1e-6)
        return [out]


def main(path: str) -> None:
    """Results by operation, of every compute dtype and kind of record."""
    info = native.load().info
    kinds = [Cases(dtype, packed) for dtype in (torch.float32, torch.bfloat16) for packed in (False, True)]
    results = {}
    for name in OPERATIONS:
        run = getattr(torch.ops.cedar, name).default
        results[name] = [result for cases in kinds for result in getattr(cases, name)(run)]
    torch.save({"info": info, "results": results}, path)


if __name__ == "__main__":
    main(sys.argv[1])
