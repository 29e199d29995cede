# SPDX-License-Identifier: Apache-2.0
"""Pure functions of the training forward. `compile_parts` fuses them on a GPU; their meaning does not change.

R is batch * length rows, hc streams of width D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, cast back."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, factor: float = 1.0) -> Tensor:
    """Rotary embedding of the last dims of factor * x [B, T, h, d]; cos, sin float32 [B, T, dr/2]; interleaved pairs."""
    pairs = cos.shape[-1]
    wide = x.float() * factor
    head, tail = wide[..., : x.shape[-1] - 2 * pairs], wide[..., x.shape[-1] - 2 * pairs :].reshape(*x.shape[:-1], pairs, 2)
    c, s = cos[:, :, None], -sin[:, :, None] if inverse else sin[:, :, None]
    even, odd = tail[..., 0], tail[..., 1]
    turned = torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2)
    return torch.cat([head, turned], dim=-1).to(x.dtype)


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """As `cedar.ops.compress.pool_pairs`: per channel, two tokens weighted by the softmax of their gates."""
    kv_first, gate_first = first.chunk(2, dim=-1)
    kv_second, gate_second = second.chunk(2, dim=-1)
    return torch.lerp(kv_first, kv_second, torch.sigmoid(gate_second - gate_first))


def mix_raw(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `cedar.model.mhc.mix` before the Sinkhorn iterations: pre, post [R, hc], logits of comb [R, hc, hc]."""
    hc = streams.shape[1]
    flat = streams.flatten(1)
    statistic = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + norm_eps)
    raw = nn.functional.linear(flat, fn.to(flat.dtype)).float() * statistic * scale + base
    gates = torch.sigmoid(raw[:, : 2 * hc])
    return gates[:, :hc] + eps, gates[:, hc:] * 2, raw[:, 2 * hc :].reshape(-1, hc, hc)


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the streams' weighted sum: [R, hc, D], float32 [R, hc] -> [R, D]."""
    joined = (streams.float() * pre[:, :, None]).sum(1).to(streams.dtype)
    return rms(joined, weight, eps)


def expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As `cedar.model.mhc.expand`. output [R, D] -> streams [R, hc, D]."""
    new = post[:, :, None] * output[:, None].float()
    for source in range(streams.shape[1]):
        new = new + comb[:, source, :, None] * streams[:, source, None].float()
    return new.to(streams.dtype)


def read(
    streams: Tensor, pre: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A sub-layer's input and its coefficients: x [R, D] by the last sub-layer's ``pre``; then see `mix_raw`."""
    return collapse_norm(streams, pre, weight, norm_eps), *mix_raw(streams, fn, scale, base, eps, norm_eps)


def boundary(
    output: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one sub-layer to the next, `expand` and `read`: new streams, x, pre, post, logits of comb."""
    new = expand(output, streams, post, comb)
    return new, *read(new, pre, fn, scale, base, weight, eps, norm_eps)  # fmt: skip


def expert_activation(hidden: Tensor, factor: Tensor, limit: float) -> Tensor:
    """SwiGLU of every expert times the row's weight for it. hidden [R, E * 2 I], factor float32 [R, E] -> [R, E * I]."""
    both = hidden.float().view(hidden.shape[0], factor.shape[1], 2, -1)
    inner = nn.functional.silu(both[:, :, 0].clamp(max=limit)) * both[:, :, 1].clamp(-limit, limit)
    return (inner * factor[:, :, None]).to(hidden.dtype).flatten(1)


def engram_inject(streams: Tensor, product: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `cedar.model.engram.Engram.forward` after the projection. product [R, (hc + 1) D], weight [hc, D]."""
    hc, hidden = streams.shape[1:]
    both = product.float().view(-1, hc + 1, hidden)
    keys, value, query = both[:, :hc], both[:, hc:], streams.float()
    statistic = torch.rsqrt((query.square().mean(-1) + eps) * (keys.square().mean(-1) + eps))
    dot = (query * weight * keys).sum(-1) * statistic * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    return (query + gate[..., None] * value).to(streams.dtype)


def index_scores(raw: Tensor, weight: Tensor) -> Tensor:
    """sum_h weight_h relu(raw_h): [B, t, h, n], float32 [B, t, h] -> float32 [B, t, n]."""
    return (raw.float().relu() * weight[..., None]).sum(2)


def index_loss(scores: Tensor, mass: Tensor) -> Tensor:
    """Mean cross-entropy between softmax(scores) and the attention mass, over rows that have a choice.

    scores float32 [B, t, n], -inf where the row may not look; mass float32 [B, t, n] >= 0, without gradient. A row counts as
    much as it attends to entries at all: most rows look at little but their window, and what they prefer is noise.
    """
    inside = scores > -torch.inf
    counted = (inside.sum(-1) > 1).float()
    peak = scores.detach().amax(-1, keepdim=True).clamp(min=-1e30)
    norm = torch.where(inside, torch.exp(scores - peak), 0.0).sum(-1).clamp(min=1e-30).log()
    share = torch.where(inside, mass, 0.0)
    total = share.sum(-1)
    picked = torch.where(inside, (scores - peak) * share, 0.0).sum(-1) / (total + 1e-9)
    weight = counted * total
    return ((norm - picked) * weight).sum() / weight.sum().clamp(min=1e-6)


def best(scores: Tensor, seen: Tensor, top: int) -> Tensor:
    """Columns of the ``top`` best scores among those seen. Of scores that are exactly 0 (no head of the indexer is positive,
    which is common) the lowest columns come first, as in the engine; other equal scores are rare and in any order."""
    columns = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    distinct = torch.where(scores == 0, columns * -1e-30, scores)
    return distinct.masked_fill(~seen, -torch.inf).topk(top, dim=-1, sorted=False).indices


def select(scores: Tensor, seen: Tensor, top: int) -> Tensor:
    """bool [B, t, n]: the ``top`` best scores among those seen, all of them where they are no more."""
    if scores.shape[-1] <= top:
        return seen
    return torch.zeros_like(seen).scatter_(-1, best(scores, seen, top), True) & seen


def candidates(scores: Tensor, seen: Tensor, block: int, top: int) -> Tensor | None:
    """bool [B, t, n]: entries of the ``top`` blocks with the best maximum and of the newest block; None: every block."""
    *rows, count = scores.shape
    if count <= block * top:
        return None
    blocks = -(-count // block)
    hidden = nn.functional.pad(scores.masked_fill(~seen, -torch.inf), (0, blocks * block - count), value=-torch.inf)
    newest = torch.arange(count, device=seen.device).mul(seen).amax(-1, keepdim=True) // block
    peaks = hidden.view(*rows, blocks, block).amax(-1).scatter(-1, newest, torch.inf)
    kept = torch.zeros(*rows, blocks, dtype=torch.bool, device=seen.device)
    kept.scatter_(-1, best(peaks, torch.ones_like(kept), top), True)
    return kept.repeat_interleave(block, dim=-1)[..., :count]


def weighted_loss(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy, and the plain mean over tokens of full weight. logits [n, V], target int64 [n], weight [n]."""
    wide = logits.float()
    loss = wide.logsumexp(-1) - wide.gather(1, target[:, None])[:, 0]
    full = (weight >= 0.99).float()
    return (loss * weight).sum() / weight.sum(), (loss * full).sum().detach() / full.sum().clamp(min=1.0)
