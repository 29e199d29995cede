# SPDX-License-Identifier: Apache-2.0
"""CUDA bodies for float32 activations against the references and float64: the exactness setting of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from native_support import assert_close, assert_nan_stays, assert_rows_alone, everything, run_native, seeded, tolerance
from torch import Tensor

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import FloatRecords, RecordFormat, RecordPool, RecordView
from cedar.errors import CedarError
from cedar.ops.attention import mega_attention
from cedar.ops.mhc import Crossing, Mixing, Written, mega_mhc
from cedar.ops.moe import mega_gate
from cedar.ops.norm import Norm
from cedar.ops.provider import using
from cedar.ops.rope import rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

GPU = torch.device("cuda")
F32, BF16 = torch.float32, torch.bfloat16
INFINITY = torch.inf


# ---- mega_mhc ----

Boundary = tuple[Tensor, Written | None, Tensor | None, Mixing | None, Norm | None]


def boundary(rows: int, hidden: int) -> tuple[Tensor, Written, Tensor, Mixing, Norm]:
    g = seeded(rows + hidden)
    written = Written(
        torch.randn(rows, hidden, generator=g), 2 * torch.rand(rows, 4, generator=g), torch.rand(rows, 4, 4, generator=g) / 4
    )
    fn = torch.randn(24, 4 * hidden, generator=g) * hidden**-0.5
    mixing = Mixing(fn, torch.rand(24, generator=g), torch.randn(24, generator=g), 1e-6, 1e-20, 20)
    streams = torch.randn(rows, 4, hidden, generator=g)
    return streams, written, torch.rand(rows, 4, generator=g), mixing, Norm(torch.rand(hidden, generator=g), 1e-20)


def to_gpu(given: Boundary) -> Boundary:
    streams, written, pre, mixing, norm = given
    return (
        streams.to(GPU),
        None if written is None else Written(*(x.to(GPU) for x in written)),
        None if pre is None else pre.to(GPU),
        None if mixing is None else mixing._replace(fn=mixing.fn.to(GPU), scale=mixing.scale.to(GPU), base=mixing.base.to(GPU)),
        None if norm is None else Norm(norm.weight.to(GPU), norm.eps),
    )


def flat(crossing: Crossing) -> list[Tensor | None]:
    return [crossing.streams, *(crossing.gates or (None,) * 3), crossing.normed]


@pytest.mark.parametrize("hidden", [4, 36, 256, 5120])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 130])
@pytest.mark.parametrize("parts", ["all", "expand", "mix", "norm", "expand norm"])
def test_a_float32_boundary_differs_from_the_reference(rows: int, hidden: int, parts: str) -> None:
    streams, written, pre, mixing, norm = boundary(rows, hidden)
    given: Boundary = (
        streams,
        written if parts == "all" or "expand" in parts else None,
        pre if parts == "all" or "norm" in parts else None,
        mixing if parts in ("all", "mix") else None,
        norm if parts == "all" or "norm" in parts else None,
    )
    for one, other in zip(flat(run_native(mega_mhc, *to_gpu(given))), flat(mega_mhc(*given)), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_close(one.cpu(), other, tolerance(F32))


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_rounds_of_the_balancing_are_lost(iterations: int) -> None:
    streams, _, _, mixing, _ = boundary(6, 64)
    given: Boundary = (streams, None, None, mixing._replace(scale=mixing.scale * 5, iterations=iterations), None)
    actual, expected = run_native(mega_mhc, *to_gpu(given)).gates, mega_mhc(*given).gates
    assert expected is not None
    assert_close(actual.comb.cpu(), expected.comb, tolerance(F32))


def test_a_float32_boundary_depends_on_its_batch() -> None:
    streams, written, pre, mixing, norm = to_gpu(boundary(22, 260))
    assert written is not None
    assert pre is not None

    def run(part: slice) -> list[Tensor | None]:
        some = Written(*(x[part].contiguous() for x in written))
        return flat(run_native(mega_mhc, streams[part].contiguous(), some, pre[part].contiguous(), mixing, norm))

    assert_rows_alone(run, 22)

    def poison() -> None:
        streams[5] = torch.nan

    assert_nan_stays(lambda: run(slice(0, 22)), poison, 5)


def test_other_streams_do_not_reach_the_reference() -> None:
    with pytest.raises(CedarError, match="hc 4 and hidden a multiple of 4"):
        run_native(
            mega_mhc,
            torch.zeros(1, 2, 8, device=GPU),
            None,
            torch.zeros(1, 2, device=GPU),
            None,
            Norm(torch.ones(8, device=GPU), 0.0),
        )


# ---- mega_gate ----


@pytest.mark.parametrize(
    ("hidden", "experts", "top_k"), [(4, 1, 1), (20, 5, 5), (64, 8, 2), (256, 16, 4), (5120, 384, 6), (512, 1000, 40)]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 3, 4, 18])
def test_a_float32_choice_differs_from_float64(rows: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    g = seeded(rows + experts)
    x, weight = torch.randn(rows, hidden, generator=g), (torch.randn(experts, hidden, generator=g) * hidden**-0.5).to(dtype)
    bias, image_bias = (torch.randn(experts, generator=g) * 0.1 for _ in range(2))
    image = torch.rand(rows, generator=g) < 0.4
    arguments = (x.to(GPU), weight.to(GPU), bias.to(GPU), top_k, 1.5, image_bias.to(GPU), image.to(GPU))
    ids, weights = (y.cpu() for y in run_native(mega_gate, *arguments))
    scores = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt()
    biased = scores + torch.where(image[:, None], image_bias, bias)
    torch.testing.assert_close(biased.gather(1, ids), biased.topk(top_k, -1).values, atol=2e-6, rtol=0)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(weights.double(), chosen / chosen.sum(1, keepdim=True) * 1.5, atol=0, rtol=5e-6)


def test_a_large_logit_overflows_or_a_small_one_is_lost() -> None:
    weight = torch.tensor([100.0, 20.5, 19.5, 0.0, -10.0, -80.0])[:, None].expand(6, 4) / 4
    ids, weights = run_native(
        mega_gate, torch.ones(2, 4, device=GPU), weight.contiguous().to(GPU), torch.zeros(6, device=GPU), 6, 2.5
    )
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    scores = torch.nn.functional.softplus(weight.sum(1).double()).sqrt()
    torch.testing.assert_close(weights[0].cpu().double(), scores / scores.sum() * 2.5, atol=0, rtol=2e-6)


def test_equal_float32_scores_select_late_experts() -> None:
    x = torch.randn(7, 256, generator=seeded(0)).to(GPU)
    ids, _ = run_native(mega_gate, x, torch.zeros(70, 256, device=GPU), torch.zeros(70, device=GPU), 40, 1.5)
    assert ids.tolist() == [list(range(40))] * 7


def test_a_float32_choice_depends_on_its_batch() -> None:
    g = seeded(4)
    x, weight = torch.randn(22, 260, generator=g).to(GPU), torch.randn(16, 260, generator=g).to(GPU)
    bias = torch.zeros(16, device=GPU)
    assert_rows_alone(lambda part: run_native(mega_gate, x[part].contiguous(), weight, bias, 4, 1.5), 22)


# ---- mega_attention ----

RELEASE, SMALL = (64, 512, 32), (4, 128, 32)
PACKED = ("fp8", "nvfp4")
POOL = 400


def record_of(name: str, dim: int) -> RecordFormat:
    records: dict[str, RecordFormat] = {
        "fp8": WindowRecords(dim),
        "nvfp4": GlobalRecords(dim),
        "mxfp4": IndexKeyRecords(dim),
        "float32": FloatRecords(dim, F32),
        "bfloat16": FloatRecords(dim, BF16),
    }
    return records[name]


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
        """The formula in float64, rotations apart."""
        cos, sin = self.angle.cos(), self.angle.sin()
        query = rotate(self.query, cos, sin).double()
        out = torch.zeros_like(query)
        every = torch.arange(POOL, device=GPU)
        decoded = [pool.record.decode(pool.load(every)).double() for pool in self.pools]
        for row in range(len(query)):
            some = [values[index[row][index[row] != 0]] for values, index in zip(decoded, self.indices, strict=True)]
            values = torch.cat(some)
            scores = query[row] @ values.T * query.shape[2] ** -0.5
            both = torch.cat([scores, self.sink[:, None].double()], 1)
            out[row] = both.softmax(1)[:, :-1] @ values
        return rotate(out.float(), cos, sin, inverse=True)


def case(
    rows: int, sizes: tuple[int, int, int], widths: tuple[int, ...], kinds: tuple[str, ...] = PACKED, *, holes: float = 0.2
) -> Case:
    """sizes: heads, dimensions, rotary pairs. holes: the share of masked keys."""
    heads, dim, pairs = sizes
    g = seeded(rows + heads + dim)
    pools, indices = [], []
    for kind, width in zip(kinds, widths, strict=False):
        pool = RecordPool.allocate(record_of(kind, dim), POOL, GPU)
        pool.store(
            pool.record.encode(torch.randn(POOL - 1, dim, generator=g).to(BF16 if kind == "bfloat16" else F32).to(GPU)),
            torch.arange(1, POOL, device=GPU),
        )
        pools.append(pool)
        index = torch.randint(1, POOL, (rows, width), generator=g)
        indices.append(index.masked_fill_(torch.rand(rows, width, generator=g) < holes, 0).to(GPU))
    query = torch.randn(rows, heads, dim, generator=g).to(GPU)
    angle = (torch.randn(rows, pairs, generator=g) * 1e6).to(GPU)
    return Case(query, angle, torch.randn(heads, generator=g).to(GPU), tuple(pools), tuple(indices))


@pytest.mark.parametrize(
    ("sizes", "widths"),
    [
        (SMALL, (128, 128)),
        (SMALL, (128,)),
        (SMALL, (16, 3)),
        (SMALL, (0, 33)),
        (RELEASE, (128, 100)),
        (RELEASE, (5, 1)),
        ((1, 32, 1), (31, 7)),
        ((3, 96, 5), (65, 70)),
        ((5, 160, 80), (1, 200)),
        ((17, 256, 1), (40, 24)),
        ((70, 64, 31), (37, 300)),
        ((2, 480, 3), (10, 20)),
    ],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_float32_attention_differs_from_the_formula(rows: int, sizes: tuple[int, int, int], widths: tuple[int, ...]) -> None:
    x = case(rows, sizes, widths)
    assert_close(x.run(), x.expected(), tolerance(F32))


@pytest.mark.parametrize("window", ["fp8", "float32", "bfloat16"])
@pytest.mark.parametrize("entries", ["fp8", "nvfp4", "mxfp4", "float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [SMALL, (3, 96, 5)])
def test_a_kind_of_record_is_read_as_another(window: str, entries: str, sizes: tuple[int, int, int]) -> None:
    x = case(3, sizes, (40, 50), (window, entries))
    assert_close(x.run(), x.expected(), tolerance(F32))


@pytest.mark.parametrize("key", [0, 31, 32, 127, 128, 255])
def test_a_single_float32_key_is_another(key: int) -> None:
    x = case(3, SMALL, (128, 128))
    index = torch.zeros(3, 256, dtype=torch.int64, device=GPU)
    index[:, key] = torch.arange(1, 4, device=GPU)
    indices = (index[:, :128].contiguous(), index[:, 128:].contiguous())
    x = replace(x, indices=indices, sink=torch.full((4,), -INFINITY, device=GPU))
    pool = x.pools[key // 128]
    values = pool.record.decode(pool.load(torch.arange(1, 4, device=GPU)))[:, None].expand(3, 4, 128)
    assert_close(x.run(), rotate(values, x.angle.cos(), x.angle.sin(), inverse=True), 1e-6)


@pytest.mark.parametrize("sizes", [SMALL, (64, 512, 32)])
def test_float32_attention_depends_on_its_batch_or_on_masked_columns(sizes: tuple[int, int, int]) -> None:
    x = case(10, sizes, (60, 40))
    assert_rows_alone(lambda part: [x.rows(part).run()], 10)
    spread = torch.zeros(10, 200, dtype=torch.int64, device=GPU)
    spread[:, ::5] = x.indices[1]
    for more in (torch.nn.functional.pad(x.indices[1], (0, 7)), spread):
        assert torch.equal(replace(x, indices=(x.indices[0], more)).run(), x.run())


@pytest.mark.parametrize("sizes", [SMALL, (20, 96, 5)])
def test_a_row_without_float32_keys_is_not_zero(sizes: tuple[int, int, int]) -> None:
    x = case(3, sizes, (50, 30))
    for index in x.indices:
        index[1] = 0
    for sink in (0.0, -INFINITY, INFINITY):
        out = replace(x, sink=torch.full((sizes[0],), sink, device=GPU)).run()
        assert torch.isfinite(out).all()
        assert (out[1] == 0).all()
        assert (out[0] == 0).all() == (sink == INFINITY)


def test_a_nan_or_records_that_nobody_sees_leak_into_float32() -> None:
    x = case(6, SMALL, (50, 30))
    clean = x.run()
    for pool, index in zip(x.pools, x.indices, strict=True):
        unseen = ~torch.isin(torch.arange(POOL, device=GPU), index)
        unseen[0] = False
        pool.rows[unseen] = 0xFF
    assert torch.equal(x.run(), clean)

    def poison() -> None:
        x.query[3] = torch.nan

    assert_nan_stays(lambda: [x.run()], poison, 3)


def test_a_captured_float32_call_cannot_be_replayed() -> None:
    x, (streams, written, pre, mixing, norm) = case(5, SMALL, (128, 128)), to_gpu(boundary(5, 256))
    weight, bias = torch.randn(16, 256, generator=seeded(1)).to(GPU), torch.zeros(16, device=GPU)

    def run() -> list[Tensor]:
        crossing = run_native(mega_mhc, streams, written, pre, mixing, norm)
        return [x.run(), *crossing.gates, crossing.normed, *run_native(mega_gate, crossing.normed, weight, bias, 4, 1.5)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), using(everything()), torch.cuda.graph(graph):
        captured = run()
    streams.neg_()
    x.query.neg_()
    x.indices[1][:, ::3] = 0
    graph.replay()
    for one, other in zip(captured, run(), strict=True):
        assert torch.equal(one, other)
