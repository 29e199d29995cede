# SPDX-License-Identifier: Apache-2.0
"""The rotation of rotary position embedding: interleaved pairs of the last dimensions."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of the last dr dimensions of x [T, ..., d] by the angles of its row.

    cos, sin: float32 [T, dr/2]. Computed in float32, returned in x's dtype; the other dimensions pass through.
    """
    pairs = cos.shape[-1]
    turn = torch.complex(cos, -sin if inverse else sin).view(-1, *[1] * (x.dim() - 2), pairs)
    out = x.clone(memory_format=torch.contiguous_format)
    tail = out[..., -2 * pairs :]
    rotated = tail.float().view(*x.shape[:-1], pairs, 2)  # of float32, a view: the product lands in ``out``
    torch.view_as_complex(rotated).mul_(turn)
    if x.dtype != torch.float32:
        tail.copy_(rotated.flatten(-2))
    return out
