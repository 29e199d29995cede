# SPDX-License-Identifier: Apache-2.0
"""Dense linears and norms: the checkpoint's formats, activation quantisation, float32 inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cedar.model.linear import Linear, load_dense, load_wide
from cedar.model.norm import RMSNorm
from cedar.model.quantize import dequantize_fp8_tiles, quantize_fp8_tiles
from cedar.ops.norm import rms_norm
from cedar.ops.quant import fq8


def stored(rows: int, cols: int) -> tuple[Tensor, dict[str, Tensor]]:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) / cols**0.5
    codes, scale = quantize_fp8_tiles(weight)
    return dequantize_fp8_tiles(codes, scale, torch.float32), {"w.weight": codes, "w.scale": scale, "p.weight": weight.bfloat16()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_linear_multiplies_by_the_dequantised_weight(dtype: torch.dtype) -> None:
    weight, tensors = stored(96, 64)
    linear = Linear(64, 96, dtype, fp8=True)
    linear.load(tensors.__getitem__, "w")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(linear.weight.float(), weight)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [96, 40])
def test_codes_that_are_kept_multiply_otherwise(dtype: torch.dtype, rows: int) -> None:
    _, tensors = stored(rows, 64)
    kept, plain = (Linear(64, rows, dtype, fp8=True, weight_dtype=weight) for weight in (torch.float8_e4m3fn, None))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for linear in (kept, plain):
        linear.load(tensors.__getitem__, "w")
    assert kept.weight.dtype is torch.float8_e4m3fn
    assert torch.equal(kept(x), plain(x))


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_a_float32_weight_is_narrowed(held: torch.dtype) -> None:
    parts = {name: torch.randn(5, 8, generator=torch.Generator().manual_seed(3)).to(held) for name in "ab"}
    loaded = load_wide(parts.__getitem__, ["a", "b"], nn.Parameter(torch.empty(10, 8, dtype=torch.bfloat16), requires_grad=False))
    assert loaded.dtype is held
    assert torch.equal(loaded, torch.cat([parts["a"], parts["b"]]))
    assert load_wide(parts.__getitem__, ["a"], nn.Parameter(torch.empty(5, 8))).dtype is torch.float32


def test_activation_quantisation_rounds_the_input_of_fp8_linears_alone() -> None:
    weight, tensors = stored(32, 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    quantised = Linear(64, 32, torch.float32, fp8=True, act_quant=True)
    quantised.load(tensors.__getitem__, "w")
    assert torch.equal(quantised(x), torch.nn.functional.linear(fq8(x), weight))
    assert not torch.equal(quantised(x), torch.nn.functional.linear(x, weight))
    plain = Linear(64, 32, torch.float32, fp8=False, act_quant=True)
    plain.load(tensors.__getitem__, "p")
    assert torch.equal(plain(x), torch.nn.functional.linear(x, tensors["p.weight"].float()))


def test_a_dense_weight_loads_into_a_part_of_a_bigger_one() -> None:
    weight, tensors = stored(64, 32)
    both = torch.zeros(128, 32)
    load_dense(tensors.__getitem__, "w", both[64:], fp8=True)
    assert torch.equal(both[64:], weight)
    assert not both[:64].any()


def test_rms_norm_is_float32_inside_and_rounded_once() -> None:
    norm = RMSNorm(64, 1e-20)
    norm.load({"n.weight": torch.linspace(0.5, 2, 64).bfloat16()}.__getitem__, "n")
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(2)) * 1e-9).bfloat16()
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-20).rsqrt() * norm.weight.double()
    assert rms_norm(x, *norm.norm).dtype == torch.bfloat16
    torch.testing.assert_close(rms_norm(x, *norm.norm).double(), expected, rtol=2**-8, atol=0)
    torch.testing.assert_close(rms_norm(x.float(), *norm.norm).double(), expected, rtol=1e-6, atol=0)


def test_rms_norm_of_zero_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-20), torch.zeros(2, 32))
