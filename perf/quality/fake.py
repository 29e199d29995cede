# SPDX-License-Identifier: Apache-2.0
"""Quantise and dequantise at once, with a straight-through gradient: what caches, index queries and stored weights do to values.

The values are those of packing and unpacking with `cedar.cache.formats`, bit for bit (``tests/perf/test_quality_forward.py``);
here in a form that a GPU computes without tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF


def _power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two not below a positive float32."""
    return ((x.contiguous().view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)


def _e2m1(x: Tensor) -> Tensor:
    """float32 to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code."""
    x = x.clamp(-6, 6)
    step = (x.abs().clamp(min=1.0).contiguous().view(torch.int32) & _EXPONENT).view(torch.float32) * 0.5
    return torch.round(x / step) * step


def fp8_groups(x: Tensor) -> Tensor:
    """E4M3 with a UE8M0 scale per 32 values of the last dimension: window KV, Engram rows."""
    groups = x.float().reshape(*x.shape[:-1], -1, 32)
    scale = _power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448.0))
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def fp8_tiles(x: Tensor) -> Tensor:
    """E4M3 with a UE8M0 scale per tile of 32 x 32: dense weights [..., 32 n, 32 k]."""
    *lead, rows, cols = x.shape
    tiles = x.float().reshape(*lead, rows // 32, 32, cols // 32, 32)
    scale = _power_of_two(tiles.abs().amax((-3, -1), keepdim=True).clamp(min=1e-4) * (1 / 448.0))
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape).to(x.dtype)


def mxfp4(x: Tensor) -> Tensor:
    """E2M1 with a UE8M0 scale per 32 values: index keys and queries, routed experts."""
    groups = x.float().reshape(*x.shape[:-1], -1, 32)
    scale = _power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=6.0 * 2.0**-126) * (1 / 6.0))
    return (_e2m1(groups / scale) * scale).flatten(-2).to(x.dtype)


def nvfp4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale per 16 values: compressed KV."""
    groups = x.float().reshape(*x.shape[:-1], -1, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=6.0 * 2.0**-9) * (1 / 6.0)
    scale = amax.clamp(max=448.0).to(torch.float8_e4m3fn).float()
    return (_e2m1(groups / scale) * scale).flatten(-2).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """``value``, a quantised form of x, whose gradient goes to x unchanged."""
    out: Tensor = _StraightThrough.apply(x, value)  # type: ignore[no-untyped-call]
    return out
