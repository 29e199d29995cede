# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's index scores: the pages it is given, when it is not asked, and its results on a Hopper GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from deep_gemm_support import BF16, Kernels, gpu, needs_package, normal, refusal, run, run_package
from native_support import assert_close, seeded
from torch import Tensor

from cedar.cache.formats import pack_mxfp4, unpack_mxfp4
from cedar.cache.layout import IndexKeyRecords
from cedar.cache.records import FloatRecords, RecordPool
from cedar.cache.rows import EntryPlan, RowGeometry, RowPlan, Segment
from cedar.cache.store import BlockTable, SequenceBlocks
from cedar.ops import peer_deep_gemm_index
from cedar.ops.index import IndexSearch, mqa_logits_topk, tile_scores
from cedar.ops.quant import fq4x
from cedar.ops.rope import rotate

HEADS, DIM, TOP_K, BLOCK, PUBLISH, PAIRS = 32, 128, 12, 8, 5, 32
MIXED = [(310, 1), (0, 1), (181, 1), (3, 1), (250, 11)]
"""(first position, rows) of sequences that see 155, 0, 91, 2 and up to 130 entries."""


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

    def rounded(self) -> tuple[Tensor, Tensor]:
        """The query and the weights of `tile_scores`."""
        query = fq4x(rotate(self.query, self.angle.cos(), self.angle.sin()))
        return query, self.weight.float() * self.search.weight_scale


def case(
    g: torch.Generator,
    sequences: list[tuple[int, int]],
    per_page: int,
    *,
    top_k: int = TOP_K,
    publish: int = 0,
    coarse: bool = False,
    heads: int = HEADS,
    tile_elements: int = 1 << 24,
) -> Case:
    """Entries of ratio 2; rows of the pool that nobody wrote hold NaNs. coarse: small integers, so that many scores are equal."""
    counts = [(start + count) // 2 for start, count in sequences]
    pages = [-(-count // per_page) + 1 for count in counts]
    order = (1 + torch.randperm(sum(pages), generator=g, device=g.device)).cpu().split(pages)
    table = torch.zeros(len(sequences) + 1, max(pages) + 1, dtype=torch.int64)
    segments = []
    for slot, (mine, (start, count)) in enumerate(zip(order, sequences, strict=True), start=1):
        table[slot, : len(mine)] = mine
        segments.append(Segment(SequenceBlocks(slot, pages=mine.tolist()), start, count))
    tables = {2: BlockTable(table.to(g.device), per_page)}
    geometry = RowGeometry(window=8, topk=top_k, index_heads=heads, index_dim=DIM)
    plan = RowPlan.build(segments, geometry, tables, g.device, writes=False, tile_elements=tile_elements).entries[2]
    pool = RecordPool.allocate(IndexKeyRecords(DIM), (sum(pages) + 1) * per_page, g.device)
    pool.rows[8:] = 255

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=g, device=g.device).float() if coarse else normal(g, *shape)

    for mine, count in zip(order, counts, strict=True):
        entry = torch.arange(count)
        rows = (mine[entry // per_page] * per_page + entry % per_page).to(g.device)
        pool.store(pool.record.encode(draw(count, DIM)), rows)
    rows = sum(count for _, count in sequences)
    angle = torch.zeros(rows, PAIRS, device=g.device) if coarse else normal(g, rows, PAIRS)
    search = IndexSearch(top_k, 0.5 if coarse else (heads * DIM) ** -0.5, True, BLOCK, publish)
    return Case(draw(rows, heads, DIM).to(BF16), draw(rows, heads).to(BF16), angle, pool, plan, search)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels.put(monkeypatch)


@pytest.mark.parametrize("per_page", [8, 24, 64, 128])
@pytest.mark.parametrize("heads", [32, 64])
def test_equal_scores_select_others_than_the_lowest(kernels: Kernels, per_page: int, heads: int) -> None:
    x = case(seeded(per_page), MIXED, per_page, publish=PUBLISH, coarse=True, heads=heads)
    for one, other in zip(run(mqa_logits_topk, *x.arguments()), mqa_logits_topk(*x.arguments()), strict=True):
        assert torch.equal(one, other)
    assert len(kernels.calls) == len(x.plan.tiles) > 1


def test_a_tile_of_rows_reads_anothers_keys(kernels: Kernels) -> None:
    x = case(seeded(1), MIXED, 16, coarse=True, tile_elements=20000)
    index, slots, blocks = run(mqa_logits_topk, *x.arguments())
    assert torch.equal(index, mqa_logits_topk(*x.arguments())[0])
    assert torch.equal(slots, x.plan.pool_rows(index))
    assert blocks is None
    assert len(kernels.calls) == sum(tile.slots is not None for tile in x.plan.tiles) == 5


@pytest.mark.parametrize("per_page", [8, 64])
def test_scores_differ_from_the_reference(kernels: Kernels, per_page: int) -> None:
    x = case(seeded(2), MIXED, per_page)
    query, weight = x.rounded()
    for tile in x.plan.tiles:
        rows = slice(tile.start, tile.stop)
        arguments = (query[rows], weight[rows], x.pool, x.plan.table, tile)
        hidden = torch.arange(tile.num_keys) >= x.plan.visible[rows, None]
        actual, expected = (score(*arguments).masked_fill(hidden, 0) for score in (peer_deep_gemm_index._scores, tile_scores))
        assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize(("apart", "exact"), [(0, True), (14, True), (24, False)])
def test_fp4_is_rounded_to_fp8(apart: int, exact: bool) -> None:
    codes, scales = pack_mxfp4(normal(seeded(3), 64, DIM))
    scales = scales.view(64, 4) + torch.tensor([0, apart, apart // 2, 0], dtype=torch.uint8) - scales.amin() + 60
    scales = 60 + (scales - 60).clamp_max(apart)
    values = unpack_mxfp4(codes, scales)
    fp8, scale = peer_deep_gemm_index._to_fp8(values)
    assert torch.equal(fp8.float() * scale[:, None], values) == exact


def test_a_search_that_it_does_not_do_fails(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    x = case(seeded(4), [(200, 1), (90, 1)], 16)
    some = torch.arange(4).repeat(2, 1)
    why = refusal(caplog, mqa_logits_topk, *replace(x, candidates=some).arguments())
    assert why == "the search is inside candidate blocks; it scores all keys"
    plain = RecordPool.allocate(FloatRecords(DIM, BF16), len(x.pool.rows), torch.device("cpu"))
    for other in (replace(x, pool=plain), replace(x, search=x.search._replace(quantise=False))):
        why = refusal(caplog, mqa_logits_topk, *other.arguments())
        assert why == "queries or keys are not rounded to FP4, and to FP8 they would be"
    wide = replace(x, query=x.query.float(), weight=x.weight.float())
    few = replace(x, query=x.query[:, :8], weight=x.weight[:, :8])
    for other, what in ((wide, "32 x 128 of torch.float32"), (few, "8 x 128 of torch.bfloat16")):
        why = refusal(caplog, mqa_logits_topk, *other.arguments())
        assert why == f"a query is {what}; it takes 32 or 64 x 128 of bfloat16"
    assert kernels.calls == []
    enough = torch.arange(13).repeat(2, 1)
    run(mqa_logits_topk, *replace(x, candidates=enough).arguments())
    assert kernels.calls == ["fp8_paged_mqa_logits"]


@pytest.mark.parametrize(
    "sequences", [[(40000, 1)], [(9000 + 777 * n, 1) for n in range(48)], [(16000, 130), (9000, 1)]], ids=["1", "48", "prefill"]
)
@pytest.mark.parametrize("per_page", [64, 128])
@pytest.mark.gpu
@needs_package
def test_the_package_scores_otherwise(sequences: list[tuple[int, int]], per_page: int) -> None:
    x = case(gpu(len(sequences)), sequences, per_page, top_k=512, tile_elements=1 << 28)
    index, slots, _ = run_package(mqa_logits_topk, *x.arguments())
    assert torch.equal(slots, x.plan.pool_rows(index))
    query, weight = x.rounded()
    for tile in x.plan.tiles:
        rows = slice(tile.start, tile.stop)
        arguments = (query[rows], weight[rows], x.pool, x.plan.table, tile)
        hidden = torch.arange(tile.num_keys, device="cuda") >= x.plan.visible[rows, None]
        expected = tile_scores(*arguments).masked_fill(hidden, 0)
        assert_close(peer_deep_gemm_index._scores(*arguments).masked_fill(hidden, 0), expected, 1e-3)
        chosen = index[rows]
        assert (chosen.diff(dim=1) > 0).all()
        worst = expected.gather(1, chosen).amin(1)
        best = expected.scatter(1, chosen, -torch.inf).masked_fill(hidden, -torch.inf).amax(1)
        assert (worst >= best - 2e-3 * expected.abs().amax(1)).all()
