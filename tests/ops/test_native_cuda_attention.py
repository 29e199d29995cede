# SPDX-License-Identifier: Apache-2.0
"""Core attention of the library on a GPU against float64, at the release's and the embedded model's dimensions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from native_support import assert_close, assert_nan_stays, assert_rows_alone, everything, native_library, run_native
from torch import Tensor

from cedar.cache.layout import GlobalRecords, WindowRecords
from cedar.cache.records import RecordFormat, RecordPool, RecordView
from cedar.errors import CedarError
from cedar.ops.attention import mega_attention
from cedar.ops.native import NativeUnsupported
from cedar.ops.provider import using
from cedar.ops.rope import rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BF16 = torch.bfloat16
RELEASE, SMALL = (64, 512, 32), (4, 128, 32)
POOL = 3000
MANY = 900
"""Rows that Hopper's blocks take one after another, several each."""


@dataclass(frozen=True)
class Case:
    """Inputs on the GPU; a row's keys are those of `indices`, 0: none."""

    query: Tensor
    angle: Tensor
    sink: Tensor
    pools: tuple[RecordPool, ...]
    indices: tuple[Tensor, ...]

    def rows(self, part: slice) -> Case:
        indices = tuple(index[part].contiguous() for index in self.indices)
        return replace(self, query=self.query[part].contiguous(), angle=self.angle[part].contiguous(), indices=indices)

    def run(self) -> Tensor:
        views = [RecordView(pool, index) for pool, index in zip(self.pools, self.indices, strict=True)]
        scale = self.query.shape[2] ** -0.5
        out: Tensor = run_native(mega_attention, self.query, self.angle.cos(), self.angle.sin(), self.sink, views, scale, 1 << 20)
        return out

    def expected(self) -> Tensor:
        """The formula in float64, with the roundings of the contract."""
        cos, sin = self.angle.cos(), self.angle.sin()
        query = rotate(self.query, cos, sin).double()
        out = torch.zeros_like(query)
        decoded = [pool.record.decode(pool.rows).double() for pool in self.pools]
        for row in range(len(query)):
            some = [values[index[row][index[row] != 0]] for values, index in zip(decoded, self.indices, strict=True)]
            values = torch.cat(some)
            scores = query[row] @ values.T * query.shape[2] ** -0.5
            both = torch.cat([scores, self.sink[:, None].double()], 1)
            out[row] = both.softmax(1)[:, :-1] @ values
        return rotate(out.to(self.query.dtype), cos, sin, inverse=True)


def case(
    rows: int, sizes: tuple[int, int, int], widths: tuple[int, ...], *, holes: float = 0.2, spread: float = 1.0, seed: int = 0
) -> Case:
    """sizes: heads, dimensions, rotary pairs. holes: the share of masked keys. spread: of the scores."""
    heads, dim, pairs = sizes
    g = torch.Generator(device="cuda").manual_seed(seed + rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    pools, indices = [], []
    records: tuple[RecordFormat, ...] = (WindowRecords(dim), GlobalRecords(dim))
    for record, width in zip(records, widths, strict=False):
        sizes_of = torch.logspace(-2, 1, POOL, device="cuda")[torch.randperm(POOL, generator=g, device="cuda")]
        pools.append(RecordPool(record, record.encode((normal(POOL, dim) * sizes_of[:, None]).to(BF16))))
        pools[-1].rows[0] = 0
        index = torch.randint(1, POOL, (rows, width), generator=g, device="cuda")
        indices.append(index.masked_fill_(torch.rand(rows, width, generator=g, device="cuda") < holes, 0))
    query = (normal(rows, heads, dim) * spread).to(BF16)
    return Case(query, normal(rows, pairs) * 1e6, normal(heads), tuple(pools), tuple(indices))


@pytest.mark.parametrize(
    ("sizes", "widths"),
    [
        (RELEASE, (128, 512)),
        (RELEASE, (128,)),
        (RELEASE, (128, 37)),
        (RELEASE, (5, 1)),
        (RELEASE, (64, 65)),
        (SMALL, (128, 128)),
        (SMALL, (16, 3)),
        ((1, 512, 1), (128, 512)),
        ((70, 512, 16), (128, 100)),
        ((40, 512, 256), (128, 300)),
        ((100, 128, 64), (128, 200)),
        ((64, 512, 32), (200, 2048)),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 48, 133])
def test_the_output_differs_from_the_formula(rows: int, sizes: tuple[int, int, int], widths: tuple[int, ...]) -> None:
    x = case(rows, sizes, widths)
    assert_close(x.run(), x.expected(), 8e-3)


@pytest.mark.parametrize(
    ("sizes", "widths"),
    [
        (RELEASE, (128, 512)),
        (RELEASE, (128,)),
        (RELEASE, (5, 1)),
        (SMALL, (128, 128)),
        ((70, 512, 16), (64, 100)),
        ((1, 512, 1), (128, 9)),
        ((64, 512, 256), (0, 512)),
        ((64, 512, 32), (65, 4500)),
    ],
)
def test_a_block_of_many_rows_mixes_them(sizes: tuple[int, int, int], widths: tuple[int, ...]) -> None:
    x = case(MANY, sizes, widths)
    for index in x.indices:
        index[::5] = 0  # between rows with keys, rows without
    x.indices[-1][1::3, 64:] = 0  # and rows with fewer tiles
    out = x.run()
    assert_close(out, x.expected(), 8e-3)
    order = torch.randperm(MANY, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    indices = tuple(index[order] for index in x.indices)
    assert torch.equal(replace(x, query=x.query[order], angle=x.angle[order], indices=indices).run(), out[order])
    for _ in range(5):
        assert torch.equal(x.run(), out)


@pytest.mark.parametrize("sizes", [RELEASE, SMALL, (64, 512, 100), (40, 512, 1)])
@pytest.mark.parametrize("rows", [65, 129, 512, 2000])
def test_a_row_of_many_differs_from_the_formula(rows: int, sizes: tuple[int, int, int]) -> None:
    x = case(rows, sizes, (128, 512))
    some = slice(None, None, rows // 20)
    assert_close(x.run()[some], x.rows(some).expected(), 8e-3)


@pytest.mark.parametrize("widths", [(128, 130), (64, 64), (30, 0), (0, 200)])
@pytest.mark.parametrize("sizes", [RELEASE, (70, 128, 8)])
def test_tiles_of_a_few_of_many_rows_are_lost(sizes: tuple[int, int, int], widths: tuple[int, int]) -> None:
    """A block goes from rows of some tiles to rows of one or none: what the row before left behind lies in the next one's way."""
    x = case(150, sizes, widths, seed=3)
    g = torch.Generator("cuda").manual_seed(5)
    for index in x.indices:
        for first in range(0, index.shape[1], 64):
            index[:, first : first + 64][torch.rand(150, generator=g, device="cuda") < 0.5] = 0
    out = x.run()
    assert_close(out, x.expected(), 8e-3)
    order = torch.randperm(150, generator=g, device="cuda")
    indices = tuple(index[order] for index in x.indices)
    assert torch.equal(replace(x, query=x.query[order], angle=x.angle[order], indices=indices).run(), out[order])


def test_a_nan_spreads_to_other_rows_of_many() -> None:
    x = case(MANY, RELEASE, (128, 512))

    def poison() -> None:
        x.query[300] = torch.nan

    assert_nan_stays(lambda: [x.run()], poison, 300)


@pytest.mark.parametrize("spread", [1e-2, 1.0, 30.0])
def test_a_half_of_a_tile_of_many_rows_is_lost(spread: float) -> None:
    """Two groups make the probabilities of 32 keys each, which may all be masked, or far from the others."""
    x = case(133, RELEASE, (128, 192), spread=spread)
    for index in x.indices:
        halves = index.view(133, -1, 32)
        halves[torch.rand(halves.shape[:2], generator=torch.Generator("cuda").manual_seed(7), device="cuda") < 0.5] = 0
    out = x.run()
    assert_close(out, x.expected(), 8e-3)
    assert torch.equal(x.run(), out)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 10.0, 100.0])
def test_scores_of_other_sizes_are_lost(spread: float) -> None:
    x = case(9, RELEASE, (128, 512), spread=spread)
    assert_close(x.run(), x.expected(), 8e-3)


@pytest.mark.parametrize("key", [0, 63, 64, 127, 128, 191, 192, 639])
def test_a_single_key_is_another(key: int) -> None:
    x = case(3, RELEASE, (128, 512))
    index = torch.cat(x.indices, 1)
    kept = torch.zeros_like(index)
    kept[:, key] = torch.arange(1, 4, device="cuda")
    indices = (kept[:, :128].contiguous(), kept[:, 128:].contiguous())
    x = replace(x, indices=indices, sink=torch.full((64,), -torch.inf, device="cuda"))
    pool = x.pools[key >= 128]
    values = pool.record.decode(pool.rows[1:4])[:, None].expand(3, 64, 512).to(BF16)
    assert_close(x.run(), rotate(values, x.angle.cos(), x.angle.sin(), inverse=True), 8e-3)


@pytest.mark.parametrize("sizes", [RELEASE, SMALL])
def test_a_row_depends_on_its_batch_or_on_masked_columns(sizes: tuple[int, int, int]) -> None:
    x = case(33, sizes, (128, 300))
    assert_rows_alone(lambda part: [x.rows(part).run()], 33)
    for more in (5, 200):
        wider = (x.indices[0], torch.nn.functional.pad(x.indices[1], (0, more)))
        assert torch.equal(replace(x, indices=wider).run(), x.run())
    for _ in range(20):
        assert torch.equal(x.run(), x.run())


@pytest.mark.parametrize(("widths", "spread"), [((128, 512), 1.0), ((128, 512), 30.0), ((128,), 1.0), ((128, 512), 1e-2)])
@pytest.mark.parametrize("rows", [17, 48, 64])
def test_a_row_of_few_has_other_bits_in_a_batch(rows: int, widths: tuple[int, ...], spread: float) -> None:
    """Up to 16 rows are cut over more blocks than those of a batch."""
    x = case(rows, RELEASE, widths, spread=spread)
    index = torch.cat(x.indices, 1)
    for row in range(rows):  # of row 0 all tiles have keys, of others a part, in other places, and of row 5 none
        for tile in range(index.shape[1] // 64):
            if row % 16 == 5 or (row % 16 > 1 and row * 7 >> tile % 6 & 1):
                index[row, tile * 64 : (tile + 1) * 64] = 0
    index[::3, :64] = index[::3, :64].clamp_min(1)  # a tile without masked keys
    parts = index.split(list(widths), 1)
    x = replace(x, indices=tuple(part.contiguous() for part in parts))
    together = x.run()
    assert_close(together[:17], x.rows(slice(0, 17)).expected(), 8e-3)
    for step in (1, 8, 16):
        for start in range(0, min(rows, 48), step):
            part = slice(start, min(start + step, rows))
            assert torch.equal(x.rows(part).run(), together[part])


@pytest.mark.parametrize("sizes", [RELEASE, SMALL])
def test_a_row_without_keys_is_not_zero(sizes: tuple[int, int, int]) -> None:
    x = case(3, sizes, (128, 512))
    for index in x.indices:
        index[1] = 0
    for sink in (0.0, -torch.inf, torch.inf):
        out = replace(x, sink=torch.full((sizes[0],), sink, device="cuda")).run()
        assert torch.isfinite(out).all()
        assert (out[1] == 0).all()
        assert (out[0] == 0).all() == (sink == torch.inf)


def test_a_nan_spreads_to_other_rows() -> None:
    x = case(9, RELEASE, (128, 512))

    def poison() -> None:
        x.query[3] = torch.nan

    assert_nan_stays(lambda: [x.run()], poison, 3)


def test_records_that_nobody_sees_leak() -> None:
    x = case(4, RELEASE, (128, 512))
    clean = x.run()
    for pool, index in zip(x.pools, x.indices, strict=True):
        unseen = ~torch.isin(torch.arange(POOL, device="cuda"), index)
        unseen[0] = False
        pool.rows[unseen] = 0xFF
    assert torch.equal(x.run(), clean)


def test_a_record_behind_two_gigabytes_is_another() -> None:
    x = case(2, RELEASE, (128, 512))
    record = x.pools[1].record
    last = (5 << 30) // record.width
    rows = torch.zeros(last + 1, record.width, dtype=torch.uint8, device="cuda")
    rows[last - POOL + 1 :] = x.pools[1].rows
    moved = torch.where(x.indices[1] == 0, 0, x.indices[1] + last - POOL + 1)
    far = replace(x, pools=(x.pools[0], RecordPool(record, rows)), indices=(x.indices[0], moved))
    assert torch.equal(far.run(), x.run())


def test_other_arguments_do_not_reach_the_reference() -> None:
    native_library()
    x = case(1, (4, 64, 8), (8,))
    with pytest.raises(NativeUnsupported, match="dim 128 or 512"):
        torch.ops.cedar.mega_attention.default(
            *(x.query, x.angle, x.angle, x.sink, x.pools[0].rows, x.indices[0], None, None, x.query.clone()), *(2, 0, 1.0)
        )


@pytest.mark.parametrize("which", [0, 1])
def test_a_pool_that_cannot_be_read_in_16_bytes_is_read(which: int) -> None:
    x = case(1, RELEASE, (8, 8))
    rows = x.pools[which].rows
    moved = torch.cat([rows.new_zeros(8), rows.flatten()])[8:].view(rows.shape)
    pools = tuple(RecordPool(pool.record, moved if i == which else pool.rows) for i, pool in enumerate(x.pools))
    with pytest.raises(CedarError, match="multiples of 16 bytes"):
        replace(x, pools=pools).run()


def test_a_captured_call_cannot_be_replayed() -> None:
    x = case(5, RELEASE, (128, 512))
    x.run()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), using(everything()), torch.cuda.graph(graph):
        captured = x.run()
    x.query.neg_()
    x.indices[1][:, ::3] = 0
    graph.replay()
    assert torch.equal(captured, x.run())


@pytest.mark.parametrize("rows", [1, 8, 16, 48, 64, 128])
@torch.inference_mode()
def test_a_launch_that_begins_early_reads_what_is_not_written_yet(rows: int) -> None:
    """Outputs are the next call's query, with no other launch between the two."""
    x = case(rows, RELEASE, (128, 512))
    views = [RecordView(pool, index) for pool, index in zip(x.pools, x.indices, strict=True)]
    cos, sin = x.angle.cos(), x.angle.sin()

    def chain(*, one_by_one: bool) -> Tensor:
        out = x.query
        for _ in range(12):
            out = run_native(mega_attention, out, cos, sin, x.sink, views, 512**-0.5, 1 << 20)
            if one_by_one:
                torch.cuda.synchronize()
        return out

    expected = chain(one_by_one=True)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), using(everything()), torch.cuda.graph(graph):
        captured = chain(one_by_one=False)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
    assert torch.equal(chain(one_by_one=False), expected)
