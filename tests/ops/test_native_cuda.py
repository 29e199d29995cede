# SPDX-License-Identifier: Apache-2.0
"""CUDA bodies of the library against the references, on a GPU: the release's and the embedded model's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from native_support import assert_close, everything, seeded
from torch import Tensor

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import RecordPool
from cedar.cache.rows import WindowPlan, WritePlan
from cedar.ops.compress import CompressorWeights, compress_store
from cedar.ops.mhc import Crossing, Mixing, Norm, Written, mega_mhc
from cedar.ops.moe import mega_gate
from cedar.ops.provider import using
from cedar.ops.window import window_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ROWS = [1, 2, 7, 16, 17, 33, 48, 64, 130]
BF16 = torch.bfloat16


def on_gpu(op: Any, *arguments: Any) -> Any:
    with torch.inference_mode(), using(everything()):
        return op(*arguments)


def to_gpu(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.cuda()
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(to_gpu(part) for part in x))
    return x


def same_bits(run: Callable[[slice], Sequence[Tensor | None]], rows: int) -> None:
    together = run(slice(0, rows))
    for start in range(0, rows, 5):
        part = slice(start, min(start + 5, rows))
        for some, every in zip(run(part), together, strict=True):
            if some is not None and every is not None:
                assert torch.equal(some.view(torch.uint8), every[part].contiguous().view(torch.uint8))
    for one, other in zip(run(slice(0, rows)), together, strict=True):
        assert one is None or other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def flat(crossing: Crossing) -> list[Tensor | None]:
    return [crossing.streams, *(crossing.gates or (None,) * 3), crossing.normed]


def boundary(rows: int, hidden: int) -> tuple[Tensor, Written, Tensor, Mixing, Norm]:
    g = seeded(rows)
    written = Written(
        torch.randn(rows, hidden, generator=g).to(BF16),
        2 * torch.rand(rows, 4, generator=g),
        torch.rand(rows, 4, 4, generator=g) / 4,
    )
    mixing = Mixing(
        torch.randn(24, 4 * hidden, generator=g) * hidden**-0.5,
        torch.rand(24, generator=g),
        torch.randn(24, generator=g),
        1e-6,
        1e-20,
        20,
    )
    streams = torch.randn(rows, 4, hidden, generator=g).to(BF16)
    return streams, written, torch.rand(rows, 4, generator=g), mixing, Norm(torch.rand(hidden, generator=g), 1e-20)


@pytest.mark.parametrize("hidden", [64, 256, 352, 1024, 5120])
@pytest.mark.parametrize("rows", [*ROWS, 1500])
@pytest.mark.parametrize("parts", ["all", "expand", "mix", "norm"])
def test_a_boundary_differs_from_the_reference(rows: int, hidden: int, parts: str) -> None:
    streams, written, pre, mixing, norm = boundary(rows, hidden)
    arguments = (
        streams,
        written if parts in ("all", "expand") else None,
        pre,
        mixing if parts in ("all", "mix") else None,
        norm if parts in ("all", "norm") else None,
    )
    actual, expected = flat(on_gpu(mega_mhc, *map(to_gpu, arguments))), flat(mega_mhc(*arguments))
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_close(one.cpu(), other, 4e-3)


@pytest.mark.parametrize("rows", [8, 9, 24, 25, 41, 57, 58, 112, 113, 120, 121, 169, 225, 384, 513, 1017])
def test_a_boundary_of_whole_tiles_differs(rows: int) -> None:
    """Tiles that clusters share evenly or not, the last one whole or not."""
    arguments = boundary(rows, 5120)
    for one, other in zip(flat(on_gpu(mega_mhc, *map(to_gpu, arguments))), flat(mega_mhc(*arguments)), strict=True):
        assert one is not None
        assert other is not None
        assert_close(one.cpu(), other, 4e-3)


@pytest.mark.parametrize("rows", [70, 640])
def test_a_boundary_depends_on_its_batch(rows: int) -> None:
    streams, written, pre, mixing, norm = (to_gpu(x) for x in boundary(rows, 5120))

    def run(part: slice) -> list[Tensor | None]:
        some = Written(*(x[part].contiguous() for x in written))
        return flat(on_gpu(mega_mhc, streams[part].contiguous(), some, pre[part].contiguous(), mixing, norm))

    same_bits(run, rows)


@pytest.mark.parametrize("rows", [58, 300])
def test_a_boundary_whose_tile_is_no_number(rows: int) -> None:
    """Rows of a tile whose pre is no number at all, and of others some of whose are none, do not reach other rows."""
    streams, written, pre, mixing, norm = (to_gpu(x) for x in boundary(rows, 5120))
    spoiled = pre.clone()
    spoiled[8:16] = spoiled[1::7] = float("nan")
    expected = flat(on_gpu(mega_mhc, streams, written, pre, mixing, norm))
    clean = ~spoiled.isnan().any(1)
    for one, other in zip(flat(on_gpu(mega_mhc, streams, written, spoiled, mixing, norm)), expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one[clean], other[clean])


@pytest.mark.parametrize(
    ("hidden", "experts", "top_k"), [(64, 8, 2), (96, 30, 4), (256, 16, 4), (5120, 384, 6), (5120, 128, 3), (5120, 501, 8)]
)
@pytest.mark.parametrize("rows", [*ROWS, 250, 300, 500, 700, 2053, 4096])
def test_a_choice_differs_from_the_reference(rows: int, hidden: int, experts: int, top_k: int) -> None:
    g = seeded(rows + experts)
    x, weight = (
        torch.randn(rows, hidden, generator=g).to(BF16),
        (torch.randn(experts, hidden, generator=g) * hidden**-0.5).to(BF16),
    )
    bias, image_bias = (torch.randn(experts, generator=g) * 0.1 for _ in range(2))
    image = torch.rand(rows, generator=g) < 0.3
    ids, weights = on_gpu(mega_gate, x.cuda(), weight.cuda(), bias.cuda(), top_k, 1.5, image_bias.cuda(), image.cuda())
    scores = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt()
    biased = scores + torch.where(image[:, None], image_bias, bias)
    best = biased.topk(top_k, -1).values
    torch.testing.assert_close(biased.gather(1, ids.cpu()), best, atol=1e-4, rtol=0)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    chosen = scores.gather(1, ids.cpu())
    torch.testing.assert_close(weights.cpu().double(), chosen / chosen.sum(1, keepdim=True) * 1.5, atol=1e-5, rtol=1e-4)


def test_equal_scores_select_late_experts_or_counters_are_left() -> None:
    for _ in range(3):
        ids, _ = on_gpu(
            mega_gate,
            torch.randn(70, 256).to(BF16).cuda(),
            torch.zeros(16, 256, dtype=BF16).cuda(),
            torch.zeros(16).cuda(),
            4,
            1.5,
        )
        assert ids.tolist() == [[0, 1, 2, 3]] * 70


@pytest.mark.parametrize(("copies", "top_k"), [(1, 20), (2, 16), (4, 6), (6, 32), (48, 6), (384, 3)])
@pytest.mark.parametrize("rows", [40, 300, 500, 1900])
def test_a_choice_among_equal_scores_is_not_of_the_first(rows: int, copies: int, top_k: int) -> None:
    """Experts e, e + groups, e + 2 groups, ... have the same weights: the lowest of a group come first."""
    g, groups = seeded(rows + copies), 384 // copies
    x, weight = torch.randn(rows, 5120, generator=g).to(BF16), (torch.randn(groups, 5120, generator=g) * 0.02).to(BF16)
    ids, weights = on_gpu(mega_gate, x.cuda(), weight.repeat(copies, 1).cuda(), torch.zeros(384).cuda(), top_k, 1.5)
    scores = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt().repeat(1, copies)
    chosen = scores.gather(1, ids.cpu())
    torch.testing.assert_close(chosen, scores.topk(top_k, -1).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(weights.cpu().double(), chosen / chosen.sum(1, keepdim=True) * 1.5, atol=1e-5, rtol=1e-4)
    for row in ids.tolist():
        for group in {e % groups for e in row}:
            members = [e for e in row if e % groups == group]
            assert members == [group + i * groups for i in range(len(members))]


@pytest.mark.parametrize("rows", [12, 24, 48, 100, 200, 300, 400, 500, 640])
def test_a_choice_depends_on_its_batch(rows: int) -> None:
    g = seeded(4)
    x, weight, bias = (
        torch.randn(rows, 5120, generator=g).to(BF16).cuda(),
        torch.randn(384, 5120, generator=g).to(BF16).cuda(),
        None,
    )
    bias = torch.zeros(384).cuda()
    same_bits(lambda part: on_gpu(mega_gate, x[part].contiguous(), weight, bias, 6, 1.5), rows)


@pytest.mark.parametrize("rows", [129, 193, 257, 384, 385, 392, 393, 449, 512, 513, 560, 561, 640])
def test_a_choice_depends_on_its_place_among_many(rows: int) -> None:
    g = seeded(rows)
    x = torch.randn(rows, 5120, generator=g).to(BF16).cuda()
    weight, bias = torch.randn(384, 5120, generator=g).to(BF16).cuda(), torch.randn(384, generator=g).cuda()
    ids, weights = on_gpu(mega_gate, x, weight, bias, 6, 1.5)
    for start in (0, *torch.randint(rows, (3,), generator=g).tolist(), rows - 1):
        part = slice(start, start + 1 + start % 7)
        some_ids, some_weights = on_gpu(mega_gate, x[part].contiguous(), weight, bias, 6, 1.5)
        assert torch.equal(some_ids, ids[part])
        assert torch.equal(some_weights, weights[part])


@pytest.mark.parametrize("rows", [5, 48, 128, 384, 512, 900, 2053])
@torch.inference_mode()
def test_a_router_that_begins_early_reads_what_is_not_written_yet(rows: int) -> None:
    streams, written, pre, mixing, norm = (to_gpu(x) for x in boundary(rows, 5120))
    g = seeded(rows)
    weight, bias = torch.randn(384, 5120, generator=g).to(BF16).cuda(), torch.zeros(384).cuda()
    several = [streams, streams.flip(0).contiguous(), streams.neg()]

    def chain(wait: Callable[[], None]) -> list[Tensor]:
        results: list[Tensor] = []
        for given in several * 2:
            normed = on_gpu(mega_mhc, given, written, pre, mixing, norm).normed
            wait()
            results += on_gpu(mega_gate, normed, weight, bias, 6, 1.5)
            wait()
        return results

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    for _ in range(20):
        for result in captured:
            result.zero_()
        graph.replay()
        assert all(map(torch.equal, captured, expected))


@pytest.mark.parametrize("dim", [64, 128, 512])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("history", [0, 5])
def test_window_records_differ_from_the_reference(dim: int, dtype: torch.dtype, history: int) -> None:
    g = seeded(dim)
    rows, record = 19, WindowRecords(dim)
    old = record.encode(torch.randn(39, dim, generator=g).to(dtype))
    kv, weight, angle = (
        torch.randn(rows, dim, generator=g).to(dtype),
        torch.rand(dim, generator=g),
        torch.randn(rows, 16, generator=g),
    )
    places = 1 + torch.randperm(39, generator=g)
    plan = WindowPlan(None, None, places[:rows].contiguous())
    if history:
        plan = WindowPlan(places[-history:].contiguous(), torch.arange(3, rows), torch.cat([places[-2:], places[: rows - 5]]))
    results = []
    for device in ("cuda", "cpu"):
        ring = RecordPool.allocate(record, 40, torch.device(device))
        ring.store(old.to(device), torch.arange(1, 40, device=device))
        moved = WindowPlan(*(None if x is None else x.to(device) for x in (plan.history, plan.store_from, plan.store_to)))
        arguments = (kv.to(device), weight.to(device), 1e-20, angle.cos().to(device), angle.sin().to(device), ring, moved)
        table, staged = on_gpu(window_store, *arguments) if device == "cuda" else window_store(*arguments)
        results.append([x.cpu() for x in (table, staged, ring.rows)])
    for one, other in zip(*results, strict=True):
        assert ((one != other).float().mean() < 2e-3).item()
        assert_close(record.decode(one), record.decode(other), 2e-2)


@pytest.mark.parametrize(("dim", "index_dim"), [(64, 64), (128, 64), (128, 128), (512, 128)])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_entries_differ_from_the_reference(dim: int, index_dim: int, ratio: int, masked: bool) -> None:
    g = seeded(dim + ratio)
    rows = 24 if ratio == 1 else 25
    groups = torch.arange(rows // ratio)
    projected = torch.randn(rows, ratio * dim, generator=g).to(BF16 if ratio == 1 else torch.float32)
    weights = CompressorWeights(
        torch.rand(dim, generator=g),
        (torch.randn(index_dim, dim, generator=g) * dim**-0.5).to(BF16),
        torch.rand(index_dim, generator=g),
        1e-20,
    )
    slots = 1 + groups
    if masked:
        slots = torch.where(groups % 3 == 0, -1, slots)
    write = WritePlan(None, slots, groups * ratio, masked=masked)
    if ratio == 2:  # row 0 ends a group whose first token is in open row 2, and the last row leaves its group open there
        first = torch.where(groups == 0, 0, 2 * groups)
        write = WritePlan(
            torch.where(groups == 0, 0, 2 * groups),
            slots,
            groups * 2,
            first,
            torch.tensor([2]),
            torch.tensor([24]),
            torch.tensor([2]),
            masked,
        )
    angle = torch.randn(len(groups), 16, generator=g)
    results = []
    for device in ("cuda", "cpu"):
        pools = [
            RecordPool.allocate(record, 32, torch.device(device)) for record in (GlobalRecords(dim), IndexKeyRecords(index_dim))
        ]
        open_rows = torch.ones(4, 2 * dim, device=device) if ratio == 2 else None
        fields = (write.rows, write.slots, write.positions, write.first, write.open_from, write.open_rows, write.open_to)
        moved = WritePlan(*(None if x is None else x.to(device) for x in fields), masked)
        some = CompressorWeights(*(x.to(device) for x in weights[:3]), weights.eps)
        arguments = (projected.to(device), open_rows, moved, some, angle.cos().to(device), angle.sin().to(device), *pools)
        on_gpu(compress_store, *arguments) if device == "cuda" else compress_store(*arguments)
        results.append((pools, open_rows))
    everywhere = torch.arange(32)
    for one, other in zip(results[0][0], results[1][0], strict=True):
        decoded = one.record.decode(one.load(everywhere.cuda()).cpu()), other.record.decode(other.load(everywhere))
        assert ((decoded[0] != decoded[1]).float().mean() < 5e-2).item()
        assert_close(*decoded, 0.1)
    if ratio == 2:
        assert torch.equal(results[0][1].cpu(), results[1][1])


@pytest.mark.parametrize(("dim", "index_dim"), [(64, 64), (512, 128)])
@pytest.mark.parametrize("ratio", [1, 2])
def test_an_entry_depends_on_its_batch(dim: int, index_dim: int, ratio: int) -> None:
    """Batches of one group to a cluster, of two, of a few to a block, and of so many that a block takes several turns."""
    g = seeded(dim)
    count = 1100
    projected = torch.randn(count * ratio, ratio * dim, generator=g).to(BF16 if ratio == 1 else torch.float32).cuda()
    wk = (torch.randn(index_dim, dim, generator=g) * dim**-0.5).to(BF16).cuda()
    weights = CompressorWeights(torch.rand(dim, generator=g).cuda(), wk, torch.rand(index_dim, generator=g).cuda(), 1e-20)
    angle = torch.randn(count, 16, generator=g).cuda()
    records = (GlobalRecords(dim), IndexKeyRecords(index_dim))
    nothing = torch.zeros(0, dtype=torch.int64).cuda()

    def run(part: slice, *, named: bool = False) -> list[Tensor]:
        """named: the plan names all rows, which it may leave out."""
        pools = [RecordPool.allocate(record, 1112, torch.device("cuda")) for record in records]
        some = projected[part.start * ratio : part.stop * ratio].contiguous()
        number = torch.arange(part.stop - part.start).cuda()
        slots = 1 + number + part.start
        plan = WritePlan(number if named else None, slots, number)
        if ratio == 2:
            plan = WritePlan(2 * number + 1, slots, number * 2, 2 * number, nothing, nothing, nothing, False)
        opened = torch.ones(4, 2 * dim).cuda() if ratio == 2 else None
        turned = angle[part].cos().contiguous(), angle[part].sin().contiguous()
        on_gpu(compress_store, some, opened, plan, weights, *turned, *pools)
        return [pool.load(slots).cpu() for pool in pools]

    together = run(slice(0, count))
    for part in (slice(0, 1), slice(1, 8), slice(8, 71), slice(71, 171), slice(171, count)):
        for some, every in zip(run(part), together, strict=True):
            assert torch.equal(some, every[part])
    for some, every in zip(run(slice(0, count), named=True), together, strict=True):
        assert torch.equal(some, every)


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dim", [64, 128, 512])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_group_that_is_not_finite_is_encoded_otherwise(dim: int, dtype: torch.dtype, value: float) -> None:
    """Byte for byte as the reference; rows of one magnitude have an RMS of 1, so that the norm's weight is what is encoded.

    FP8 and MXFP4 make the group of a NaN or an infinity NaNs; NVFP4 that of a NaN, and keeps an infinity as 2688.
    """
    weight = torch.linspace(0.5, 3.0, dim).to(dtype).float()
    weight[35] = value
    index_dim = 128 if dim == 512 else 64
    window, entries, keys = WindowRecords(dim), GlobalRecords(dim), IndexKeyRecords(index_dim)
    ring, kv_pool, index_pool = (RecordPool.allocate(record, 16, torch.device("cuda")) for record in (window, entries, keys))
    x, slots = torch.ones(2, dim).to(dtype), torch.arange(1, 3)
    x[1] = -1
    still = (torch.ones(2, 0).cuda(), torch.zeros(2, 0).cuda())
    on_gpu(window_store, x.cuda(), weight.cuda(), 0.0, *still, ring, WindowPlan(None, None, slots.cuda()))
    wk = torch.eye(index_dim, dim).to(dtype)
    first = CompressorWeights(weight.cuda(), wk.cuda(), torch.ones(index_dim).cuda(), 0.0)
    second = CompressorWeights(torch.ones(dim).cuda(), wk.cuda(), weight[:index_dim].contiguous().cuda(), 0.0)
    expected = {ring: window.encode((x.float() * weight).to(dtype)), kv_pool: entries.encode((x.float() * weight).to(dtype))}
    expected[index_pool] = keys.encode((x[:, :index_dim].float() * weight[:index_dim]).to(dtype))
    plan = WritePlan(None, slots.cuda(), slots.cuda())
    other = RecordPool.allocate(entries, 16, torch.device("cuda"))
    on_gpu(compress_store, x.cuda(), None, plan, second, *still, other, index_pool)
    on_gpu(compress_store, x.cuda(), None, plan, first, *still, kv_pool, RecordPool.allocate(keys, 16, torch.device("cuda")))
    for pool, records in expected.items():
        assert torch.equal(pool.load(slots.cuda()).cpu(), records)


def test_a_captured_call_cannot_be_replayed() -> None:
    streams, written, pre, mixing, norm = (to_gpu(x) for x in boundary(5, 256))
    on_gpu(mega_mhc, streams, written, pre, mixing, norm)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), using(everything()), torch.cuda.graph(graph):
        captured = flat(mega_mhc(streams, written, pre, mixing, norm))
    streams.neg_()
    graph.replay()
    for one, other in zip(captured, flat(on_gpu(mega_mhc, streams, written, pre, mixing, norm)), strict=True):
        assert one is not None
        assert torch.equal(one, other)
