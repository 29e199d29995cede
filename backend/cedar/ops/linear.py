# SPDX-License-Identifier: Apache-2.0
"""Dense linears. FP8 tiles and BF16 are exact in both compute dtypes, so a weight kept dequantised loses nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.ops.norm import Norm, rms_norm
from cedar.ops.provider import FusedOp
from cedar.ops.quant import fq8, tile_values


@FusedOp
def mxfp8_linear(
    x: Tensor,
    weight: Tensor,
    act_quant: bool = False,
    norm: Norm | None = None,
    scale: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """y = x W^T, accumulated in float32, then RMSNorm over the outputs if one is given.

    x: [T, in]; weight: [out, in]; each float32 or bfloat16, or the weight E4M3 with ``scale``, see `tile_values`. act_quant:
    round x to MXFP8 first, as the FP8 kernels do. Returns [T, out], float32 if one of them is or ``wide`` asks for it; the norm
    sees rounded outputs.
    """
    dtype = torch.float32 if wide else x.dtype if scale is not None else torch.promote_types(x.dtype, weight.dtype)
    y = torch.nn.functional.linear((fq8(x) if act_quant else x).to(dtype), tile_values(weight, scale, dtype))
    return y if norm is None else rms_norm(y, *norm)


@mxfp8_linear.native
def _(
    x: Tensor,
    weight: Tensor,
    act_quant: bool = False,
    norm: Norm | None = None,
    scale: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    dtype = torch.float32 if wide or weight.dtype is torch.float32 else x.dtype
    y = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    norm_weight, eps = norm or (None, 0.0)
    torch.ops.cedar.mxfp8_linear.default(x, weight, scale, norm_weight, y, act_quant, eps)
    return y
