# SPDX-License-Identifier: Apache-2.0
"""Compressed KV and index keys: pooling of a group's tokens, and the two entries that are stored per group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cedar.cache.records import RecordPool
from cedar.cache.rows import WritePlan
from cedar.ops.native import record_code
from cedar.ops.norm import rms_norm
from cedar.ops.provider import FusedOp
from cedar.ops.rope import rotate


class CompressorWeights(NamedTuple):
    """norm float32 [head_dim]; wk [index_head_dim, head_dim], compute dtype; key_norm float32 [index_head_dim]; eps of both."""

    norm: Tensor
    wk: Tensor
    key_norm: Tensor
    eps: float


@FusedOp
def compress_store(
    projected: Tensor,
    open_rows: Tensor | None,
    write: WritePlan,
    weights: CompressorWeights,
    cos: Tensor,
    sin: Tensor,
    kv_pool: RecordPool,
    index_pool: RecordPool,
) -> None:
    """Store the compressed KV entry rope(latent) and the index key rope(RMSNorm(wk latent)) of each group that ends in a step.

    projected: ratio 1, the rows' values [T, head_dim], compute dtype; ratio 2, ``kv | gate`` float32 [T, 2 head_dim]. open_rows:
    float32 [slots, 2 head_dim] (ratio 2), where the row of a token whose group stays open is kept. cos, sin: float32 [g, dr/2] at
    the position of each group's FIRST token. Both entries are encoded whole, after the rotation is rounded to the compute dtype.
    Where the plan is masked, nothing is stored for negative slots and rows.
    """
    latent = latents(projected, open_rows, write, weights)
    slots = write.slots
    if write.masked:
        stored = slots >= 0
        latent, cos, sin, slots = latent[stored], cos[stored], sin[stored], slots[stored]
    if not latent.shape[0]:
        return
    kv_pool.store(kv_pool.record.encode(rotate(latent, cos, sin)), slots)
    key = rms_norm(torch.nn.functional.linear(latent, weights.wk), weights.key_norm, weights.eps)
    index_pool.store(index_pool.record.encode(rotate(key, cos, sin)), slots)


@compress_store.native
def _(
    projected: Tensor,
    open_rows: Tensor | None,
    write: WritePlan,
    weights: CompressorWeights,
    cos: Tensor,
    sin: Tensor,
    kv_pool: RecordPool,
    index_pool: RecordPool,
) -> None:
    torch.ops.cedar.compress_store.default(
        projected,
        *(write.rows, write.first, write.open_from, write.open_rows, write.open_to),
        open_rows,
        *weights[:3],
        *(cos, sin, write.slots, kv_pool.rows, index_pool.rows),
        *(record_code(kv_pool.record), record_code(index_pool.record), 1 if open_rows is None else 2),
        weights.eps,
    )


def latents(projected: Tensor, open_rows: Tensor | None, write: WritePlan, weights: CompressorWeights) -> Tensor:
    """Of the groups that end in a step, normalised, not rotated, not quantised: [g, head_dim], compute dtype.

    Ratio 2 is pooled in float32 and rounded before the norm. Rows that leave their group open replace what ``open_rows`` held.
    """
    if open_rows is None:
        return rms_norm(projected if write.rows is None else projected.index_select(0, write.rows), weights.norm, weights.eps)
    table = projected if write.open_from is None else torch.cat([open_rows.index_select(0, write.open_from), projected])
    if write.open_rows is not None and write.open_to is not None:
        kept = write.open_to >= 0 if write.masked else slice(None)
        open_rows.index_copy_(0, write.open_to[kept], projected.index_select(0, write.open_rows[kept]))
    if write.first is None or write.rows is None or not len(write.rows):
        return weights.wk.new_empty(0, weights.wk.shape[1])
    pooled = pool_pairs(table.index_select(0, write.first), projected.index_select(0, write.rows))
    return rms_norm(pooled.to(weights.wk.dtype), weights.norm, weights.eps)


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Per channel, the softmax-weighted sum of two tokens: sum_t kv_t * softmax_t(gate_t).

    first, second: float32 [g, 2 * head_dim], ``kv | gate`` of a group's two tokens. Returns float32 [g, head_dim].
    A softmax over two is a sigmoid of their difference, so the sum is a linear interpolation.
    """
    kv_first, gate_first = first.chunk(2, dim=-1)
    kv_second, gate_second = second.chunk(2, dim=-1)
    return torch.lerp(kv_first, kv_second, torch.sigmoid(gate_second - gate_first))
