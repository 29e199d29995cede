# SPDX-License-Identifier: Apache-2.0
"""The indexer's search of the library: exact selection, candidates, and independence of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import DTYPES, assert_nan_stays, assert_rows_alone, run_native, seeded
from torch import Tensor

from cedar.cache.layout import IndexKeyRecords
from cedar.cache.records import FloatRecords, RecordPool
from cedar.cache.rows import EntryPlan, RowGeometry, RowPlan, Segment
from cedar.cache.store import SequenceBlocks
from cedar.ops.index import IndexSearch, mqa_logits_topk
from cedar.ops.quant import fq4x
from cedar.ops.rope import rotate
from golden_support import block_tables

HEADS, DIM, PAGE, TOP_K, BLOCK, PUBLISH = 3, 64, 16, 12, 4, 5
GEOMETRY = RowGeometry(window=8, topk=TOP_K, index_heads=HEADS, index_dim=DIM)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    query: Tensor
    weight: Tensor
    angle: Tensor
    pool: RecordPool
    plan: EntryPlan
    search: IndexSearch
    candidates: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        cos, sin = self.angle.cos(), self.angle.sin()
        return (self.query, self.weight, cos, sin, self.pool, self.plan, self.search, self.candidates)

    def rows(self, part: slice) -> Case:
        """Some of the rows, with the same width: a plan of one tile that covers them."""
        plan = self.plan
        visible = plan.visible[part]
        tile = replace(plan.tiles[0], start=0, stop=len(visible), num_keys=max(tile.num_keys for tile in plan.tiles))
        plan = replace(plan, visible=visible, base=plan.base[part], tiles=(tile,))
        candidates = None if self.candidates is None else self.candidates[part]
        query, weight, angle = self.query[part], self.weight[part], self.angle[part]
        return replace(self, query=query, weight=weight, angle=angle, plan=plan, candidates=candidates)

    def scores(self) -> list[Tensor]:
        """float64 scores of every row over the entries it sees."""
        query = rotate(self.query, self.angle.cos(), self.angle.sin())
        query = (fq4x(query) if self.search.quantise else query).double()
        weight = (self.weight.float() * self.search.weight_scale).double()
        scores = []
        for row, visible in enumerate(self.plan.visible.tolist()):
            rows = self.plan.table.rows(self.plan.base[row], torch.arange(visible))
            keys = self.pool.record.decode(self.pool.load(rows)).double()
            scores.append(weight[row] @ (query[row] @ keys.T).relu())
        return scores


def case(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    packed: bool = True,
    publish: int = 0,
    coarse: bool = False,
    seed: int = 0,
) -> Case:
    """lengths: (start, count) of each sequence's rows, ratio 1. coarse: small integers: scores are exact and often equal."""
    g = seeded(seed)
    pages = iter((1 + torch.randperm(200, generator=g)).tolist())
    sequences, segments = [], []
    for slot, (start, count) in enumerate(lengths, start=1):
        sequences.append(SequenceBlocks(slot, pages=[next(pages) for _ in range(-(-(start + count) // PAGE))]))
        segments.append(Segment(sequences[-1], start, count))
    tables = {1: block_tables(sequences, PAGE)[1]}
    plan = RowPlan.build(segments, GEOMETRY, tables, CPU, writes=False).entries[1]
    record = IndexKeyRecords(DIM) if packed else FloatRecords(DIM, dtype)
    pool = RecordPool.allocate(record, 201 * PAGE, CPU)

    def draw(*shape: int) -> Tensor:
        if coarse:
            return torch.randint(-1, 2, shape, generator=g).to(dtype)
        return torch.randn(shape, generator=g).to(dtype)

    pool.store(record.encode(draw(200 * PAGE, DIM)), torch.arange(PAGE, 201 * PAGE))
    rows = sum(count for _, count in lengths)
    angle = torch.zeros(rows, 16) if coarse else torch.randn(rows, 16, generator=g)
    search = IndexSearch(TOP_K, 0.5 if coarse else 0.07, packed, BLOCK, publish)
    return Case(draw(rows, HEADS, DIM), draw(rows, HEADS), angle, pool, plan, search)


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the highest scores, ties to the lowest, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count])


SEQUENCES = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=4).filter(
    lambda lengths: max(start + count for start, count in lengths) > TOP_K
)


@settings(max_examples=80, deadline=None)
@given(SEQUENCES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**31))
def test_equal_scores_select_others_than_the_lowest(
    lengths: list[tuple[int, int]], dtype: torch.dtype, packed: bool, seed: int
) -> None:
    x = case(lengths, dtype, packed=packed, publish=PUBLISH, coarse=True, seed=seed)
    index, slots, blocks = run_native(mqa_logits_topk, *x.arguments())
    expected_index, expected_slots, expected_blocks = mqa_logits_topk(*x.arguments())
    assert torch.equal(index, expected_index)
    assert torch.equal(slots, expected_slots)
    assert (blocks is None) == (expected_blocks is None)
    assert blocks is None or torch.equal(blocks, expected_blocks)
    for row, scores in enumerate(x.scores()):
        chosen = best(scores.tolist(), TOP_K)
        assert index[row].tolist() == [*chosen, *[-1] * (TOP_K - len(chosen))]


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**31))
def test_a_worse_entry_is_selected(lengths: list[tuple[int, int]], dtype: torch.dtype, packed: bool, seed: int) -> None:
    x = case(lengths, dtype, packed=packed, seed=seed)
    index, slots, blocks = run_native(mqa_logits_topk, *x.arguments())
    assert blocks is None
    assert torch.equal(slots, x.plan.pool_rows(index))
    for row, scores in enumerate(x.scores()):
        chosen = index[row][index[row] >= 0]
        assert len(chosen) == min(TOP_K, len(scores))
        assert torch.equal(chosen, chosen.unique())
        rest = torch.ones(len(scores), dtype=torch.bool)
        rest[chosen] = False
        if rest.any():
            assert scores[chosen].min() >= scores[rest].max() - 1e-5 * scores.abs().max()


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.booleans(), st.integers(0, 2**31))
def test_a_restricted_search_leaves_its_blocks(lengths: list[tuple[int, int]], coarse: bool, seed: int) -> None:
    x = case(lengths, torch.float32, publish=PUBLISH, coarse=coarse, seed=seed)
    _, _, blocks = run_native(mqa_logits_topk, *x.arguments())
    if blocks is None:
        return
    other = case(lengths, torch.float32, coarse=coarse, seed=seed)
    x = replace(other, query=other.query.flip(1), candidates=blocks)
    index, slots, published = run_native(mqa_logits_topk, *x.arguments())
    assert published is None
    assert torch.equal(slots, x.plan.pool_rows(index))
    for row, scores in enumerate(x.scores()):
        positions = [j for b in blocks[row].tolist() if b >= 0 for j in range(b * BLOCK, min((b + 1) * BLOCK, len(scores)))]
        chosen = index[row][index[row] >= 0].tolist()
        assert set(chosen) <= set(positions)
        assert len(chosen) == min(TOP_K, len(positions))
        if coarse:
            assert chosen == [positions[n] for n in best([scores[j].item() for j in positions], TOP_K)]
    if not coarse:
        assert torch.equal(index, mqa_logits_topk(*x.arguments())[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("restricted", [False, True])
def test_a_row_depends_on_its_batch(dtype: torch.dtype, restricted: bool) -> None:
    x = case([(90, 13), (140, 1), (60, 9)], dtype, publish=PUBLISH)
    blocks = run_native(mqa_logits_topk, *x.arguments())[2]
    assert blocks is not None
    if restricted:
        x = replace(x, candidates=blocks, search=x.search._replace(publish=0))
    assert_rows_alone(lambda part: list(run_native(mqa_logits_topk, *x.rows(part).arguments())), 23)


def test_a_nan_spreads_to_other_rows() -> None:
    x = case([(90, 9), (40, 2)], torch.float32, publish=PUBLISH)

    def poison() -> None:
        x.query[4] = torch.nan

    assert_nan_stays(lambda: list(run_native(mqa_logits_topk, *x.arguments())), poison, 4)
    index, slots, _ = run_native(mqa_logits_topk, *x.arguments())
    assert len(set(index[4].tolist())) == TOP_K
    assert (slots[4] >= PAGE).all()


def test_entries_that_nobody_sees_are_read() -> None:
    x = case([(90, 3), (40, 1)], torch.float32, publish=PUBLISH)
    before = run_native(mqa_logits_topk, *x.arguments())
    seen = torch.cat([x.plan.table.rows(x.plan.base[row], torch.arange(n)) for row, n in enumerate(x.plan.visible.tolist())])
    unseen = torch.ones(201 * PAGE, dtype=torch.bool)
    unseen[seen] = False
    x.pool.store(torch.full((int(unseen.sum()), x.pool.record.width), 0xFF, dtype=torch.uint8), unseen.nonzero()[:, 0])
    for one, other in zip(run_native(mqa_logits_topk, *x.arguments()), before, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("page", [-1, 201, 2**62])
def test_a_page_outside_of_the_pool_is_read(page: int) -> None:
    """The last page that the newest row of the first sequence sees; the one behind it is nobody's, whatever it says."""
    x = case([(94, 4), (40, 1)], torch.float32)
    flat = x.plan.table.pages.view(-1)
    last = int(x.plan.base[0]) + 6  # of entries 96 and 97; the rows before see none of it
    assert PAGE * 6 < x.plan.visible[3] <= PAGE * 7
    kept = int(flat[last])
    flat[last] = page
    message = rf"pages\[{last}\] is {page}; allowed: at least 0 and less than 201$"
    with pytest.raises(RuntimeError, match=f"mqa_logits_topk: {message}"):
        run_native(mqa_logits_topk, *x.arguments())
    x.plan.visible.fill_(PAGE * 2)  # nobody sees it
    run_native(mqa_logits_topk, *x.arguments())
    flat[last] = kept


@pytest.mark.parametrize("far", [False, True])
def test_a_row_outside_of_the_block_table_is_read(far: bool) -> None:
    x = case([(90, 3), (40, 1)], torch.float32)
    count = x.plan.table.pages.numel()
    x.plan.base[3] = wrong = count - 2 if far else -1  # its row sees 41 entries: three pages
    message = rf"base\[3\] is {wrong} and its row sees 3 pages; allowed: 0 to {count - 3}, of {count} pages$"
    with pytest.raises(RuntimeError, match=f"mqa_logits_topk: {message}"):
        run_native(mqa_logits_topk, *x.arguments())


@pytest.mark.parametrize("block", [7, 24, 2**61])
def test_a_block_that_nobody_sees_or_a_second_time_is_searched(block: int) -> None:
    """A block twice would select more entries than there are columns."""
    x = case([(90, 3), (40, 1)], torch.float32)  # at most 93 entries: 24 blocks
    blocks = torch.tensor([[1, 7, 8, 10, -1]] * 4)
    blocks[2, 2] = block
    message = rf"candidates\[2, 2\] is {block}; allowed: at least 8 and less than 24$"
    with pytest.raises(RuntimeError, match=f"mqa_logits_topk: {message}"):
        run_native(mqa_logits_topk, *replace(x, candidates=blocks).arguments())
    blocks[2, 2] = 9
    run_native(mqa_logits_topk, *replace(x, candidates=blocks).arguments())
