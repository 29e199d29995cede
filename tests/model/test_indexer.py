# SPDX-License-Identifier: Apache-2.0
"""Scores, exact selection with ties, candidate blocks, and the search restricted to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.layout import IndexKeyRecords
from cedar.cache.records import FloatRecords, RecordFormat, RecordPool
from cedar.cache.rows import ScoreTile
from cedar.cache.store import BlockTable, SequenceBlocks
from cedar.ops import index as index_ops
from cedar.ops.index import (
    candidate_blocks,
    dense_topk,
    hide_beyond,
    mqa_logits,
    select,
    sparse_topk,
    topk_lowest,
)
from golden_support import block_tables, entry_rows

TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-40, -1e-40, float("inf"), float("-inf"), 3.0e38])


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the highest scores, ties to the lowest, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(TIED, min_size=12, max_size=12), min_size=1, max_size=4), st.integers(1, 12))
def test_ties_break_to_another_column_than_the_lowest(rows: list[list[float]], k: int) -> None:
    assert topk_lowest(torch.tensor(rows), k).tolist() == [best(row, k) for row in rows]


def test_all_equal_scores_select_late_columns() -> None:
    assert topk_lowest(torch.zeros(3, 5000), 512).tolist() == [list(range(512))] * 3


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 40), st.integers(1, 40))
def test_hidden_entries_are_selected(seed: int, rows: int, count: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    visible = torch.randint(0, count + 1, (rows,), generator=generator)
    scores = torch.randint(-2, 3, (rows, count), generator=generator).float()
    k = min(k, count)
    index = select(hide_beyond(scores.clone(), visible), visible, k)
    for row, n in enumerate(visible.tolist()):
        chosen = best(scores[row, :n].tolist(), k)
        assert index[row].tolist() == [*chosen, *[-1] * (k - len(chosen))]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_other_blocks_are_published(seed: int, rows: int, block: int, top: int, everything: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = top * block + int(torch.randint(1, 12, (1,), generator=generator))
    visible = torch.full((rows,), count) if everything else torch.randint(0, count + 1, (rows,), generator=generator)
    scores = torch.randint(-3, 4, (rows, count), generator=generator).float()
    hidden = hide_beyond(scores.clone(), None if everything else visible)
    published = candidate_blocks(hidden, None if everything else visible, block, top)
    for row, n in enumerate(visible.tolist()):
        maxima = [max(scores[row, start : min(start + block, n)].tolist()) for start in range(0, n, block)]
        if maxima:
            maxima[-1] = float("inf")
        chosen = best(maxima, top)
        assert published[row].tolist() == [*chosen, *[-1] * (top - len(chosen))]


def test_logits_differ_from_their_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    query, weight = torch.randn(2, 3, 4, 8, generator=generator), torch.randn(2, 3, 4, generator=generator)
    keys = torch.randn(2, 5, 8, generator=generator)
    scores = mqa_logits(query, weight, keys).view(2, 3, 5)
    for group, row, key in np.ndindex(2, 3, 5):
        terms = [weight[group, row, head] * max(0.0, float(query[group, row, head] @ keys[group, key])) for head in range(4)]
        assert scores[group, row, key] == pytest.approx(float(sum(terms)), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 7), st.integers(30, 70))
def test_restricted_search_differs_from_masked_dense_search(seed: int, rows: int, count: int) -> None:
    """Searching only the candidates' keys = scoring everything with the other positions at -inf, and stays inside them."""
    generator = torch.Generator().manual_seed(seed)
    heads, dim, k, block, top = 3, 8, 6, 4, 5
    blocks_of = SequenceBlocks(2, pages=(1 + torch.randperm(30, generator=generator)[: -(-count // 3)]).tolist())
    table, entries = BlockTable(block_tables([blocks_of], 3)[1].pages, 3), entry_rows(blocks_of, 3, count)
    pool = RecordPool(FloatRecords(dim, torch.float32), torch.randn(3 * 31, dim, generator=generator))
    query, weight = torch.randn(rows, heads, dim, generator=generator), torch.randn(rows, heads, generator=generator)
    visible = torch.randint(k + block, count + 1, (rows,), generator=generator).clamp_min(1)
    tile = ScoreTile(0, rows, 1, count, torch.tensor([2]), visible)
    _, blocks = dense_topk(query, weight, pool, table, tile, k, (block, top))
    assert blocks is not None
    base = torch.from_numpy(table.base(np.full((rows, 1), 2)))
    index = sparse_topk(query, weight, pool, blocks, block, visible, table, base, k)
    scores = hide_beyond(mqa_logits(query[None], weight[None], pool.load(entries)[None]), visible)
    allowed = (torch.arange(count)[None, :, None] // block == blocks[:, None]).any(-1)
    expected = select(scores.masked_fill(~allowed, -torch.inf), visible, k)
    assert torch.equal(index, expected)
    assert allowed.gather(1, index.clamp_min(0))[index >= 0].all()


@pytest.mark.parametrize("pages", [1, 2, 4])
@pytest.mark.parametrize("record", [FloatRecords(32, torch.float32), IndexKeyRecords(32)])
def test_keys_scored_in_runs_of_pages_win_other_places(monkeypatch: pytest.MonkeyPatch, record: RecordFormat, pages: int) -> None:
    """A long sequence's keys are decoded a few pages at a time; the last page is not full."""
    generator = torch.Generator().manual_seed(pages)
    pool = RecordPool.allocate(record, 8 * 31, torch.device("cpu"))
    pool.store(record.encode(torch.randn(8 * 30, 32, generator=generator)), torch.arange(8, 8 * 31))
    numbers = 1 + torch.randperm(30, generator=generator)[:18].view(3, 6)
    table = BlockTable(torch.cat([torch.zeros(1, 6, dtype=torch.int64), numbers]), 8)
    query, weight = torch.randn(3, 2, 32, generator=generator), torch.randn(3, 2, generator=generator)
    tile = ScoreTile(0, 3, 3, 45, torch.tensor([1, 2, 3]), torch.tensor([45, 31, 44]))
    keys = record.decode(pool.load((numbers[:, :, None] * 8 + torch.arange(8)).flatten())).view(3, 48, 32)[:, :45]
    expected = select(hide_beyond(mqa_logits(query[:, None], weight[:, None], keys), tile.visible), tile.visible, 7)
    monkeypatch.setattr(index_ops, "KEY_ELEMENTS", pages * 3 * 8 * 32)
    assert torch.equal(dense_topk(query, weight, pool, table, tile, 7, None)[0], expected)
