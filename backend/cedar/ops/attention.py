# SPDX-License-Identifier: Apache-2.0
"""Core attention over the window and the selected compressed entries, and the grouped output projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cedar.cache.records import RecordView
from cedar.ops.native import record_code
from cedar.ops.provider import FusedOp
from cedar.ops.quant import tile_values
from cedar.ops.rope import rotate


@FusedOp
def mega_attention(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    sink: Tensor,
    keys: Sequence[RecordView],
    scale: float,
    max_elements: int,
) -> Tensor:
    """Multi-query attention with key = value and a sink, rotary embedding applied to the query and undone on the output.

    query: [T, H, d], not rotated, compute dtype. cos, sin: float32 [T, dr/2] of the rows' positions. sink: float32 [H], an
    unscaled logit that adds to the denominator only. keys: the window and, in layers with a ratio, the selected entries, N keys
    a row in all; an index of 0 masks a key. For row t and head h, with s_n = scale * q_h . key_n over the keys not masked:
    out = sum_n exp(s_n) key_n / (sum_n exp(s_n) + exp(sink_h)), all in float32, rounded once to the compute dtype; 0 of no key.
    Rows are tiled so that at most ``max_elements`` key elements exist at a time. Returns [T, H, d].
    """
    rows, _, dim = query.shape
    query = rotate(query, cos, sin)
    index = torch.cat([view.index for view in keys], dim=1)
    bias = torch.zeros(index.shape, device=index.device).masked_fill_(index == 0, -torch.inf)[:, None]
    tile = max(1, max_elements // (bias.shape[-1] * dim))
    parts = []
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        values = [view.values(start, stop) for view in keys]
        gathered = values[0] if len(values) == 1 else torch.cat(values, dim=1)
        parts.append(_attend(query[start:stop], gathered, sink, bias[start:stop], scale))
    return rotate(parts[0] if len(parts) == 1 else torch.cat(parts), cos, sin, inverse=True)


@mega_attention.native
def _(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    sink: Tensor,
    keys: Sequence[RecordView],
    scale: float,
    max_elements: int,
) -> Tensor:
    window, entries = keys[0], keys[1] if len(keys) > 1 else None
    out = torch.empty_like(query)
    entry_rows, entry_index, entry_record = (None, None, 0)
    if entries is not None:
        entry_rows, entry_index, entry_record = entries.pool.rows, entries.index, record_code(entries.pool.record)
    inputs = (query, cos, sin, sink, window.pool.rows, window.index, entry_rows, entry_index)
    torch.ops.cedar.mega_attention.default(*inputs, out, record_code(window.pool.record), entry_record, scale)
    return out


def _attend(query: Tensor, keys: Tensor, sink: Tensor, bias: Tensor, scale: float) -> Tensor:
    scores = torch.baddbmm(bias, query.float(), keys.transpose(1, 2), alpha=scale)
    with_sink = torch.cat([scores, sink[:, None].expand(scores.shape[0], -1, 1)], dim=-1)
    probabilities = torch.softmax(with_sink, dim=-1)[..., :-1]
    return torch.bmm(probabilities, keys).to(query.dtype)


@FusedOp
def wo_a(out: Tensor, weight: Tensor, groups: int, scale: Tensor | None = None) -> Tensor:
    """The first, block-diagonal half of the output projection: each group of heads has its own low-rank matrix.

    out: [T, H, d]. weight: [groups * rank, H / groups * d], bfloat16, compute dtype, or E4M3 with ``scale`` (`tile_values`).
    Returns [T, groups * rank], group after group.
    """
    heads = out.reshape(out.shape[0], groups, -1).transpose(0, 1)
    low_rank = torch.bmm(heads, tile_values(weight, scale, out.dtype).view(groups, -1, weight.shape[1]).transpose(1, 2))
    return low_rank.transpose(0, 1).flatten(1)


@wo_a.native
def _(out: Tensor, weight: Tensor, groups: int, scale: Tensor | None = None) -> Tensor:
    rank = weight.shape[0] // groups
    low_rank = out.new_empty(out.shape[0], weight.shape[0])
    torch.ops.cedar.wo_a.default(out, weight, scale, low_rank, groups, weight.shape[1], rank)
    return low_rank
