# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's two weight formats, in the number formats of `cedar.cache.formats`."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.formats import (
    E4M3_MAX,
    FP8_AMAX_MIN,
    MX_GROUP,
    e4m3_values,
    e8m0_decode,
    e8m0_scale,
    lookup,
    pack_mxfp4,
    unpack_mxfp4,
)


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
