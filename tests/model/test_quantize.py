# SPDX-License-Identifier: Apache-2.0
"""The number formats, to the bit, against the independent implementation's units and the published ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from cedar.model import quantize as q

FORMATS = {
    "fp8": (q.fq8, q.pack_fp8, q.unpack_fp8, "codes"),
    "nvfp4": (q.fq4n, q.pack_nvfp4, q.unpack_nvfp4, "packed"),
    "mxfp4": (q.fq4x, q.pack_mxfp4, q.unpack_mxfp4, "packed"),
}


def bits(x: Tensor) -> Tensor:
    """Compares signed zeros too."""
    return x.float().view(torch.int32)


def golden_input(units: dict[str, npt.NDArray[Any]], kind: str) -> Tensor:
    if kind == "f32":
        return torch.from_numpy(units["x_f32"])
    return torch.from_numpy(units["x_bf16bits"].view(np.int16)).view(torch.bfloat16)


@pytest.fixture(scope="module")
def units(golden: Path) -> dict[str, npt.NDArray[Any]]:
    return dict(np.load(golden / "units_quant.npz"))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_values_codes_and_scales_equal_the_golden_ones(units: dict[str, npt.NDArray[Any]], name: str, kind: str) -> None:
    fake, pack, unpack, stored = FORMATS[name]
    x = golden_input(units, kind)
    before = x.clone()
    values = fake(x)
    packed, scale = pack(x)
    assert values.dtype == x.dtype
    assert torch.equal(bits(values), bits(torch.from_numpy(units[f"{name}_dq_{kind}"])))
    assert torch.equal(packed, torch.from_numpy(units[f"{name}_{stored}_{kind}"]))
    assert torch.equal(scale, torch.from_numpy(units[f"{name}_scale_bytes_{kind}"]))
    assert torch.equal(bits(unpack(packed, scale, x.dtype)), bits(values))
    assert torch.equal(x, before), "the input was overwritten"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1.0, 1e4, 1e30])
def test_a_record_decodes_to_the_fake_quantised_value(name: str, scale: float) -> None:
    fake, pack, unpack, _ = FORMATS[name]
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(1)) * scale
    assert torch.equal(bits(unpack(*pack(x))), bits(fake(x)))
    assert torch.isfinite(fake(x)).all()


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_quantising_twice_changes_nothing(name: str) -> None:
    fake = FORMATS[name][0]
    once = fake(torch.randn(64, 128, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(bits(fake(once)), bits(once))


@pytest.mark.parametrize("name", FORMATS)
def test_a_view_of_a_wider_tensor_gives_the_same(name: str) -> None:
    fake = FORMATS[name][0]
    wide = torch.randn(7, 3, 160, generator=torch.Generator().manual_seed(3))
    assert torch.equal(fake(wide[:, :, 32:96]), fake(wide[:, :, 32:96].contiguous()))


def test_e2m1_ties_go_to_the_even_code() -> None:
    x = torch.zeros(32)
    x[:11] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0, 5.9])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -4.0, 6.0, 6.0])
    assert torch.equal(bits(q.fq4x(x)[:11]), bits(expected))  # amax 6: the scale is 1


def test_e2m1_saturates() -> None:
    x = torch.full((16,), 0.0)
    x[0], x[1] = 7.0, -7.0  # amax/6 rounds down to the scale 1.125, so 7 is 6.2 units
    assert q.fq4n(x)[:2].tolist() == [6.75, -6.75]


def test_nvfp4_of_the_published_ramp() -> None:
    x = 0.1 * (torch.arange(16) - 7.5)
    packed, scale = q.pack_nvfp4(x)
    assert scale.view(torch.float8_e4m3fn).item() == 0.125
    values = [-6, -6, -4, -4, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4, 4, 6, 6]
    assert (q.unpack_nvfp4(packed, scale) / 0.125).tolist() == values


@pytest.mark.parametrize(("amax", "byte"), [(448.0, 127), (448.001, 128), (447.9, 127), (224.0, 126), (896.0, 128)])
def test_e8m0_rounds_up_to_a_power_of_two(amax: float, byte: int) -> None:
    scale, code = q.e8m0_scale(torch.tensor([amax]), q.E4M3_MAX)
    assert code.item() == byte
    assert scale.item() == 2.0 ** (byte - 127)
    assert q.e8m0_decode(code).item() == scale.item()


def test_every_e2m1_pair_survives_packing() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    values = q.unpack_mxfp4(packed, scale)
    assert values[0, :6].tolist() == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0], "the even element is the low nibble"
    has_six = (values.abs() == 6).any(-1)
    assert torch.equal(q.pack_mxfp4(values)[0][has_six], packed[has_six])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32), (1, 64), (50, 70), (2100, 96)])
def test_fp8_tiles_round_trip_exactly(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, cols = shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, cols)
    codes, scale = q.quantize_fp8_tiles(weight)
    assert scale.shape == (-(-rows // 32), -(-cols // 32))
    values = q.dequantize_fp8_tiles(codes, scale, dtype)
    spread = q.e8m0_decode(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :cols]
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


@pytest.mark.parametrize("fake", [q.fq8, q.fq4x, q.fq4n])
def test_a_row_does_not_depend_on_its_neighbours(fake: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(6))
    assert torch.equal(torch.cat([fake(row[None]) for row in x]), fake(x))
