# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM as a provider: what it is given, when it is not asked, and, on a Hopper GPU that has it, its results."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from deep_gemm_support import (
    E4M3,
    FP8_BOUND,
    Kernels,
    deep_gemm,
    gpu,
    matrix_of,
    needs_package,
    normal,
    run,
    run_package,
    tiles,
)
from native_support import assert_close, assert_nan_stays, seeded

from cedar.cache.formats import e8m0_decode
from cedar.model.quantize import dequantize_fp8_tiles
from cedar.ops import peer_deep_gemm
from cedar.ops.attention import wo_a
from cedar.ops.linear import mxfp8_linear
from cedar.ops.norm import Norm
from cedar.ops.peer_deep_gemm import aligned
from cedar.ops.provider import using
from cedar.ops.quant import tile_values

BF16 = torch.bfloat16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels.put(monkeypatch)


@pytest.mark.parametrize("shift", [0, 3, 6])
def test_weights_change_where_codes_reach(shift: int) -> None:
    """Codes that are at least 2^(shift - 6) stay exact under a scale that is 2^shift larger."""
    g = seeded(shift)
    codes = (normal(g, 256, 128).sign() * (torch.rand(256, 128, generator=g) * 440 + 8)).to(E4M3)
    scale = 120 + torch.randint(0, shift + 1, (8, 4), generator=g).to(torch.uint8)
    moved, blocks = aligned(codes, scale)
    assert torch.equal(matrix_of(moved, blocks), tile_values(codes, scale, torch.float32))
    assert torch.equal(blocks, e8m0_decode(scale.view(2, 4, 1, 4).amax((1, 3))))


def test_small_weights_beside_large_ones_are_lost_to_more_than_rounding() -> None:
    codes, scale = tiles(seeded(1), 256, 384, spread=20.0)
    moved, blocks = aligned(codes, scale)
    error = (matrix_of(moved, blocks) - tile_values(codes, scale, torch.float32)).abs()
    step = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1) * 2.0**-9
    assert error.max() > 0
    assert (error <= step / 2).all()


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
def test_an_fp8_product_differs_from_the_reference(kernels: Kernels, rows: int) -> None:
    g = seeded(rows)
    x, (codes, scale) = normal(g, rows, 256).to(BF16), tiles(g, 384, 256)
    norm = Norm(torch.rand(384, generator=g) + 0.5, 1e-6)
    for more in ({}, {"act_quant": True}, {"norm": norm}):
        assert_close(run(mxfp8_linear, x, codes, scale=scale, **more), mxfp8_linear(x, codes, scale=scale, **more), FP8_BOUND)
    assert kernels.calls == ["fp8_gemm_nt"] * 3


def test_the_inputs_of_a_bfloat16_weight_are_rounded_unasked(kernels: Kernels) -> None:
    g = seeded(2)
    x, weight = normal(g, 9, 256).to(BF16), normal(g, 128, 256).to(BF16)
    for act_quant in (False, True):
        assert_close(run(mxfp8_linear, x, weight, act_quant), mxfp8_linear(x, weight, act_quant), 4e-3)
    strided = normal(g, 9, 512).to(BF16)[:, :256]
    assert_close(run(mxfp8_linear, strided, weight), mxfp8_linear(strided, weight), 4e-3)
    assert kernels.calls == ["bf16_gemm_nt"] * 3


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_grouped_product_differs_from_the_reference(kernels: Kernels, rows: int) -> None:
    g = seeded(rows)
    out, (codes, scale) = normal(g, rows, 4, 256).to(BF16), tiles(g, 2 * 128, 512)
    weight = dequantize_fp8_tiles(codes, scale, BF16)
    expected = wo_a(out, weight, 2)
    assert_close(run(wo_a, out, codes, 2, scale), expected, FP8_BOUND)
    assert_close(run(wo_a, out, weight, 2), expected, 4e-3)
    assert kernels.calls == ["fp8_einsum", "einsum"]


def test_a_weight_is_converted_at_every_call(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    convert = peer_deep_gemm._one_scale_per_block
    monkeypatch.setattr(peer_deep_gemm, "_one_scale_per_block", lambda *weight: made.append(1) or convert(*weight))
    g = seeded(3)
    x, weights = normal(g, 2, 128).to(BF16), [tiles(g, 128, 128) for _ in range(2)]
    for codes, scale in weights * 3:
        assert_close(run(mxfp8_linear, x, codes, scale=scale), mxfp8_linear(x, codes, scale=scale), FP8_BOUND)
    assert len(made) == 2


def test_what_comes_of_a_weight_outlives_it(kernels: Kernels) -> None:
    """Else unloading a model frees half of it, and another weight at the same address is taken for the first."""
    x = torch.eye(128, dtype=BF16)
    gc.collect()
    for value in (1.0, 2.0):
        before = len(peer_deep_gemm._converted)
        codes, scale = torch.full((128, 128), value).to(E4M3), torch.full((4, 4), 127, dtype=torch.uint8)
        assert run(mxfp8_linear, x, codes, scale=scale).eq(value).all()
        assert len(peer_deep_gemm._converted) == before + 1
        del codes, scale
        gc.collect()
        assert len(peer_deep_gemm._converted) == before


def test_a_nan_spreads_to_other_rows(kernels: Kernels) -> None:
    g = seeded(4)
    x, (codes, scale) = normal(g, 5, 256).to(BF16), tiles(g, 128, 256)
    assert_nan_stays(lambda: [run(mxfp8_linear, x, codes, scale=scale)], lambda: x[2].fill_(torch.nan), 2)


@pytest.mark.parametrize(
    ("why", "x", "weight", "wide"),
    [
        ("a matrix is 96 x 128; it takes multiples of 128", (2, 128, BF16), (96, 128, BF16), False),
        ("a matrix is 128 x 160; it takes multiples of 128", (2, 160, BF16), (128, 160, BF16), False),
        ("inputs are torch.float32 and the weight is torch.bfloat16", (2, 128, torch.float32), (128, 128, BF16), False),
        ("inputs are torch.bfloat16 and the weight is torch.float32", (2, 128, BF16), (128, 128, torch.float32), False),
        ("the result is to be float32", (2, 128, BF16), (128, 128, BF16), True),
    ],
)
def test_a_product_that_it_cannot_do_fails_or_is_silent(
    kernels: Kernels, caplog: pytest.LogCaptureFixture, why: str, x: tuple[Any, ...], weight: tuple[Any, ...], wide: bool
) -> None:
    g = seeded(5)
    inputs, matrix = normal(g, *x[:2]).to(x[2]), normal(g, *weight[:2]).to(weight[2])
    with using(deep_gemm()), caplog.at_level(logging.WARNING):
        results = [mxfp8_linear(inputs, matrix, wide=wide) for _ in range(2)]
    expected = mxfp8_linear(inputs, matrix, wide=wide)
    assert all(torch.equal(result, expected) for result in results)
    assert kernels.calls == []
    (record,) = caplog.records
    assert record.getMessage().startswith(f"mxfp8_linear runs without deep_gemm where that cannot: {why}")


def test_a_grouped_product_of_small_groups_fails(kernels: Kernels) -> None:
    g = seeded(6)
    out, weight = normal(g, 3, 4, 64).to(BF16), normal(g, 4 * 32, 64).to(BF16)
    with using(deep_gemm()):
        assert torch.equal(wo_a(out, weight, 4), wo_a.reference(out, weight, 4))
    assert kernels.calls == []


# ---- the package itself ----


@pytest.mark.parametrize(("outputs", "inputs"), [(1792, 5120), (5120, 8192)])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.gpu
@needs_package
def test_the_package_multiplies_otherwise(rows: int, outputs: int, inputs: int) -> None:
    g = gpu(rows)
    x, (codes, scale) = normal(g, rows, inputs).to(BF16), tiles(g, outputs, inputs)
    weight = dequantize_fp8_tiles(codes, scale, BF16)
    expected = x.double() @ weight.double().T
    assert_close(run_package(mxfp8_linear, x, codes, scale=scale), expected, FP8_BOUND)
    assert_close(run_package(mxfp8_linear, x, weight), expected, 5e-3)


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.gpu
@needs_package
def test_the_package_multiplies_groups_otherwise(rows: int) -> None:
    g = gpu(rows)
    out, (codes, scale) = normal(g, rows, 64, 512).to(BF16), tiles(g, 8 * 1024, 4096)
    weight = dequantize_fp8_tiles(codes, scale, BF16)
    expected = wo_a(out.double(), weight.double(), 8)
    assert_close(run_package(wo_a, out, codes, 8, scale), expected, FP8_BOUND)
    assert_close(run_package(wo_a, out, weight, 8), expected, 5e-3)
