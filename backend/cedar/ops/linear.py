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

    x: [T, in]. weight: [out, in], float32 or bfloat16. act_quant: round x to MXFP8 first, as the FP8 kernels do. Returns
    [T, out] in the weight's dtype; the norm sees rounded outputs.
    """
    y = torch.nn.functional.linear((fq8(x) if act_quant else x).to(weight.dtype), weight)
    return y if norm is None else rms_norm(y, *norm)


@mxfp8_linear.native
def _(x: Tensor, weight: Tensor, act_quant: bool = False, norm: Norm | None = None) -> Tensor:
    y = weight.new_empty(x.shape[0], weight.shape[0])
    norm_weight, eps = norm or (None, 0.0)
    torch.ops.cedar.mxfp8_linear.default(x, weight, None, norm_weight, y, act_quant, eps)
    return y
