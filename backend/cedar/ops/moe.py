# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the router, and routed experts beside the shared one."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.ops.fp4_tiles import unpack_tiles
from cedar.ops.provider import FusedOp
from cedar.ops.quant import fq8, tile_values


@FusedOp
def mega_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scaling: float,
    image_bias: Tensor | None = None,
    image: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by biased score, weigh them by unbiased score; all float32.

    x: [T, D]. weight: float32 or bfloat16 [E, D]. bias, image_bias: float32 [E]. image: bool [T], rows that select with
    ``image_bias``.
    Scores a = sqrt(softplus(x W^T)). Returns expert ids int64 [T, k] by falling biased score, ties to the lowest id, and weights
    float32 [T, k] that sum to ``scaling``.
    """
    return choose_experts(torch.nn.functional.linear(x.float(), weight.float()), bias, top_k, scaling, image_bias, image)


def choose_experts(
    logits: Tensor, bias: Tensor, top_k: int, scaling: float, image_bias: Tensor | None, image: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `mega_gate` does with logits x W^T, float32 [T, E]."""
    scores = torch.nn.functional.softplus(logits).sqrt_()
    if image is not None and image_bias is not None:
        bias = torch.where(image[:, None], image_bias, bias)
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, ids)
    return ids, weights.div_(weights.sum(-1, keepdim=True).add_(1e-20)).mul_(scaling)


@mega_gate.native
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scaling: float,
    image_bias: Tensor | None = None,
    image: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ids = torch.empty(x.shape[0], top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(x.shape[0], top_k, dtype=torch.float32, device=x.device)
    torch.ops.cedar.mega_gate.default(x, weight, bias, image_bias, image, ids, weights, scaling)
    return ids, weights


class Experts(NamedTuple):
    """Weights of a layer's experts, all bfloat16 or all of the compute dtype.

    w13 [E, 2 I, D] (w1, then w3), w2 [E, D, I]; shared_w13 [2 I, D], shared_w2 [D, I]. limit: of the swiglu.
    act_quant: round the input of every product to MXFP8.
    Or, with scales (uint8), as in the checkpoint: w13 and w2 E2M1 codes as `pack_tiles` orders them, uint8 [E, 2 I, D/2] and
    [E, D, I/2], scales [E, 2 I, D/32] and [E, D, I/32]; the shared ones E4M3 in tiles of 32 x 32.
    """

    w13: Tensor
    w2: Tensor
    shared_w13: Tensor
    shared_w2: Tensor
    limit: float
    act_quant: bool
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    shared_w13_scale: Tensor | None = None
    shared_w2_scale: Tensor | None = None


@FusedOp
def moe_fp4(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """The weighted experts' sum plus the shared expert. x: [T, D]; ids, weights: [T, k] of `mega_gate`. Returns [T, D].

    Rows are grouped by expert, one matrix product each, without padding. The routing weight multiplies before w2, and a row's k
    outputs are summed in the order of ``ids`` in float32, so the sum does not depend on the rest of the batch; then the shared
    expert, which has no gate and no scale, is added, and the sum rounded once.
    """
    source = fq8(x) if experts.act_quant else x
    hidden = torch.nn.functional.linear(source, tile_values(experts.shared_w13, experts.shared_w13_scale, x.dtype))
    shared = _product(swiglu(hidden, experts.limit).to(x.dtype), experts)
    return _routed(source, ids, weights, experts).add_(shared).to(x.dtype)


@moe_fp4.native
def _(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    out = torch.empty_like(x)
    w13, w2, shared_w13, shared_w2, limit, act_quant, w13_scale, w2_scale, shared_w13_scale, shared_w2_scale = experts
    routed = (w13, w13_scale, w2, w2_scale)
    shared = (shared_w13, shared_w13_scale, shared_w2, shared_w2_scale)
    torch.ops.cedar.moe_fp4.default(x, ids, weights, *routed, *shared, out, act_quant, limit)
    return out


def swiglu(hidden: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit) in float32. hidden [..., 2 I] holds g, then u -> float32 [..., I]."""
    gate, up = hidden.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def _product(inner: Tensor, experts: Experts) -> Tensor:
    weight = tile_values(experts.shared_w2, experts.shared_w2_scale, inner.dtype)
    return torch.nn.functional.linear(fq8(inner) if experts.act_quant else inner, weight)


def _routed(source: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """float32 [T, D]."""
    tokens, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    groups = [(expert, len(list(run))) for expert, run in groupby(flat[order].tolist())]
    hidden = _grouped(source[order // top_k], experts.w13, experts.w13_scale, True, groups)
    inner = swiglu(hidden, experts.limit).mul_(weights.flatten()[order, None]).to(source.dtype)
    outputs = _grouped(fq8(inner) if experts.act_quant else inner, experts.w2, experts.w2_scale, False, groups)
    return torch.empty_like(outputs).index_copy_(0, order, outputs).view(tokens, top_k, -1).sum(1, dtype=torch.float32)


def _grouped(rows: Tensor, weights: Tensor, scale: Tensor | None, gated: bool, groups: list[tuple[int, int]]) -> Tensor:
    """rows [R, in], in runs of (expert, length); weights [E, out, in] -> [R, out]. scale, gated: of tiles."""
    outputs, start = [], 0
    for expert, length in groups:
        one = weights[expert]
        weight = one.to(rows.dtype) if scale is None else unpack_tiles(one, scale[expert], gated, rows.dtype)
        outputs.append(torch.nn.functional.linear(rows[start : start + length], weight))
        start += length
    return torch.cat(outputs)
