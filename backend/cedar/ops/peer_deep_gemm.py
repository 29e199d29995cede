# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's Hopper kernels: FP8 products with a float32 scale per 128 inputs and per 128 x 128 weights, and bfloat16 products.

An FP8 weight is converted when it is first used, and what comes of it kept while the weight lives, which takes as much memory
again. The 16 tiles of 32 x 32 in a block of 128 x 128 get the largest of their scales, and codes are divided by as much as their
scale grew. That is exact for what stays above 2^-6 of the block's scale; below, where E4M3 is subnormal, it is rounded to a
multiple of 2^-9. Inputs of FP8 weights are rounded to FP8 even without ``act_quant``: the kernels take nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cedar.cache.formats import E4M3_MAX, FP8_AMAX_MIN, MX_GROUP, e8m0_decode, groups_of
from cedar.ops.attention import wo_a
from cedar.ops.linear import mxfp8_linear
from cedar.ops.norm import Norm, rms_norm
from cedar.ops.peer_packages import PeerUnsupported
from cedar.ops.quant import fq8

GROUP = 128
_TMA_ROWS = 4
"""Bulk copies start at multiples of 16 bytes."""


def kernels() -> Any:
    """The package."""
    return import_module("deep_gemm")


@mxfp8_linear.by("deep_gemm")
def _(
    x: Tensor,
    weight: Tensor,
    act_quant: bool = False,
    norm: Norm | None = None,
    scale: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    if wide:
        raise PeerUnsupported("the result is to be float32")
    check(x, weight, scale, *weight.shape)
    y = x.new_empty(x.shape[0], weight.shape[0])
    if scale is None:
        kernels().bf16_gemm_nt((fq8(x) if act_quant else x).contiguous(), weight, y)
    else:
        kernels().fp8_gemm_nt(quantised(x), aligned(weight, scale), y)
    return y if norm is None else rms_norm(y, *norm)


@wo_a.by("deep_gemm")
def _(out: Tensor, weight: Tensor, groups: int, scale: Tensor | None = None) -> Tensor:
    rank, inner = weight.shape[0] // groups, weight.shape[1]
    check(out, weight, scale, rank, inner)
    heads = out.reshape(out.shape[0], groups, inner)
    low_rank = out.new_empty(out.shape[0], groups, rank)
    if scale is None:
        kernels().einsum("bhr,hdr->bhd", heads, weight.view(groups, rank, inner), low_rank)
    else:
        codes, scales = aligned(weight, scale)
        matrices = codes.view(groups, rank, inner), scales.view(groups, rank // GROUP, inner // GROUP)
        kernels().fp8_einsum("bhr,hdr->bhd", quantised(heads), matrices, low_rank, recipe=(1, GROUP, GROUP))
    return low_rank.flatten(1)


def check(x: Tensor, weight: Tensor, scale: Tensor | None, outputs: int, inputs: int) -> None:
    """Raise `PeerUnsupported` for what the kernels cannot multiply. outputs, inputs: of one matrix."""
    takes = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    if x.dtype is not torch.bfloat16 or weight.dtype is not takes:
        raise PeerUnsupported(
            f"inputs are {x.dtype} and the weight is {weight.dtype}; it takes bfloat16, and E4M3 tiles or bfloat16"
        )
    if outputs % GROUP or inputs % GROUP:
        raise PeerUnsupported(f"a matrix is {outputs} x {inputs}; it takes multiples of {GROUP}")


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, ..., K] -> E4M3 [T, ..., K] and float32 scales [T, ..., K/128], whose rows are innermost, as bulk copies want."""
    groups = groups_of(x.contiguous(), GROUP)
    scale = groups.abs().amax(-1).clamp_min_(FP8_AMAX_MIN).mul_(1.0 / E4M3_MAX)
    codes = (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(x.shape)
    rows = x.shape[0]
    columns = scale.new_empty(*scale.shape[1:], -(-rows // _TMA_ROWS) * _TMA_ROWS)[..., :rows]
    return codes, columns.copy_(scale.movedim(0, -1)).movedim(-1, 0)


_converted: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()


def made_once(weight: Tensor, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What a weight was converted to when this was first asked; it is kept while the weight lives."""
    found = _converted.get(weight)
    if found is None:
        found = _converted[weight] = make()
    return found


def aligned(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A weight of `tile_values`, [N, K] in multiples of 128, as E4M3 [N, K] with float32 scales [N/128, K/128]. Made once."""
    return made_once(weight, lambda: _one_scale_per_block(weight, scale))


def _one_scale_per_block(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = scale.shape
    side = GROUP // MX_GROUP
    blocks = e8m0_decode(scale).view(rows // side, side, columns // side, side)
    largest = blocks.amax((1, 3))
    shift = blocks.div_(largest[:, None, :, None]).view(rows, 1, columns, 1)
    values = weight.view(rows, MX_GROUP, columns, MX_GROUP).float().mul_(shift)
    return values.to(torch.float8_e4m3fn).view(weight.shape), largest
