# SPDX-License-Identifier: Apache-2.0
"""The indexer's search of the library on a GPU: exact, among a million entries and inside candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from native_support import assert_nan_stays, assert_rows_alone, everything
from torch import Tensor

from cedar.cache.layout import IndexKeyRecords
from cedar.cache.records import RecordPool
from cedar.ops.native import NativeUnsupported
from cedar.ops.quant import fq4x
from cedar.ops.rope import rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BF16 = torch.bfloat16
MXFP4, BLOCK = 4, 8
RELEASE, SMALL = (32, 128, 32), (4, 128, 32)


@dataclass(frozen=True)
class Case:
    """Inputs on the GPU. publish: candidate blocks to keep; 0: none."""

    query: Tensor
    weight: Tensor
    angle: Tensor
    pool: RecordPool
    pages: Tensor
    base: Tensor
    visible: Tensor
    per_page: int
    top_k: int
    publish: int = 0
    candidates: Tensor | None = None
    most: int = 0
    quantise: bool = True
    block: int = BLOCK

    def rows(self, part: slice) -> Case:
        fields = {name: getattr(self, name)[part].contiguous() for name in ("query", "weight", "angle", "base", "visible")}
        candidates = None if self.candidates is None else self.candidates[part].contiguous()
        return replace(self, candidates=candidates, **fields)

    def run(self) -> list[Tensor | None]:
        """index, slots, published."""
        everything()
        index = torch.full((len(self.query), self.top_k), -7, dtype=torch.int64, device="cuda")
        slots = torch.full_like(index, -7)
        blocks = index.new_full((len(self.query), self.publish), -7) if self.publish else None
        most = self.most or int(self.visible.max())
        with torch.inference_mode():
            torch.ops.cedar.mqa_logits_topk.default(
                *(
                    self.query,
                    self.weight,
                    self.angle.cos(),
                    self.angle.sin(),
                    self.pool.rows,
                    self.pages,
                    self.base,
                    self.visible,
                ),
                *(self.candidates, index, slots, blocks),
                *(MXFP4, self.top_k, most, self.per_page, self.block, self.quantise, 0.5),
            )
        return [index, slots, blocks]

    def pool_rows(self, row: int, positions: Tensor) -> Tensor:
        return self.pages[self.base[row] + positions // self.per_page] * self.per_page + positions % self.per_page

    def scores(self, row: int) -> tuple[Tensor, Tensor]:
        """Positions that a row may choose, ascending, and their float64 scores."""
        visible = int(self.visible[row])
        positions = torch.arange(visible, device="cuda")
        if self.candidates is not None:
            blocks = self.candidates[row][self.candidates[row] >= 0]
            positions = (blocks[:, None] * self.block + torch.arange(self.block, device="cuda")).flatten()
            positions = positions[positions < visible]
        query = rotate(self.query[row : row + 1], self.angle[row : row + 1].cos(), self.angle[row : row + 1].sin())[0]
        query = (fq4x(query) if self.quantise else query).double()
        weight = (self.weight[row].float() * 0.5).double()
        parts = [
            weight @ (query @ self.pool.record.decode(self.pool.load(self.pool_rows(row, some))).double().T).relu()
            for some in torch.split(positions, 1 << 17)
        ]
        return positions, torch.cat(parts) if parts else torch.zeros(0, device="cuda", dtype=torch.float64)

    def check(self, results: list[Tensor | None], exact: bool) -> None:
        """Nothing better is left out. exact: scores are, so ties must go to the lowest."""
        index, slots, blocks = results
        assert index is not None
        assert slots is not None
        for row in range(len(self.query)):
            positions, scores = self.scores(row)
            count = min(self.top_k, len(positions))
            chosen = index[row, :count]
            assert (index[row, count:] == -1).all()
            assert (slots[row, count:] == 0).all()
            assert torch.equal(slots[row, :count], self.pool_rows(row, chosen))
            self._check_choice(positions, scores, chosen, exact)
            if blocks is None:
                continue
            numbers = torch.arange(-(-int(self.visible[row]) // self.block), device="cuda")
            padded = torch.nn.functional.pad(scores, (0, len(numbers) * self.block - len(scores)), value=-torch.inf)
            best = padded.view(-1, self.block).amax(1)
            best[-1:] = torch.inf
            count = min(self.publish, len(numbers))
            assert (blocks[row, count:] == -1).all()
            self._check_choice(numbers, best, blocks[row, :count], exact)

    @staticmethod
    def _check_choice(positions: Tensor, scores: Tensor, chosen: Tensor, exact: bool) -> None:
        assert (chosen.diff() > 0).all()
        assert torch.isin(chosen, positions).all()
        if exact:
            best = scores.sort(descending=True, stable=True).indices[: len(chosen)].sort().values
            assert torch.equal(chosen, positions[best])
            return
        taken = torch.isin(positions, chosen)
        if len(chosen) and not taken.all():
            tolerance = 2.0**-10 * scores[scores.isfinite()].abs().max()  # a head's product keeps 11 bits
            assert scores[taken].min() >= scores[~taken].max() - tolerance


def case(
    visible: list[int],
    sizes: tuple[int, int, int] = RELEASE,
    *,
    per_page: int = 64,
    top_k: int = 512,
    publish: int = 0,
    coarse: bool = False,
    shared: bool = False,
    seed: int = 0,
) -> Case:
    """visible: of each row. shared: all rows are of one sequence. coarse: small integers: scores are exact and often equal."""
    heads, dim, pairs = sizes
    g = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if coarse:
            return torch.randint(-1, 2, shape, generator=g, device="cuda").to(BF16)
        return torch.randn(shape, generator=g, device="cuda").to(BF16)

    lengths = [max(visible)] if shared else visible
    counts = [-(-length // per_page) for length in lengths]
    pages = 1 + torch.randperm(sum(counts), generator=g, device="cuda")
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0)
    base = starts[:1].expand(len(visible)).contiguous() if shared else starts[:-1].contiguous()
    pool = RecordPool.allocate(IndexKeyRecords(dim), (sum(counts) + 1) * per_page, torch.device("cuda"))
    for first in range(per_page, pool.rows.shape[0], 1 << 18):
        rows = torch.arange(first, min(first + (1 << 18), pool.rows.shape[0]), device="cuda")
        pool.store(pool.record.encode(draw(len(rows), dim)), rows)
    angle = torch.zeros(len(visible), pairs, device="cuda")
    angle = angle if coarse else torch.randn(angle.shape, generator=g, device="cuda") * 1e6
    fields = (draw(len(visible), heads, dim), draw(len(visible), heads), angle, pool, pages, base)
    return Case(*fields, torch.tensor(visible, device="cuda"), per_page, top_k, publish)


def restricted(x: Case, columns: int, seed: int = 1) -> Case:
    """The same search inside up to ``columns`` random blocks of each row, the newest among them."""
    g = torch.Generator().manual_seed(seed)
    candidates = torch.full((len(x.query), columns), -1)
    for row, visible in enumerate(x.visible.tolist()):
        blocks = -(-visible // x.block)
        some = torch.randperm(max(blocks - 1, 0), generator=g)[: columns - 1]
        some = torch.cat([some.sort().values, torch.arange(blocks)[-1:]])
        candidates[row, : len(some)] = some
    return replace(x, candidates=candidates.cuda(), publish=0)


VISIBLE = [0, 1, 511, 512, 513, 700, 1023, 4095, 4096, 4097, 9000, 20001]


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize(("sizes", "per_page"), [(RELEASE, 64), (SMALL, 8), ((16, 32, 16), 24), ((9, 64, 3), 16)])
def test_a_worse_entry_is_selected(sizes: tuple[int, int, int], per_page: int, coarse: bool) -> None:
    x = case(VISIBLE, sizes, per_page=per_page, coarse=coarse, publish=600)
    x.check(x.run(), coarse)
    x = replace(x, top_k=33, publish=3)
    x.check(x.run(), coarse)
    x = restricted(x, 300)
    x.check(x.run(), coarse)


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize(("top_k", "times"), [(33, 1), (512, 2), (2048, 1)])
def test_a_cluster_chooses_others_of_few_entries(top_k: int, times: int, coarse: bool) -> None:
    lengths = [0, 1, 31, 260, 2047, 2049, 3001, 8192, 16384] * times
    x = case(lengths, coarse=coarse, top_k=top_k)
    x.check(x.run(), coarse)
    assert_rows_alone(lambda part: replace(x, most=16384).rows(part).run()[:2], len(lengths))
    sparse = restricted(x, 2048)
    sparse.check(sparse.run(), coarse)
    x.query.zero_()
    index = x.run()[0]
    assert index is not None
    for row, visible in enumerate(lengths):
        assert index[row].tolist() == [*range(min(top_k, visible)), *[-1] * (top_k - visible)]


@pytest.mark.parametrize(
    ("rows", "sizes", "top_k"),
    [(rows, RELEASE, 100) for rows in (6, 7, 30, 48, 50, 54, 80)]
    + [(rows, (9, dim, 3), 2048) for rows in (30, 48) for dim in (32, 64, 128)],
)
def test_tens_of_rows_choose_others_of_few_entries(rows: int, sizes: tuple[int, int, int], top_k: int) -> None:
    """Clusters of other sizes search, in calls one after the other, whose launches begin early."""
    lengths = [16384 if row % 7 == 4 else 1 + 997 * row % 5000 for row in range(rows)]
    cases = [case(lengths, sizes, coarse=True, shared=True, top_k=top_k, seed=0)]
    cases.append(restricted(replace(cases[0], query=cases[0].query.roll(1, 0)), 700))
    alone = []
    for x in cases:
        alone.append(x.run()[:2])
        torch.cuda.synchronize()
        x.check([*alone[-1], None], True)
        for row in (0, rows // 2, rows - 1):
            one = replace(x, most=max(lengths)).rows(slice(row, row + 1)).run()[:2]
            assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(one, alone[-1], strict=True))
    for results in ([x.run()[:2] for x in cases] for _ in range(3)):
        for result, expected in zip(results, alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_few_entries_are_chosen_otherwise_where_the_best_crowd(seed: int) -> None:
    """Random lengths, and spans with most of the best, which may be too many to be sent as they are, or all alike."""
    g = torch.Generator().manual_seed(seed)

    def some(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=g))

    lengths = [some(16384) if row % 2 else some(9000) for row in range((1, 2, 3, 7)[seed])]
    x = case(lengths, top_k=(512, 100, 1024, some(600))[seed], seed=seed)
    for row, length in enumerate(lengths):
        first = some(length) - 1
        places = x.pool_rows(row, torch.arange(first, min(first + some(2000), length), device="cuda"))
        keys = torch.randn(len(places), 128, generator=torch.Generator(device="cuda").manual_seed(row), device="cuda")
        if row % 3 == 2:
            keys = keys[:1].expand(len(places), -1)
        x.pool.store(x.pool.record.encode((keys * some(4)).to(BF16)), places)
    x.check(x.run(), False)
    assert_rows_alone(lambda part: replace(x, most=16384).rows(part).run()[:2], len(lengths))
    sparse = restricted(x, some(2048))
    sparse.check(sparse.run(), False)
    assert_rows_alone(lambda part: replace(sparse, most=16384).rows(part).run()[:2], len(lengths))


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize(
    ("sizes", "rows"), [(RELEASE, 2), (SMALL, 3), ((9, 64, 3), 1), ((32, 64, 32), 5), ((31, 32, 16), 3), ((3, 32, 7), 1)]
)
def test_queries_of_float32_are_searched_otherwise(sizes: tuple[int, int, int], rows: int, coarse: bool) -> None:
    x = case([1500, 800, 3000, 70, 2049][:rows], sizes, coarse=coarse, top_k=128)
    x = replace(x, query=x.query.float(), weight=x.weight.float())
    x.check(x.run(), coarse)
    x = restricted(x, 100)
    x.check(x.run(), coarse)


@pytest.mark.parametrize("coarse", [True, False])
def test_a_chunk_selects_otherwise_than_its_rows_alone(coarse: bool) -> None:
    x = case(list(range(2600, 2900)), coarse=coarse, shared=True, publish=300)
    results = x.run()
    x.check(results, coarse)
    mixed = replace(x, base=torch.cat([x.base[:130], x.base[130:] + 3]), visible=x.visible - 200)
    mixed.check(mixed.run(), coarse)
    for start in (0, 77, 254):
        part = slice(start, start + 3)
        for some, every in zip(replace(x.rows(part), most=x.most or 2899).run(), results, strict=True):
            assert some is not None
            assert every is not None
            assert torch.equal(some, every[part])


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("columns", [1, 64, 100, 2048])
def test_a_restricted_search_leaves_its_blocks(columns: int, coarse: bool) -> None:
    x = restricted(case([*VISIBLE, 60000], coarse=coarse), columns)
    x.check(x.run(), coarse)


@pytest.mark.parametrize("coarse", [True, False])
def test_larger_blocks_are_taken_for_smaller(coarse: bool) -> None:
    x = replace(case([*VISIBLE, 60_000], coarse=coarse, publish=70), block=24)
    x.check(x.run(), coarse)
    x = restricted(x, 100)
    x.check(x.run(), coarse)


def test_all_entries_as_candidates_select_others_than_none() -> None:
    x = case([9000, 16384, 3001])
    dense, sparse = x.run(), restricted(x, 2048).run()
    for one, other in zip(dense[:2], sparse[:2], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("visible", [1_000_003, 300_000])
def test_far_entries_are_missed(visible: int) -> None:
    x = case([visible, 5, visible - 1], publish=2048)
    x.check(x.run(), False)
    x = restricted(x, 2048)
    x.check(x.run(), False)


@pytest.mark.parametrize("visible", [600, 5000, 40_000, 70_000])
def test_equal_scores_select_others_than_the_lowest(visible: int) -> None:
    x = case([visible] * 3, publish=60)
    x.query.zero_()
    index, _, blocks = x.run()
    assert index is not None
    assert blocks is not None
    newest = (visible - 1) // BLOCK
    assert torch.equal(index, torch.arange(512, device="cuda").expand(3, -1))
    assert torch.equal(blocks, torch.tensor([*range(59), newest], device="cuda").expand(3, -1))


@pytest.mark.parametrize("count", [8000, 50_000])
@pytest.mark.parametrize("order", ["rising", "falling", "strided"])
def test_the_order_of_scores_decides(order: str, count: int) -> None:
    """The best lie side by side, or all with the same few threads of a block, which a filter may not expect."""
    x = case([count], (8, 128, 1), coarse=True)
    number = torch.arange(count, device="cuda")
    rank = {"rising": number, "falling": count - 1 - number, "strided": number % 1024 * (count // 1024 + 1) + number // 1024}[
        order
    ]
    level = rank * 625 // (rank.max() + 1)
    keys = torch.zeros(count, 128, device="cuda")
    for digit in range(4):  # of the level in base 5, each in a group of its own
        keys[:, digit * 32] = level // 5 ** (3 - digit) % 5 * 0.5 * 16.0**-digit
    x.pool.store(x.pool.record.encode(keys.to(BF16)), x.pool_rows(0, number))
    x.query.zero_()
    x.query[:, 0, :64:32] = 1  # two digits a head: their sums are exact
    x.query[:, 1, 64::32] = 1
    x.weight.fill_(1)
    x.check(x.run(), True)


def test_a_row_depends_on_its_batch() -> None:
    x = case([3000, 12_345, 700, 9000, 40_000, 513, 8192], publish=100)
    x = replace(x, most=50_000)
    assert_rows_alone(lambda part: x.rows(part).run(), 7)
    sparse = restricted(x, 500)
    assert_rows_alone(lambda part: sparse.rows(part).run(), 7)


@pytest.mark.parametrize("rows", [48, 100, 200])
@pytest.mark.parametrize("visible", [2600, 40_000])
def test_more_rows_are_searched_otherwise(rows: int, visible: int) -> None:
    """As many blocks choose for a row as the number of rows and entries allows."""
    x = case(list(range(visible, visible + rows)), shared=True, publish=300)
    x = replace(x, most=visible + rows)
    sparse = restricted(x, 128)
    for search in (x, sparse):
        results = search.run()
        for start in (0, rows // 2):
            part = slice(start, start + 2)
            some = search.rows(part)
            some.check(some.run(), False)
            for one, every in zip(some.run(), results, strict=True):
                assert (one is None) == (every is None)
                if one is not None and every is not None:
                    assert torch.equal(one, every[part])


def test_a_nan_spreads_to_other_rows() -> None:
    x = case([3000, 9000, 5000], publish=100)

    def poison() -> None:
        x.query[1] = torch.nan

    assert_nan_stays(x.run, poison, 1)
    index, slots, _ = x.run()
    assert index is not None
    assert slots is not None
    assert len(set(index[1].tolist())) == 512
    assert (slots[1] >= x.per_page).all()


def test_entries_that_nobody_sees_are_read() -> None:
    x = case([3001, 777], publish=100)
    before = x.run()
    seen = torch.cat([x.pool_rows(row, torch.arange(n, device="cuda")) for row, n in enumerate(x.visible.tolist())])
    unseen = torch.ones(x.pool.rows.shape[0], dtype=torch.bool, device="cuda")
    unseen[seen] = False
    rows = unseen.nonzero()[:, 0]
    x.pool.store(torch.full((len(rows), x.pool.record.width), 0xFF, dtype=torch.uint8, device="cuda"), rows)
    for one, other in zip(x.run(), before, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_scales_of_other_sizes_are_lost() -> None:
    x = case([2000, 3000])
    rows = x.pool.rows.shape[0]
    keys = torch.randn(rows, 128, device="cuda").to(BF16) * torch.logspace(-6, 6, rows, device="cuda", dtype=BF16)[:, None]
    x.pool.store(x.pool.record.encode(keys)[x.per_page :], torch.arange(x.per_page, rows, device="cuda"))
    x.check(x.run(), False)


def with_scales_far_apart(x: Case) -> Case:
    """In some heads of every third row: large and tiny sums of one head meet."""
    query = x.query.clone()
    query[::3, ::5, 32:64] *= 2.0**20
    query[::3, 1::5, 96:] *= 2.0**-30
    return replace(x, query=query)


@pytest.mark.parametrize("rows", [7, 260])
def test_scales_far_apart_change_other_rows(rows: int) -> None:
    plain = replace(case(list(range(900, 900 + rows)), shared=True), most=1200)
    x = with_scales_far_apart(plain)
    results, others = x.run(), plain.run()
    x.rows(slice(0, 7)).check([None if some is None else some[:7] for some in results], False)
    for row in (0, 1, 2, 6, rows - 1):
        alone = x.rows(slice(row, row + 1)).run()
        for one, every, other in zip(alone, results, others, strict=True):
            if one is None or every is None or other is None:
                continue
            assert torch.equal(one[0], every[row])
            assert row % 3 == 0 or torch.equal(one[0], other[row])


def test_scales_far_apart_do_not_reach_a_long_search() -> None:
    x = with_scales_far_apart(case([3000, 20_001, 700, 9000], publish=100))
    x.check(x.run(), False)
    x = restricted(x, 500)
    x.check(x.run(), False)


ALL_DIMS = [RELEASE, (16, 64, 16), (9, 32, 3)]


def with_scales_of_groups(x: Case, octaves: int, *, coarse: bool = False) -> Case:
    """The scales of the groups of 32 of one key are up to 2^octaves apart; not ``coarse``: those of one head's query too."""
    g = torch.Generator(device="cuda").manual_seed(5)
    dim = x.query.shape[2]

    def scales(*shape: int) -> Tensor:
        return torch.exp2(
            -torch.randint(0, octaves + 1, (*shape, dim // 32), generator=g, device="cuda").float()
        ).repeat_interleave(32, -1)

    rows = torch.arange(x.per_page, x.pool.rows.shape[0], device="cuda")
    keys = x.pool.record.decode(x.pool.load(rows)) * scales(len(rows))
    x.pool.store(x.pool.record.encode(keys.to(BF16)), rows)
    return x if coarse else replace(x, query=(x.query * scales(*x.query.shape[:2])).to(BF16))


@pytest.mark.parametrize("sizes", ALL_DIMS)
@pytest.mark.parametrize("octaves", [1, 9, 40])
def test_groups_of_other_scales_are_scored_wrong(sizes: tuple[int, int, int], octaves: int) -> None:
    x = with_scales_of_groups(case([700, 3001, 20_001], sizes, publish=100), octaves)
    x.check(x.run(), False)
    few = replace(x, publish=0).rows(slice(0, 2))
    few.check(few.run(), False)
    for one, other in zip(few.run()[:2], x.run()[:2], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other[:2])


@pytest.mark.parametrize("sizes", ALL_DIMS)
@pytest.mark.parametrize("lengths", [[700, 3001, 16_384], list(range(900, 1160))])
def test_exact_scores_of_groups_of_other_scales_are_rounded(sizes: tuple[int, int, int], lengths: list[int]) -> None:
    """Sums of 128 values of 1 to 2^-4 have 11 bits."""
    x = with_scales_of_groups(case(lengths, sizes, coarse=True, shared=True), 4, coarse=True)
    x.check(x.run(), True)
    x = replace(x, publish=50)
    x.check(x.run(), True)


@pytest.mark.parametrize("sizes", ALL_DIMS)
@pytest.mark.parametrize("wide", [False, True])
def test_a_key_that_is_no_number_is_not_the_best(wide: bool, sizes: tuple[int, int, int]) -> None:
    x = case([3000, 5000], sizes)
    x = with_scales_far_apart(x) if wide else x
    lost = [torch.tensor([5, 77, 2040], device="cuda"), torch.tensor([0, 63, 64, 4999], device="cuda")]
    for row, positions in enumerate(lost):
        places = x.pool_rows(row, positions)
        records = x.pool.load(places)
        for n, record in enumerate(records):
            record[sizes[1] // 2 + n % (sizes[1] // 32)] = 255
        x.pool.store(records, places)
    index = x.run()[0]
    assert index is not None
    for row, positions in enumerate(lost):
        assert torch.isin(positions, index[row]).all()


def test_other_keys_do_not_reach_the_reference() -> None:
    x = case([600], (33, 128, 32))
    with pytest.raises(NativeUnsupported, match="at most 32 heads"):
        x.run()
    x = replace(case([600]), quantise=False)
    with pytest.raises(NativeUnsupported, match="queries rounded to MXFP4"):
        x.run()


def test_a_captured_call_cannot_be_replayed() -> None:
    x = replace(case([3000, 12_345, 700], publish=100), most=20_000)
    x.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = x.run()
    x.visible.sub_(600)
    x.query.neg_()
    graph.replay()
    for one, other in zip(captured, x.run(), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("sparse", [True, False])
def test_an_early_launch_reads_scores_of_the_call_before(sparse: bool) -> None:
    """Of calls one after the other the selection starts before the scores are there, which it has to await."""
    cases = [case([9000 + 5 * n, 20_001, 300], publish=100, seed=n) for n in range(4)]
    cases = [restricted(x, 900, seed=n) for n, x in enumerate(cases)] if sparse else cases
    alone = []
    for x in cases:
        alone.append(x.run())
        torch.cuda.synchronize()
    for results in ([x.run() for x in cases] for _ in range(20)):
        for result, expected in zip(results, alone, strict=True):
            for one, other in zip(result, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert torch.equal(one, other)
