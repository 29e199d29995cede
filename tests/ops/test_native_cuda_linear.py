# SPDX-License-Identifier: Apache-2.0
"""The library's linears on a GPU against float64 products: few rows and many, bf16 weights and E4M3 tiles."""

from __future__ import annotations

import pytest
import torch
from native_support import assert_close, run_native
from torch import Tensor

from cedar.model.quantize import dequantize_fp8_tiles, quantize_fp8_tiles
from cedar.ops.attention import wo_a
from cedar.ops.linear import mxfp8_linear
from cedar.ops.native import NativeUnsupported, load
from cedar.ops.norm import Norm, rms_norm
from cedar.ops.quant import fq8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ROWS = [1, 2, 7, 16, 17, 33, 48, 64, 65, 130, 641, 900]
BF16 = torch.bfloat16
FEW = 16
"""Rows whose sums have an order of their own."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, device="cuda")


def fp8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    load()
    y = torch.full((x.shape[0], codes.shape[0]), torch.nan, dtype=BF16, device="cuda")
    torch.ops.cedar.mxfp8_linear.default(x, codes, scale, None, y, False, 0.0)
    return y


@pytest.mark.parametrize(("groups", "inner", "rank"), [(8, 4096, 1024), (2, 128, 32), (4, 256, 64)])
@pytest.mark.parametrize("rows", ROWS)
def test_the_grouped_projection_differs_from_the_reference(rows: int, groups: int, inner: int, rank: int) -> None:
    g = seeded(rows + inner)
    out, weight = normal(g, rows, groups, inner).to(BF16), normal(g, groups * rank, inner).to(BF16)
    actual, expected = (
        run_native(wo_a, out, weight, groups),
        wo_a(out.double(), weight.double(), groups),
    )
    assert_close(actual, expected, 5e-3)


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 200, 2300])
def test_fp8_tiles_multiply_otherwise_than_their_values_in_groups(rows: int) -> None:
    g = seeded(rows)
    codes, scale = quantize_fp8_tiles(normal(g, 2048, 1024) * torch.logspace(-4, 2, 1024, device="cuda"))
    x, y = normal(g, rows, 2, 1024).to(BF16), torch.empty(rows, 2048, dtype=BF16, device="cuda")
    load()
    torch.ops.cedar.wo_a.default(x, codes, scale, y, 2, 1024, 1024)
    assert_close(y, wo_a(x.double(), dequantize_fp8_tiles(codes, scale, torch.float32).double(), 2), 5e-3)


@pytest.mark.parametrize(("outputs", "inputs"), [(1792, 5120), (5120, 8192), (9248, 192), (272, 320), (64, 64)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_product_differs_from_its_values(rows: int, outputs: int, inputs: int, fp8: bool) -> None:
    g = seeded(rows + inputs)
    x, weight = normal(g, rows, inputs).to(BF16), normal(g, outputs, inputs)
    if fp8:
        codes, scale = quantize_fp8_tiles(weight * torch.logspace(-3, 1, inputs, device="cuda"))
        y, values = fp8_linear(x, codes, scale), dequantize_fp8_tiles(codes, scale, torch.float32)
    else:
        values = weight.to(BF16)
        y = run_native(mxfp8_linear, x, values)
    assert_close(y, x.double() @ values.double().T, 5e-3)


@pytest.mark.parametrize(("outputs", "inputs"), [(5120, 1024), (40000, 192), (32768, 512), (2624, 256), (64, 16384)])
@pytest.mark.parametrize("rows", [8, 48, 70, 128, 300])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_product_of_full_blocks_or_many_stages_differs_from_its_values(rows: int, outputs: int, inputs: int, fp8: bool) -> None:
    g = seeded(rows + inputs)
    x, weight = normal(g, rows, inputs).to(BF16), normal(g, outputs, inputs)
    if fp8:
        codes, scale = quantize_fp8_tiles(weight * torch.logspace(-3, 1, inputs, device="cuda"))
        run, values = (lambda x: fp8_linear(x, codes, scale)), dequantize_fp8_tiles(codes, scale, torch.float32)
    else:
        values = weight.to(BF16)
        run = lambda x: run_native(mxfp8_linear, x, values)  # noqa: E731
    y = run(x)
    assert_close(y, x.double() @ values.double().T, 5e-3)
    assert torch.equal(run(x[2:25].contiguous()), y[2:25])


@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 1280), (1792, 5120), (5120, 8192), (32768, 1280)])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_depends_on_how_many_there_are(fp8: bool, outputs: int, inputs: int) -> None:
    g = seeded(1)
    x = normal(g, 640, inputs).to(BF16)
    codes, scale = quantize_fp8_tiles(normal(g, outputs, inputs))
    weight = dequantize_fp8_tiles(codes, scale, BF16)
    run = (lambda x: fp8_linear(x, codes, scale)) if fp8 else (lambda x: run_native(mxfp8_linear, x, weight))
    for many, parts in (
        (x, ((7, 31), (8, 48), (40, 104), (5, 70), (100, 299), (300, 600), (0, 640))),
        (x[:FEW].contiguous(), ((0, 1), (3, 11), (14, 16))),
    ):
        together = run(many)
        for start, stop in parts:
            assert torch.equal(run(many[start:stop].contiguous()), together[start:stop]), (start, stop)


@pytest.mark.parametrize(
    ("groups", "inner", "rank"), [(3, 256, 160), (3, 448, 320), (2, 1280, 96), (2, 1024, 96), (2, 4096, 64), (8, 4096, 1024)]
)
def test_a_row_of_the_grouped_projection_depends_on_how_many_there_are(groups: int, inner: int, rank: int) -> None:
    g = seeded(rank)
    x = normal(g, 640, groups, inner).to(BF16)
    codes, scale = quantize_fp8_tiles(normal(g, groups * rank, inner) * torch.logspace(-4, 2, inner, device="cuda"))
    load()

    def run(x: Tensor) -> Tensor:
        y = torch.full((x.shape[0], groups * rank), torch.nan, dtype=BF16, device="cuda")
        torch.ops.cedar.wo_a.default(x, codes, scale, y, groups, inner, rank)
        return y

    for many, parts in (
        (x, (65, 70, 96, 128, 129, 199, 250, 320, 380, 512)),
        (x[:64].contiguous(), (17, 24, 31, 32, 33, 40, 48)),
        (x[:FEW].contiguous(), (1, 5, 8, 9, 11)),
    ):
        together = run(many)
        assert_close(together, wo_a(many.double(), dequantize_fp8_tiles(codes, scale, torch.float32).double(), groups), 5e-3)
        for start, rows in enumerate(parts):
            assert torch.equal(run(many[start : start + rows].contiguous()), together[start : start + rows]), rows


@pytest.mark.parametrize(("outputs", "inputs", "out_type"), [(272, 1280, BF16), (80, 576, torch.float32), (8480, 192, BF16)])
@pytest.mark.parametrize("fp8", [False, True])
def test_few_rows_are_added_in_another_order(fp8: bool, outputs: int, inputs: int, out_type: torch.dtype) -> None:
    g = seeded(3)
    x = normal(g, 70, inputs).to(BF16)
    codes, scale = quantize_fp8_tiles(normal(g, outputs, inputs))
    weight, scales = (codes, scale) if fp8 else (dequantize_fp8_tiles(codes, scale, BF16), None)
    load()

    def run(x: Tensor) -> Tensor:
        y = torch.full((x.shape[0], outputs), torch.nan, dtype=out_type, device="cuda")
        torch.ops.cedar.mxfp8_linear.default(x, weight, scales, None, y, False, 0.0)
        return y

    for many, parts in ((x, ((8, 25), (30, 62), (20, 68))), (x[:FEW].contiguous(), ((0, 1), (3, 11), (0, 13)))):
        together = run(many)
        for start, stop in parts:
            assert torch.equal(run(many[start:stop].contiguous()), together[start:stop]), (start, stop)


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(72, 10240), (4260, 6144), (16932, 1280), (1792, 5120), (5120, 8192), (32768, 1280)]
)
@pytest.mark.parametrize("out_type", [BF16, torch.float32])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_few_rows_of_a_streamed_weight_depend_on_how_many_there_are(
    seed: int, out_type: torch.dtype, outputs: int, inputs: int
) -> None:
    g = seeded(seed * outputs)
    x = normal(g, FEW, inputs).to(BF16)
    codes, scale = quantize_fp8_tiles(normal(g, outputs, inputs) * torch.logspace(-3, 1, inputs, device="cuda"))
    load()

    def run(x: Tensor) -> Tensor:
        y = torch.full((x.shape[0], outputs), torch.nan, dtype=out_type, device="cuda")
        torch.ops.cedar.mxfp8_linear.default(x, codes, scale, None, y, False, 0.0)
        return y

    together = run(x)
    assert_close(together, x.double() @ dequantize_fp8_tiles(codes, scale, torch.float32).double().T, 5e-3)
    for rows in (1, 8, 9, int(torch.randint(2, FEW, (1,), generator=g, device="cuda"))):
        start = int(torch.randint(0, FEW + 1 - rows, (1,), generator=g, device="cuda"))
        part = slice(start, start + rows)
        assert torch.equal(run(x[part].contiguous()), together[part]), part


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(328, 4160), (1352, 2624), (72, 9280), (2080, 640), (352, 2048), (1376, 1024), (96, 512), (4704, 4096)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_some_tens_of_rows_depend_on_how_many_there_are(seed: int, outputs: int, inputs: int) -> None:
    g = seeded(seed * outputs)
    x = normal(g, 80, inputs).to(BF16)
    codes, scale = quantize_fp8_tiles(normal(g, outputs, inputs) * torch.logspace(-3, 1, inputs, device="cuda"))
    together = fp8_linear(x, codes, scale)
    assert_close(together, x.double() @ dequantize_fp8_tiles(codes, scale, torch.float32).double().T, 5e-3)
    for rows in (17, 24, 31, 32, 33, 41, 48, 50, 64):
        start = int(torch.randint(0, 81 - rows, (1,), generator=g, device="cuda"))
        part = slice(start, start + rows)
        assert torch.equal(fp8_linear(x[part].contiguous(), codes, scale), together[part]), part


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_of_very_many_depends_on_the_others(fp8: bool) -> None:
    g = seeded(2)
    x = normal(g, 1500, 1280).to(BF16)
    codes, scale = quantize_fp8_tiles(normal(g, 4640, 1280))
    weight = dequantize_fp8_tiles(codes, scale, BF16)
    run = (lambda x: fp8_linear(x, codes, scale)) if fp8 else (lambda x: run_native(mxfp8_linear, x, weight))
    together = run(x)
    for start, stop in ((0, 641), (333, 1100), (1, 1500)):
        assert torch.equal(run(x[start:stop].contiguous()), together[start:stop]), (start, stop)


@pytest.mark.parametrize("rows", [1, 48, 130, 700])
@pytest.mark.parametrize("out_type", [BF16, torch.float32])
def test_rounding_and_norm_differ_from_the_reference(rows: int, out_type: torch.dtype) -> None:
    g = seeded(rows)
    x = (normal(g, rows, 1280) * torch.logspace(-3, 2, 1280, device="cuda")).to(BF16)
    codes, scale = quantize_fp8_tiles(normal(g, 1792, 1280))
    weight, norm = dequantize_fp8_tiles(codes, scale, torch.float32), Norm(torch.rand(1792, device="cuda"), 1e-6)
    load()
    y = torch.full((rows, 1792), torch.nan, dtype=out_type, device="cuda")
    torch.ops.cedar.mxfp8_linear.default(x, codes, scale, norm.weight, y, True, norm.eps)
    rounded = (fq8(x).double() @ weight.double().T).to(out_type)
    assert_close(y, rms_norm(rounded, *norm), 5e-3)
    torch.ops.cedar.mxfp8_linear.default(x, codes, scale, None, y, True, 0.0)
    plain = torch.empty_like(y)
    torch.ops.cedar.mxfp8_linear.default(fq8(x), codes, scale, None, plain, False, 0.0)
    assert torch.equal(y, plain)


@pytest.mark.parametrize("rows", [9, 90])
def test_a_nan_spreads_to_other_rows(rows: int) -> None:
    g = seeded(rows)
    x, weight = normal(g, rows, 512).to(BF16), normal(g, 256, 512).to(BF16)
    clean = run_native(mxfp8_linear, x, weight)
    x[4] = torch.nan
    dirty = run_native(mxfp8_linear, x, weight)
    assert dirty[4].isnan().all()
    others = [n for n in range(rows) if n != 4]
    assert torch.equal(dirty[others], clean[others])


def test_the_reference_does_not_take_over_where_a_body_ends() -> None:
    load()
    x, weight = torch.zeros(3, 40, dtype=BF16, device="cuda"), torch.zeros(64, 40, dtype=BF16, device="cuda")
    with pytest.raises(NativeUnsupported, match="in_dim 40"):
        torch.ops.cedar.mxfp8_linear.default(x, weight, None, None, torch.empty(3, 64, dtype=BF16, device="cuda"), False, 0.0)


@pytest.mark.parametrize("rows", [1, 16, 48, 500, 900])
def test_a_launch_that_begins_early_reads_what_is_not_written_yet(rows: int) -> None:
    g = seeded(rows)
    layers = [quantize_fp8_tiles(normal(g, outputs, inputs)) for outputs, inputs in [(4096, 1024), (1024, 4096)] * 4]
    start, x = normal(g, rows, 1024).to(BF16), torch.zeros(rows, 1024, dtype=BF16, device="cuda")

    def chain() -> Tensor:
        y = x.copy_(start)
        for codes, scale in layers:
            y = fp8_linear(y, codes, scale) * 2**-6
        return y

    def by_one(y: Tensor) -> Tensor:
        for codes, scale in layers:
            y = fp8_linear(y, codes, scale)
            torch.cuda.synchronize()
            y = y * 2**-6
            torch.cuda.synchronize()
        return y

    expected = by_one(start)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        start.neg_()
        graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(chain(), expected)


def test_linears_that_follow_each_other_read_what_is_not_written_yet() -> None:
    g = seeded(5)
    layers = [quantize_fp8_tiles(normal(g, outputs, inputs) * 2**-6) for outputs, inputs in [(4096, 1024), (1024, 4096)] * 8]
    for rows in (3, 40, 640):
        y = x = normal(g, rows, 1024).to(BF16)
        for codes, scale in layers:
            y = fp8_linear(y, codes, scale)
            torch.cuda.synchronize()
        for _ in range(20):
            z = x
            for codes, scale in layers:
                z = fp8_linear(z, codes, scale)
            assert torch.equal(z, y)
