# SPDX-License-Identifier: Apache-2.0
"""The packed number formats, to the bit: the independent implementation's units, a search of all codes, the published ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from cedar.cache import formats as f

Float32 = npt.NDArray[np.float32]
FORMATS = {
    "fp8": (f.pack_fp8, f.unpack_fp8, "codes"),
    "nvfp4": (f.pack_nvfp4, f.unpack_nvfp4, "packed"),
    "mxfp4": (f.pack_mxfp4, f.unpack_mxfp4, "packed"),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.array([code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(127)], np.float32)
RULES = {"fp8": (32, 448.0, 1e-4, E4M3), "nvfp4": (16, 6.0, 6 * 2.0**-9, E2M1), "mxfp4": (32, 6.0, 6 * 2.0**-126, E2M1)}


def bits(x: Tensor) -> Tensor:
    """Compares signed zeros too."""
    return x.float().view(torch.int32)


def nearest(x: Float32, values: Float32) -> Float32:
    """The closest of ``values`` (by code), of two equally close ones the even code; the sign of x."""
    distance = np.abs(np.minimum(np.abs(x), values[-1]).astype(np.float64)[..., None] - values)
    ties = distance == distance.min(-1, keepdims=True)
    even = ties & (np.arange(len(values)) % 2 == 0)
    code = np.where(even.any(-1), even.argmax(-1), ties.argmax(-1))
    return np.copysign(values[code], x)


def searched(name: str, x: Float32) -> Float32:
    """What a vector [..., d] decodes to, by the rules alone."""
    size, largest, least, values = RULES[name]
    groups = x.reshape(*x.shape[:-1], -1, size)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(least))
    ratio = amax * np.float32(1 / largest)
    if name == "nvfp4":
        scale = nearest(ratio, E4M3)
    else:
        mantissa, exponent = np.frexp(ratio)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    return (nearest(groups / scale, values) * scale).reshape(x.shape)


def hard_inputs(seed: int, dim: int) -> Tensor:
    """Random vectors of all magnitudes, subnormal ones, both zeros, a lone large element, and values between two codes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, dim, generator=generator) * torch.logspace(-44, 37, 40)[:, None]
    ties = torch.randint(-28, 29, (8, dim), generator=generator) / 4 * 2.0 ** torch.arange(-8, 8, 2)[:, None]
    zeros = torch.zeros(3, dim)
    zeros[1] = -0.0
    zeros[2, 0] = 3.0
    alone = torch.full((4, dim), 1e-3)
    alone[:, -1] = torch.tensor([6.0, -448.0, 2688.0, 1e30])
    return torch.cat([x, ties, zeros, alone])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_scales_and_values_differ_from_the_golden_ones(golden: Path, name: str, kind: str) -> None:
    pack, unpack, stored = FORMATS[name]
    units: dict[str, npt.NDArray[Any]] = dict(np.load(golden / "units_quant.npz"))
    x = torch.from_numpy(units["x_f32"])
    if kind == "bf16":
        x = torch.from_numpy(units["x_bf16bits"].view(np.int16)).view(torch.bfloat16)
    before = x.clone()
    codes, scale = pack(x)
    assert torch.equal(codes, torch.from_numpy(units[f"{name}_{stored}_{kind}"]))
    assert torch.equal(scale, torch.from_numpy(units[f"{name}_scale_bytes_{kind}"]))
    assert torch.equal(bits(unpack(codes, scale, x.dtype)), bits(torch.from_numpy(units[f"{name}_dq_{kind}"])))
    assert torch.equal(x, before), "the input was overwritten"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 96, 128, 512])
@pytest.mark.parametrize("name", FORMATS)
def test_another_code_is_closer(name: str, dim: int, dtype: torch.dtype) -> None:
    pack, unpack, _ = FORMATS[name]
    x = hard_inputs(dim, dim).to(dtype)
    values = unpack(*pack(x))
    assert torch.equal(bits(values), bits(torch.from_numpy(searched(name, x.float().numpy()))))
    assert torch.equal(bits(values), bits(unpack(*pack(x), torch.bfloat16))), "not exact in bfloat16"


@pytest.mark.parametrize("name", FORMATS)
def test_the_layout_of_the_input_changes_its_codes(name: str) -> None:
    pack, unpack, _ = FORMATS[name]
    wide = torch.randn(7, 3, 160, generator=torch.Generator().manual_seed(3))
    for view in (wide[:, :, 32:96], wide[..., 64:96].transpose(0, 1), wide[:0, :, :64]):
        packed, contiguous = pack(view), pack(view.contiguous())
        assert all(torch.equal(*both) for both in zip(packed, contiguous, strict=True))
        assert unpack(*packed).shape == view.shape
    codes, scale = pack(wide)
    strided = torch.cat([codes, scale], -1)
    assert torch.equal(unpack(strided[..., : codes.shape[-1]], strided[..., codes.shape[-1] :]), unpack(codes, scale))


def test_nvfp4_of_the_published_ramp() -> None:
    x = 0.1 * (torch.arange(16) - 7.5)
    packed, scale = f.pack_nvfp4(x)
    assert scale.view(torch.float8_e4m3fn).item() == 0.125
    values = [-6, -6, -4, -4, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4, 4, 6, 6]
    assert (f.unpack_nvfp4(packed, scale) / 0.125).tolist() == values


@pytest.mark.parametrize(("amax", "byte"), [(448.0, 127), (448.001, 128), (447.9, 127), (224.0, 126), (896.0, 128)])
def test_e8m0_rounds_down_or_to_nearest(amax: float, byte: int) -> None:
    scale, code = f.e8m0_scale(torch.tensor([amax]), f.E4M3_MAX)
    assert code.item() == byte
    assert scale.item() == 2.0 ** (byte - 127)
    assert f.e8m0_decode(code).item() == scale.item()


def test_a_pair_of_e2m1_codes_changes_in_packing() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    values = f.unpack_mxfp4(packed, scale)
    assert values[0, :6].tolist() == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0], "the even element is the low nibble"
    has_six = (values.abs() == 6).any(-1)
    assert torch.equal(f.pack_mxfp4(values)[0][has_six], packed[has_six])


@pytest.mark.parametrize("pack", [f.pack_fp8, f.pack_nvfp4, f.pack_mxfp4])
def test_a_row_depends_on_its_neighbours(pack: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(6))
    for alone, together in zip(zip(*[pack(row) for row in x], strict=True), pack(x), strict=True):
        assert torch.equal(torch.stack(alone), together)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_packs_or_unpacks_other_bytes(name: str, dtype: torch.dtype) -> None:
    pack, unpack, _ = FORMATS[name]
    x = hard_inputs(1, 128).to(dtype)
    packed = pack(x)
    on_gpu = pack(x.cuda())
    assert all(torch.equal(theirs.cpu(), ours) for theirs, ours in zip(on_gpu, packed, strict=True))
    assert torch.equal(bits(unpack(*on_gpu, dtype).cpu()), bits(unpack(*packed, dtype)))
