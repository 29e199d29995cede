# SPDX-License-Identifier: Apache-2.0
"""Dense linears whose weight is kept dequantised, which loses nothing: FP8 tiles and BF16 are exact in both compute dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.ops.norm import Norm, rms_norm
from cedar.ops.provider import FusedOp
from cedar.ops.quant import fq8


@FusedOp
def mxfp8_linear(x: Tensor, weight: Tensor, act_quant: bool = False, norm: Norm | None = None) -> Tensor:
    """y = x W^T, accumulated in float32, then RMSNorm over the outputs if one is given.

    x: [T, in]; weight: [out, in]; each float32 or bfloat16. act_quant: round x to MXFP8 first, as the FP8 kernels do. Returns
    [T, out], float32 if one of them is; the norm sees rounded outputs.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    y = torch.nn.functional.linear((fq8(x) if act_quant else x).to(dtype), weight.to(dtype))
    return y if norm is None else rms_norm(y, *norm)


@mxfp8_linear.native
def _(x: Tensor, weight: Tensor, act_quant: bool = False, norm: Norm | None = None) -> Tensor:
    if x.is_cuda and (act_quant or norm is not None):  # the GPU's body multiplies, no more
        y = mxfp8_linear(fq8(x) if act_quant else x, weight)
        return y if norm is None else rms_norm(y, *norm)
    y = (x if x.dtype is torch.float32 else weight).new_empty(x.shape[0], weight.shape[0])
    norm_weight, eps = norm or (None, 0.0)
    torch.ops.cedar.mxfp8_linear.default(x, weight, None, norm_weight, y, act_quant, eps)
    return y
