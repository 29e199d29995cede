# SPDX-License-Identifier: Apache-2.0
"""Fake quantisers of activations, and the values of FP8 weights, in the number formats of `cedar.cache.formats`.

The quantisers work on contiguous groups of the last dimension and return what decoding the packed form gives, in the input's
dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.formats import E2M1_MAX, E4M3_MAX, FP8_AMAX_MIN, MX_GROUP, MXFP4_AMAX_MIN, e8m0_decode, groups_of, mx_scale

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


def tile_values(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A weight [N, K] as an operation gets it, in ``dtype``; with scale (uint8 UE8M0 [ceil(N/32), ceil(K/32)]) E4M3 codes."""
    if scale is None:
        return weight.to(dtype)
    spread = e8m0_decode(scale).repeat_interleave(MX_GROUP, 0)[: weight.shape[0]]
    return weight.float().mul_(spread.repeat_interleave(MX_GROUP, 1)[:, : weight.shape[1]]).to(dtype)


def _round_e2m1(y: Tensor) -> Tensor:
    """float32 to the nearest E2M1 value, ties to the even code, saturating; overwrites ``y``. The sign of zero is kept.

    The spacing of E2M1 is half of the value's power of two, and 1/2 below 1. Arithmetic, because index queries are many.
    """
    y.clamp_(-E2M1_MAX, E2M1_MAX)
    rounder = y.abs().clamp_min_(1.0).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32).mul_(_E2M1_ROUNDER)
    return (y + rounder).sub_(rounder).copysign_(y)
