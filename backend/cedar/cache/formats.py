# SPDX-License-Identifier: Apache-2.0
"""The packed number formats of the release: UE8M0 scales, E4M3 and E2M1 codes, and three ways to store a vector with them.

======  =====  =========  ==========================================  =====
name    group  amax min   scale                                       value
======  =====  =========  ==========================================  =====
fp8     32     1e-4       UE8M0: amax/448 raised to a power of two    E4M3
mxfp4   32     6 2^-126   UE8M0: amax/6 raised to a power of two      E2M1
nvfp4   16     6 2^-9     E4M3: amax/6 to nearest even, at most 448   E2M1
======  =====  =========  ==========================================  =====

Groups are contiguous in the last dimension (released kernel semantics). Rounding is to nearest, ties to the even code. FP4
bytes hold the even element in the low nibble. Scaled by a UE8M0 scale no value exceeds the largest code by more than rounding,
so converting to E4M3 needs no clamp; an E4M3 scale may be too small. Decoded values are exact in bfloat16. A group that has a NaN
gets the scale NaN, and so all of it decodes to NaNs; the code of what is no number is 0. So does one that has an infinity, where
the scale is UE8M0; an E4M3 scale is 448 then, and the infinity decodes to 2688.
"""

from __future__ import annotations

import functools

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


@functools.cache
def e4m3_values(device: torch.device) -> Tensor:
    """float32 [256]: what each E4M3 code stands for. Decoding by table is several times faster than `Tensor.float` on a CPU."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


@functools.cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """int64 [256]: the two float32 values of a packed byte, the low nibble's first in memory. One element is one lookup."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([positive, -positive])
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1).view(torch.int64).flatten().to(device)


@functools.cache
def _e2m1_borders(device: torch.device) -> Tensor:
    """float32 [7]: a magnitude's code is the number of borders below it.

    A border is half-way between two magnitudes, or just below where the upper one is the even code, which gets the ties.
    """
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    halves[1::2] = halves[1::2].nextafter(torch.zeros(()))
    return halves.to(device)


def lookup(table: Tensor, codes: Tensor) -> Tensor:
    """table [256] and uint8 codes [...] -> the entries, in order, in one dimension."""
    return table.index_select(0, codes.int().flatten())


def e8m0_scale(amax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The smallest power of two not below amax/limit. amax: float32 > 0. Returns (float32 scale, uint8 exponent byte).

    The byte b means 2^(b - 127).
    """
    scale = _up_to_power_of_two(amax * (1.0 / limit))
    return scale, _e8m0_byte(scale)


def _up_to_power_of_two(x: Tensor) -> Tensor:
    """On the bits of a positive float32: one more in the exponent unless the mantissa is zero. NaN: infinity. Changes ``x``."""
    return x.view(torch.int32).clamp_max_(_EXPONENT).add_(_MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


def _e8m0_byte(scale: Tensor) -> Tensor:
    return scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def e8m0_decode(scale: Tensor) -> Tensor:
    """UE8M0 bytes (uint8) to float32 2^(b - 127), exact for b = 1..254; 0 decodes to 2^-127 and 255 to NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def groups_of(x: Tensor, size: int) -> Tensor:
    """[..., d] -> float32 [..., d/size, size]."""
    return x.float().view(*x.shape[:-1], x.shape[-1] // size, size)


def mx_scale(groups: Tensor, limit: float, amax_min: float) -> Tensor:
    """float32 powers of two [..., g, 1] of groups [..., g, n]."""
    return _up_to_power_of_two(groups.abs().amax(-1, keepdim=True).clamp_min_(amax_min).mul_(1.0 / limit))


def _scaled(groups: Tensor, scale: Tensor) -> Tensor:
    """What is encoded. That a value is no number is for the scale to say, not for a NaN's sign, on which devices differ."""
    return (groups / scale).nan_to_num_(0.0)


def _nvfp4_scale(groups: Tensor) -> Tensor:
    """float8_e4m3fn [..., g, 1] of groups [..., g, 16]."""
    amax = groups.abs().amax(-1, keepdim=True).clamp_(NVFP4_AMAX_MIN, E4M3_MAX * E2M1_MAX)
    return amax.mul_(1.0 / E2M1_MAX).to(torch.float8_e4m3fn)


def pack_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> (uint8 E4M3 codes [..., d], uint8 UE8M0 scales [..., d/32])."""
    groups = groups_of(x, MX_GROUP)
    scale = mx_scale(groups, E4M3_MAX, FP8_AMAX_MIN)
    codes = _scaled(groups, scale).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).view(x.shape), _e8m0_byte(scale).squeeze(-1)


def unpack_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_fp8`: the values that the codes stand for."""
    values = lookup(e4m3_values(codes.device), codes).view(*scale.shape, MX_GROUP).mul_(e8m0_decode(scale).unsqueeze(-1))
    return values.view(codes.shape).to(dtype)


def pack_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> (uint8 E2M1 pairs [..., d/2], uint8 UE8M0 scales [..., d/32])."""
    groups = groups_of(x, MX_GROUP)
    scale = mx_scale(groups, E2M1_MAX, MXFP4_AMAX_MIN)
    return _pack_e2m1(_scaled(groups, scale)), _e8m0_byte(scale).squeeze(-1)


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_mxfp4`."""
    factors = e8m0_decode(scale).unsqueeze(-1)
    return _unpack_e2m1(packed).view(*scale.shape, MX_GROUP).mul_(factors).flatten(-2).to(dtype)


def pack_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> (uint8 E2M1 pairs [..., d/2], uint8 E4M3 scales [..., d/16])."""
    groups = groups_of(x, NVFP4_GROUP)
    scale = _nvfp4_scale(groups)
    return _pack_e2m1(_scaled(groups, scale.float())), scale.view(torch.uint8).squeeze(-1)


def unpack_nvfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_nvfp4`."""
    factors = lookup(e4m3_values(scale.device), scale).view(*scale.shape, 1)
    return _unpack_e2m1(packed).view(*scale.shape, NVFP4_GROUP).mul_(factors).flatten(-2).to(dtype)


def _pack_e2m1(y: Tensor) -> Tensor:
    """float32 [..., g, n] -> uint8 [..., g*n/2]: nearest codes, ties to the even one, saturating. The sign of zero is kept."""
    codes = torch.bucketize(y.abs().contiguous(), _e2m1_borders(y.device), out_int32=True).add_(torch.signbit(y), alpha=8)
    pairs = codes.view(torch.int64)  # the even element in the low half
    return (pairs | pairs >> 28).to(torch.uint8).flatten(-2)


def _unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 pairs -> float32, in order, in one dimension."""
    return lookup(_e2m1_pairs(packed.device), packed).view(torch.float32)
