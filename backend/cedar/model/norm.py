# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with a weight of the checkpoint. It has no forward: every norm of the model is part of a fused operation."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from cedar.model.linear import Reader
from cedar.ops.norm import Norm


class RMSNorm(nn.Module):
    """The weight, kept in float32, and the eps of a norm."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)

    @cached_property
    def norm(self) -> Norm:
        """For an operation."""
        return Norm(self.weight, self.eps)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.weight``."""
        self.weight.copy_(read(f"{prefix}.weight"))
