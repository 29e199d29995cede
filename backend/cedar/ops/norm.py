# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, the only normalisation of the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """What an RMSNorm needs: weight float32 [d]."""

    weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in float32, cast back. weight: float32 [d]."""
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
