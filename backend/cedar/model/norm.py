# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with a weight of the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.model.linear import Reader
from cedar.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """`rms_norm` with the checkpoint's weight, kept in float32. [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.weight``."""
        self.weight.copy_(read(f"{prefix}.weight"))
