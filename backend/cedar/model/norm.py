# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, the only normalisation of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.model.linear import Reader


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in float32, cast back. weight: float32 [d]."""
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


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
