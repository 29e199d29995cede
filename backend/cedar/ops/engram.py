# SPDX-License-Identifier: Apache-2.0
"""Engram: table rows, and the gated injection of what they say into the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.formats import unpack_fp8
from cedar.ops.native import NativeUnsupported
from cedar.ops.provider import FusedOp


@FusedOp
def engram_gather(rows: Tensor, table: Tensor, table_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantised table rows, concatenated per token (exact): [T, columns * d] in ``dtype``.

    rows: int64 [T, columns]; below 0: a row of zeros. table: uint8 [R, d], E4M3 codes; table_scale: uint8 [R, d/32], UE8M0.
    All on one device; or rows on a GPU and the table in pinned host memory, from which its body reads.
    """
    flat = rows.flatten().to(table.device)
    safe = flat.clamp_min(0)
    values = unpack_fp8(table[safe], table_scale[safe], dtype).masked_fill_(flat[:, None] < 0, 0)
    return values.view(rows.shape[0], -1).to(rows.device)


@engram_gather.native
def _(rows: Tensor, table: Tensor, table_scale: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.device != table.device and not (rows.is_cuda and table.is_pinned() and table_scale.is_pinned()):
        raise NativeUnsupported(f"engram_gather: rows on {rows.device}, a table on {table.device} that is not pinned")
    out = torch.empty(*rows.shape, table.shape[1], dtype=dtype, device=rows.device)
    torch.ops.cedar.engram_gather.default(rows, table, table_scale, out)
    return out.flatten(1)


@FusedOp
def engram_gate(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    """S_i + gate_i v for every stream i, gate_i = sigmoid(signed sqrt of the normalised dot product of S_i and key i).

    streams: [T, hc, D]. keys_value: [T, (hc + 1) D], hc keys, then the value. qk_weight: float32 [hc, D]. float32
    inside. Returns new streams.
    """
    hc, hidden = streams.shape[1:]
    parts = keys_value.float().view(-1, hc + 1, hidden)
    keys, value = parts[:, :hc], parts[:, hc:]
    query = streams.float()
    statistics = query.square().mean(-1).add_(eps).mul_(keys.square().mean(-1).add_(eps)).rsqrt_()
    dot = (query * qk_weight).mul_(keys).sum(-1).mul_(statistics).mul_(hidden**-0.5)
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min_(1e-6).sqrt_(), dot))
    return torch.addcmul(query, gate[..., None], value).to(streams.dtype)


@engram_gate.native
def _(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(streams)
    torch.ops.cedar.engram_gate.default(streams, keys_value, qk_weight, out, eps)
    return out
