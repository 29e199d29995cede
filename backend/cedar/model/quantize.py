# SPDX-License-Identifier: Apache-2.0
"""Quantisers of the model: two of activations and two of weights, in the number formats of `cedar.cache.formats`.

A fake quantiser (``fq*``) works on contiguous groups of the last dimension and returns what decoding the packed form gives, in
the input's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.formats import (
    E2M1_MAX,
    E4M3_MAX,
    FP8_AMAX_MIN,
    MX_GROUP,
    MXFP4_AMAX_MIN,
    e4m3_values,
    e8m0_decode,
    e8m0_scale,
    groups_of,
    lookup,
    mx_scale,
    pack_mxfp4,
    unpack_mxfp4,
)

_EXPONENT = 0x7F800000
_E2M1_ROUNDER = 1.5 * 2.0**23 * 0.5
"""Adding 1.5 * 2^23 * step to a float32 and subtracting it again rounds to a multiple of step, ties to even."""


def fq8(x: Tensor) -> Tensor:
    """FP8 with one UE8M0 scale per 32 elements: the inputs of FP8/FP4 linears. [..., d] -> [..., d]."""
    groups = groups_of(x, MX_GROUP)
    scale = mx_scale(groups, E4M3_MAX, FP8_AMAX_MIN)
    values = (groups / scale).to(torch.float8_e4m3fn).float()
    return values.mul_(scale).view(x.shape).to(x.dtype)


def fq4x(x: Tensor) -> Tensor:
    """MXFP4, one UE8M0 scale per 32 elements: index queries. [..., d] -> [..., d]."""
    groups = groups_of(x, MX_GROUP)
    scale = mx_scale(groups, E2M1_MAX, MXFP4_AMAX_MIN)
    return _round_e2m1(groups / scale).mul_(scale).view(x.shape).to(x.dtype)


def _round_e2m1(y: Tensor) -> Tensor:
    """float32 to the nearest E2M1 value, ties to the even code, saturating; overwrites ``y``. The sign of zero is kept.

    The spacing of E2M1 is half of the value's power of two, and 1/2 below 1. Arithmetic, because index queries are many.
    """
    y.clamp_(-E2M1_MAX, E2M1_MAX)
    rounder = y.abs().clamp_min_(1.0).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32).mul_(_E2M1_ROUNDER)
    return (y + rounder).sub_(rounder).copysign_(y)


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
        values = lookup(e4m3_values(codes.device), codes[part].view(torch.uint8)).view(-1, cols)
        out[part].copy_(values.mul_(spread.repeat_interleave(MX_GROUP, 1)[:, :cols]))
    return out


def quantize_mxfp4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> (uint8 [N, K/2], uint8 UE8M0 [N, K/32]): the routed experts' format, one scale per 32 inputs of a row."""
    return pack_mxfp4(weight)


def dequantize_mxfp4_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `quantize_mxfp4_rows`, exact in bfloat16 and float32."""
    return unpack_mxfp4(packed, scale, dtype)
