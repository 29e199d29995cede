# SPDX-License-Identifier: Apache-2.0
"""The fake quantisers and the weight formats, to the bit. The number formats themselves: tests/cache/test_formats.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from cedar.cache.formats import e8m0_decode, pack_fp8, pack_mxfp4, unpack_fp8, unpack_mxfp4
from cedar.model import quantize as q
from cedar.ops.quant import fq4x, fq8

FAKES = {"fp8": (fq8, pack_fp8, unpack_fp8), "mxfp4": (fq4x, pack_mxfp4, unpack_mxfp4)}


def bits(x: Tensor) -> Tensor:
    """Compares signed zeros too."""
    return x.float().view(torch.int32)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", FAKES)
def test_values_differ_from_the_golden_ones(golden: Path, name: str, kind: str) -> None:
    units: dict[str, npt.NDArray[Any]] = dict(np.load(golden / "units_quant.npz"))
    x = torch.from_numpy(units["x_f32"])
    if kind == "bf16":
        x = torch.from_numpy(units["x_bf16bits"].view(np.int16)).view(torch.bfloat16)
    before = x.clone()
    values = FAKES[name][0](x)
    assert values.dtype == x.dtype
    assert torch.equal(bits(values), bits(torch.from_numpy(units[f"{name}_dq_{kind}"])))
    assert torch.equal(x, before), "the input was overwritten"


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e-6, 1.0, 1e4, 1e30])
def test_the_packed_form_decodes_to_something_else(name: str, scale: float) -> None:
    fake, pack, unpack = FAKES[name]
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(1)) * scale
    x[0] = (x[0] / (scale or 1) * 4).round() / 4  # ties
    assert torch.equal(bits(unpack(*pack(x))), bits(fake(x)))
    assert torch.isfinite(fake(x)).all()


@pytest.mark.parametrize("name", FAKES)
def test_quantising_twice_changes_values(name: str) -> None:
    fake = FAKES[name][0]
    once = fake(torch.randn(64, 128, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(bits(fake(once)), bits(once))


@pytest.mark.parametrize("name", FAKES)
def test_a_view_of_a_wider_tensor_gives_other_values(name: str) -> None:
    fake = FAKES[name][0]
    wide = torch.randn(7, 3, 160, generator=torch.Generator().manual_seed(3))
    assert torch.equal(fake(wide[:, :, 32:96]), fake(wide[:, :, 32:96].contiguous()))


def test_e2m1_ties_go_to_the_odd_code() -> None:
    x = torch.zeros(32)
    x[:11] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0, 5.9])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -4.0, 6.0, 6.0])
    assert torch.equal(bits(fq4x(x)[:11]), bits(expected))  # amax 6: the scale is 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32), (1, 64), (50, 70), (2100, 96)])
def test_fp8_tiles_round_trip_exactly(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, cols = shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, cols)
    codes, scale = q.quantize_fp8_tiles(weight)
    assert scale.shape == (-(-rows // 32), -(-cols // 32))
    values = q.dequantize_fp8_tiles(codes, scale, dtype)
    spread = e8m0_decode(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :cols]
    assert torch.equal(values.float(), codes.float() * spread)
    assert torch.equal(q.dequantize_fp8_tiles(*q.quantize_fp8_tiles(values), dtype), values)
    assert ((values.float() - weight).abs() <= weight.abs() / 16 + spread * 2.0**-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_rows_are_exact_in_the_compute_type(dtype: torch.dtype) -> None:
    packed, scale = q.quantize_mxfp4_rows(torch.randn(48, 64, generator=torch.Generator().manual_seed(5)))
    assert (packed.shape, scale.shape) == ((48, 32), (48, 2))
    values = q.dequantize_mxfp4_rows(packed, scale, dtype)
    assert values.dtype == dtype
    assert torch.equal(values.float(), q.dequantize_mxfp4_rows(packed, scale, torch.float32))


@pytest.mark.parametrize("fake", [fq8, fq4x])
def test_a_row_does_not_depend_on_its_neighbours(fake: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(6))
    assert torch.equal(torch.cat([fake(row[None]) for row in x]), fake(x))
