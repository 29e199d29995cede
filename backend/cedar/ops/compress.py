# SPDX-License-Identifier: Apache-2.0
"""Compressed KV and index keys: pooling of a group's tokens, and the two entries that are stored per group."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.records import RecordPool
from cedar.ops.norm import rms_norm
from cedar.ops.rope import rotate


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Per channel, the softmax-weighted sum of two tokens: sum_t kv_t * softmax_t(gate_t).

    first, second: float32 [g, 2 * head_dim], ``kv | gate`` of a group's two tokens. Returns float32 [g, head_dim].
    A softmax over two is a sigmoid of their difference, so the sum is a linear interpolation.
    """
    kv_first, gate_first = first.chunk(2, dim=-1)
    kv_second, gate_second = second.chunk(2, dim=-1)
    return torch.lerp(kv_first, kv_second, torch.sigmoid(gate_second - gate_first))


def compress_store(
    latent: Tensor,
    index_key: Tensor,
    index_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv_pool: RecordPool,
    index_pool: RecordPool,
) -> None:
    """Store the compressed KV entry rope(latent) and the index key rope(RMSNorm(index_key)) of each group.

    latent: [g, head_dim], normalised, not rotated. index_key: [g, index_head_dim] = wk(latent). index_weight: float32
    [index_head_dim]. cos, sin: float32 [g, dr/2] at the position of each group's FIRST token. slots: int64 [g] pool rows.
    Both are encoded whole, after the rotation is rounded to the compute dtype.
    """
    kv_pool.store(kv_pool.record.encode(rotate(latent, cos, sin)), slots)
    key = rotate(rms_norm(index_key, index_weight, eps), cos, sin)
    index_pool.store(index_pool.record.encode(key), slots)
