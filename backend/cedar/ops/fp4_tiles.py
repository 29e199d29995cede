# SPDX-License-Identifier: Apache-2.0
"""Routed experts' E2M1 weights in the order in which a GPU reads them: `backend/kernels/src/cuda/fp4.cuh` describes.

A tile is 16 rows of 128 inputs. Rows of a gated product (w1, w3) take turns of 8, so that a thread holds a gate and its up.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cedar.cache.formats import MX_GROUP, unpack_mxfp4
from cedar.errors import invalid

TILE_ROWS, TILE_DEPTH = 16, 128
_LIFT = 126
"""A scale byte of a tile is UE8M0 plus this: the exponent, in bfloat16, of the scale times 2^126."""
_TARGETS = (6, 7, 8, 15)
"""Where bfloat16 has the mantissa bit, the two exponent bits and the sign of a code; 16 higher for a pair's second code."""
_TURNS = ((0, 0, 0, 0), (6, 6, 6, 6), (10, 10, 10, 10), (12, 4, 4, 4))
"""By how much a word is turned left to bring the bits of each of its pairs to their targets."""


@functools.cache
def _places() -> tuple[tuple[int, ...], ...]:
    """For each of a word's 8 codes where its bits lie, lowest bit of the code first."""
    return tuple(
        tuple((target + high - turn) % 32 for target, turn in zip(_TARGETS, turns, strict=True))
        for turns in _TURNS
        for high in (0, 16)
    )


def pack_tiles(packed: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """MXFP4 rows to tiles. packed: uint8 [..., N, K/2], even input in the low nibble; scale: uint8 UE8M0 [..., N, K/32].

    gated: rows are w1, then w3. N: a multiple of 16; K: of 128. Returns tensors of the same shapes. Raises `CedarError` for
    other dimensions, and for a scale above 2, which no weight of a network has.
    """
    rows, depth = packed.shape[-2], packed.shape[-1] * 2
    if rows % TILE_ROWS or depth % TILE_DEPTH:
        raise invalid("experts", f"have {rows} rows of {depth} inputs", f"multiples of {TILE_ROWS} and {TILE_DEPTH}")
    if int(scale.max()) + _LIFT > 254:
        raise invalid("experts", "have a scale above 2", "scales up to 2")
    lead = packed.shape[:-2]
    codes = torch.stack([packed & 15, packed >> 4], -1).view(-1, rows, depth)
    codes, scales = _take_turns(codes, gated), _take_turns(scale.reshape(-1, rows, depth // MX_GROUP), gated)
    # [matrix, tile, half, group, block, word, quad, 8 codes] -> [matrix, tile, block, half, group, quad, word]
    codes = codes.view(-1, rows // 16, 2, 8, depth // 128, 4, 4, 8).permute(0, 1, 4, 2, 3, 6, 5, 7)
    word = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=packed.device)
    for number, places in enumerate(_places()):
        for bit, place in enumerate(places):
            word |= (codes[..., number].long() >> bit & 1) << place
    scales = scales.view(-1, rows // 16, 16, depth // 128, 4).transpose(2, 3) + _LIFT
    return word.to(torch.uint32).view(torch.uint8).reshape(*lead, rows, depth // 2), scales.reshape(
        *lead, rows, depth // MX_GROUP
    )


def unpack_tiles(tiles: Tensor, scale: Tensor, gated: bool, dtype: torch.dtype) -> Tensor:
    """Inverse of `pack_tiles`: the values, exact in bfloat16 and float32. [..., N, K/2] and [..., N, K/32] -> [..., N, K]."""
    rows, depth = tiles.shape[-2], tiles.shape[-1] * 2
    word = tiles.contiguous().view(torch.int32).long().view(-1, rows // 16, depth // 128, 2, 8, 4, 4)
    bits = torch.stack([word >> place & 1 for places in _places() for place in places], -1).view(*word.shape, 8, 4)
    codes = (bits * torch.tensor([1, 2, 4, 8], device=bits.device)).sum(-1)
    codes = codes.permute(0, 1, 3, 4, 2, 6, 5, 7).reshape(-1, rows, depth).to(torch.uint8)
    scales = scale.view(-1, rows // 16, depth // 128, 16, 4).transpose(2, 3).reshape(-1, rows, depth // MX_GROUP) - _LIFT
    codes, scales = _in_order(codes, gated), _in_order(scales, gated)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return unpack_mxfp4(packed, scales.contiguous(), dtype).view(*tiles.shape[:-2], rows, depth)


def _take_turns(rows: Tensor, gated: bool) -> Tensor:
    """[M, N, X]: 8 rows of the first half, 8 of the second, and so on."""
    if not gated:
        return rows.contiguous()
    return rows.view(len(rows), 2, -1, 8, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _in_order(rows: Tensor, gated: bool) -> Tensor:
    if not gated:
        return rows
    return rows.view(len(rows), -1, 2, 8, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
