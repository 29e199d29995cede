# SPDX-License-Identifier: Apache-2.0
"""Linears of the checkpoint's dense formats. No biases; weights are [out, in]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cedar.cache.formats import MX_GROUP
from cedar.model.quantize import dequantize_fp8_tiles
from cedar.ops.linear import mxfp8_linear
from cedar.ops.norm import Norm

Reader = Callable[[str], Tensor]
"""A checkpoint's tensor by its released name: E4M3 as float8_e4m3fn, UE8M0 and packed FP4 as uint8, others as they are.

The tensor may be a view of a memory-mapped file: copy it, or keep it and never write to it.
"""


class Linear(nn.Module):
    """y = x W^T, with the weight kept dequantised in the compute dtype ``dtype``, an FP8 one in ``weight_dtype`` if given.

    fp8: the checkpoint holds E4M3 with a UE8M0 scale per 32x32 tile, exact in bfloat16 and float32; otherwise BF16 or F32.
    A ``weight_dtype`` of float8_e4m3fn keeps the checkpoint's codes, and ``scale`` (uint8) beside them.
    act_quant: round the input to MXFP8 first, as the FP8 kernels do (fp8 linears only; `cedar.ops.quant.fq8`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        *,
        fp8: bool,
        act_quant: bool = False,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fp8 = fp8
        self.act_quant = act_quant and fp8
        kept = (weight_dtype or dtype) if fp8 else dtype
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=kept), requires_grad=False)
        self.scale: nn.Parameter | None = None
        if kept is torch.float8_e4m3fn:
            tiles = [-(-size // MX_GROUP) for size in self.weight.shape]
            self.scale = nn.Parameter(torch.empty(tiles, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x [T, in], compute dtype -> [T, out], then RMSNorm over the outputs if one is given."""
        return mxfp8_linear(x, self.weight, self.act_quant, norm, self.scale)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.weight`` and, for fp8, ``<prefix>.scale``."""
        load_dense(read, prefix, self.weight, fp8=self.fp8, scale=self.scale)


def load_wide(read: Reader, names: Sequence[str], like: nn.Parameter) -> nn.Parameter:
    """A weight of a float32 product, the rows of ``names`` one after another, for the place of ``like``.

    A bfloat16 ``like`` stays so unless the checkpoint has float32.
    """
    parts = [read(name) for name in names]
    dtype = torch.float32 if any(part.dtype is torch.float32 for part in parts) else like.dtype
    return nn.Parameter(torch.cat([part.to(like.device, dtype) for part in parts]), requires_grad=False)


def load_dense(read: Reader, prefix: str, out: Tensor, *, fp8: bool, scale: Tensor | None = None) -> None:
    """Fill ``out`` [out, in], and ``scale`` of an FP8 one that stays so, with a dense weight of the checkpoint.

    No other buffer of that size is made.
    """
    weight = read(f"{prefix}.weight")
    if scale is not None:
        out.copy_(weight)
        scale.copy_(read(f"{prefix}.scale"))
    elif fp8:
        dequantize_fp8_tiles(weight, read(f"{prefix}.scale"), out.dtype, out=out)
    else:
        out.copy_(weight)
