# SPDX-License-Identifier: Apache-2.0
"""The formats of the release: UE8M0 scales, E4M3 and E2M1 values, three activation quantisers, two weight formats.

All quantisers work on contiguous groups of the last dimension. A fake quantiser (``fq*``) returns what decoding the packed
form gives, in the input's dtype; ``pack_*``/``unpack_*`` are that packed form (released kernel semantics).

=======  =====  =========  ==========================================  ==========
name     group  amax min   scale                                       value
=======  =====  =========  ==========================================  ==========
``fq8``  32     1e-4       UE8M0: amax/448 raised to a power of two    E4M3
``fq4x`` 32     6 2^-126   UE8M0: amax/6 raised to a power of two      E2M1
``fq4n`` 16     6 2^-9     E4M3: amax/6 to nearest even, at most 448   E2M1
=======  =====  =========  ==========================================  ==========

Rounding is to nearest, ties to the even code. FP4 bytes hold the even element in the low nibble. Scaled by a UE8M0 scale no
value exceeds the largest code by more than rounding, so converting to E4M3 needs no clamp; an E4M3 scale may be too small.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_AMAX_MIN = 1e-4
MXFP4_AMAX_MIN = 6.0 * 2.0**-126
NVFP4_AMAX_MIN = 6.0 * 2.0**-9
"""2^-9 is E4M3's smallest subnormal, so an NVFP4 scale is never 0."""

MX_GROUP = 32
NVFP4_GROUP = 16

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_E2M1_ROUNDER = 1.5 * 2.0**23 * 0.5
"""Adding 1.5 * 2^23 * step to a float32 and subtracting it again rounds to a multiple of step, ties to even."""

# Decoding by table: several times faster on a CPU than converting codes one by one.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_E2M1_PAIRS = torch.stack([_E2M1_VALUES.repeat(16), _E2M1_VALUES.repeat_interleave(16)], dim=-1)
"""float32 [256, 2]: the two values of a packed byte, the low nibble's first."""


def e8m0_scale(amax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The smallest power of two not below amax/limit. amax: float32 > 0. Returns (float32 scale, uint8 exponent byte).

    The byte b means 2^(b - 127).
    """
    scale = _up_to_power_of_two(amax * (1.0 / limit))
    return scale, _e8m0_byte(scale)


def _up_to_power_of_two(x: Tensor) -> Tensor:
    """On the bits of a positive float32: one more in the exponent unless the mantissa is zero. Overwrites ``x``."""
    return x.view(torch.int32).add_(_MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


def _e8m0_byte(scale: Tensor) -> Tensor:
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def e8m0_decode(scale: Tensor) -> Tensor:
    """UE8M0 bytes (uint8) to float32 2^(b - 127), exact for b = 1..254; 0 decodes to 2^-127 and 255 to NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def _mx_scale(groups: Tensor, limit: float, amax_min: float) -> Tensor:
    return _up_to_power_of_two(groups.abs().amax(-1, keepdim=True).clamp_min_(amax_min).mul_(1.0 / limit))


def _nvfp4_scale(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(NVFP4_AMAX_MIN).mul_(1.0 / E2M1_MAX)
    return amax.clamp_max_(E4M3_MAX).to(torch.float8_e4m3fn)


def _round_e2m1(y: Tensor) -> Tensor:
    """float32 to the nearest E2M1 value, saturating; overwrites ``y``. The sign of zero is kept.

    The spacing of E2M1 is half of the value's power of two, and 1/2 below 1.
    """
    y.clamp_(-E2M1_MAX, E2M1_MAX)
    rounder = y.abs().clamp_min_(1.0).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32).mul_(_E2M1_ROUNDER)
    return (y + rounder).sub_(rounder).copysign_(y)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().view(*x.shape[:-1], -1, size)


def fq8(x: Tensor) -> Tensor:
    """FP8 with one UE8M0 scale per 32 elements: window KV, and the inputs of FP8/FP4 linears. [..., d] -> [..., d]."""
    groups = _groups(x, MX_GROUP)
    scale = _mx_scale(groups, E4M3_MAX, FP8_AMAX_MIN)
    values = (groups / scale).to(torch.float8_e4m3fn).float()
    return values.mul_(scale).view(x.shape).to(x.dtype)


def fq4x(x: Tensor) -> Tensor:
    """MXFP4, one UE8M0 scale per 32 elements: index keys and index queries. [..., d] -> [..., d]."""
    groups = _groups(x, MX_GROUP)
    scale = _mx_scale(groups, E2M1_MAX, MXFP4_AMAX_MIN)
    return _round_e2m1(groups / scale).mul_(scale).view(x.shape).to(x.dtype)


def fq4n(x: Tensor) -> Tensor:
    """NVFP4 without a tensor-wide scale, one E4M3 scale per 16 elements: compressed KV. [..., d] -> [..., d]."""
    groups = _groups(x, NVFP4_GROUP)
    scale = _nvfp4_scale(groups).float()
    return _round_e2m1(groups / scale).mul_(scale).view(x.shape).to(x.dtype)


def pack_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> (uint8 E4M3 codes [..., d], uint8 UE8M0 scales [..., d/32])."""
    groups = _groups(x, MX_GROUP)
    scale = _mx_scale(groups, E4M3_MAX, FP8_AMAX_MIN)
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).view(x.shape), _e8m0_byte(scale).squeeze(-1)


def unpack_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_fp8`; equals ``fq8`` of the packed values."""
    values = _groups(_decode(_E4M3_VALUES, codes), MX_GROUP).mul_(e8m0_decode(scale)[..., None])
    return values.view(codes.shape).to(dtype)


def pack_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> (uint8 E2M1 pairs [..., d/2], uint8 UE8M0 scales [..., d/32])."""
    groups = _groups(x, MX_GROUP)
    scale = _mx_scale(groups, E2M1_MAX, MXFP4_AMAX_MIN)
    return _pack_e2m1(_round_e2m1(groups / scale)), _e8m0_byte(scale).squeeze(-1)


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_mxfp4`."""
    values = _groups(_unpack_e2m1(packed), MX_GROUP).mul_(e8m0_decode(scale)[..., None])
    return values.flatten(-2).to(dtype)


def pack_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> (uint8 E2M1 pairs [..., d/2], uint8 E4M3 scales [..., d/16])."""
    groups = _groups(x, NVFP4_GROUP)
    scale = _nvfp4_scale(groups)
    return _pack_e2m1(_round_e2m1(groups / scale.float())), scale.view(torch.uint8).squeeze(-1)


def unpack_nvfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_nvfp4`."""
    values = _groups(_unpack_e2m1(packed), NVFP4_GROUP).mul_(scale.view(torch.float8_e4m3fn).float()[..., None])
    return values.flatten(-2).to(dtype)


def _pack_e2m1(values: Tensor) -> Tensor:
    """E2M1 values [..., g, n] -> uint8 [..., g*n/2].

    A magnitude's code is its exponent and one mantissa bit, read off the float32 bits once the values below 1 (which E2M1
    spaces evenly) are moved to where they lie in order: 0 .5 1 1.5 2 3 … becomes 1 1.5 2 3 4 6 …
    """
    magnitude = values.abs()
    codes = ((magnitude + magnitude.clamp(min=1.0)).view(torch.int32) >> 22) - 254
    codes = codes.add_(torch.signbit(values), alpha=8).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> float32 [..., 2n]."""
    return _decode(_E2M1_PAIRS, packed).flatten(-2)


def _decode(table: Tensor, codes: Tensor) -> Tensor:
    """table [256, …], uint8 codes [...] -> [..., …]."""
    return table.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape + table.shape[1:])


def quantize_fp8_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> (float8_e4m3fn [N, K], uint8 UE8M0 [ceil(N/32), ceil(K/32)]): one scale per 32x32 tile."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % MX_GROUP, 0, -rows % MX_GROUP))
    tiles = padded.view(padded.shape[0] // MX_GROUP, MX_GROUP, padded.shape[1] // MX_GROUP, MX_GROUP)
    scale, byte = e8m0_scale(tiles.abs().amax((1, 3)).clamp_min_(FP8_AMAX_MIN), E4M3_MAX)
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :cols].contiguous(), byte


def dequantize_fp8_tiles(codes: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Inverse of `quantize_fp8_tiles`, exact in bfloat16 and float32. Works in row blocks: ``out`` is the only big buffer."""
    rows, cols = codes.shape
    out = torch.empty(rows, cols, dtype=dtype, device=codes.device) if out is None else out
    factors = e8m0_decode(scale)
    tiles = max(1, (1 << 20) // (cols * MX_GROUP))
    for tile in range(0, scale.shape[0], tiles):
        part = slice(tile * MX_GROUP, min((tile + tiles) * MX_GROUP, rows))
        spread = factors[tile : tile + tiles].repeat_interleave(MX_GROUP, 0)[: part.stop - part.start]
        values = _decode(_E4M3_VALUES, codes[part].view(torch.uint8))
        out[part].copy_(values.mul_(spread.repeat_interleave(MX_GROUP, 1)[:, :cols]))
    return out


def quantize_mxfp4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> (uint8 [N, K/2], uint8 UE8M0 [N, K/32]): the routed experts' format, one scale per 32 inputs of a row."""
    return pack_mxfp4(weight)


def dequantize_mxfp4_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `quantize_mxfp4_rows`, exact in bfloat16 and float32."""
    return unpack_mxfp4(packed, scale, dtype)
