# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: sqrt-softplus gate, MXFP4 routed experts, one FP8 shared expert."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.model.linear import Linear, Reader, load_dense
from cedar.model.quantize import dequantize_mxfp4_rows, fq8


def swiglu(hidden: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit) in float32. hidden [..., 2 I] holds g, then u -> float32 [..., I]."""
    gate, up = hidden.float().chunk(2, dim=-1)
    return nn.functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


class Gate(nn.Module):
    """Chooses experts by biased score, weighs them by unbiased score. All float32."""

    def __init__(self, config: ModelConfig, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(experts), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.empty(experts), requires_grad=False)

    def forward(self, x: Tensor, image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, D] -> (expert ids int64 [T, k] by falling biased score, weights float32 [T, k]).

        Scores a = sqrt(softplus(x W^T)). Ties go to the lowest id. The weights sum to ``routed_scaling_factor``.
        image: bool [T], tokens inside an image span; they select with ``bias_vl``.
        """
        scores = nn.functional.softplus(nn.functional.linear(x.float(), self.weight)).sqrt_()
        bias = self.bias if image is None else torch.where(image[:, None], self.bias_vl, self.bias)
        ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = scores.gather(1, ids)
        return ids, weights.div_(weights.sum(-1, keepdim=True).add_(1e-20)).mul_(self.scaling)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.weight``, ``.bias`` and ``.bias_vl``."""
        for name in ("weight", "bias", "bias_vl"):
            getattr(self, name).copy_(read(f"{prefix}.{name}"))


class MoE(nn.Module):
    """One layer's feed-forward: routed experts plus the shared expert. [T, D] -> [T, D].

    w1 and w3 of an expert are kept as one matrix [2 I, D]; all experts of a layer are one parameter.
    experts, top_k: the drafter's stages have fewer than the text layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        act_quant: bool = False,
        experts: int | None = None,
        top_k: int | None = None,
    ) -> None:
        super().__init__()
        count = experts or config.n_routed_experts
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.act_quant = act_quant
        self.gate = Gate(config, count, top_k or config.num_experts_per_tok)
        self.w13 = nn.Parameter(torch.empty(count, 2 * inner, hidden, dtype=dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(count, hidden, inner, dtype=dtype), requires_grad=False)
        self.shared_w13 = Linear(hidden, 2 * inner, dtype, fp8=True, act_quant=act_quant)
        self.shared_w2 = Linear(inner, hidden, dtype, fp8=True, act_quant=act_quant)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        ids, weights = self.gate(x, image)
        return self.routed(x, ids, weights).add_(self.shared(x)).to(x.dtype)

    def shared(self, x: Tensor) -> Tensor:
        """The shared expert: no gate, no scale. [T, D] -> [T, D]."""
        hidden: Tensor = self.shared_w2(swiglu(self.shared_w13(x), self.limit).to(x.dtype))
        return hidden

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted experts' sum. ids, weights [T, k] -> float32 [T, D].

        Rows are grouped by expert, one matrix product each, without padding. The routing weight multiplies before w2, and
        a row's k outputs are summed in the order of ``ids``, so the sum does not depend on the rest of the batch.
        """
        tokens, top_k = ids.shape
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        experts = flat[order].tolist()
        groups = [(expert, len(list(run))) for expert, run in groupby(experts)]
        rows = (fq8(x) if self.act_quant else x)[order // top_k]
        inner = swiglu(_grouped(rows, self.w13, groups), self.limit).mul_(weights.flatten()[order, None]).to(x.dtype)
        outputs = _grouped(fq8(inner) if self.act_quant else inner, self.w2, groups)
        return torch.empty_like(outputs).index_copy_(0, order, outputs).view(tokens, top_k, -1).sum(1, dtype=torch.float32)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.gate``, ``.experts.E.w1/w2/w3`` and ``.shared_experts.w1/w2/w3``."""
        self.gate.load(read, f"{prefix}.gate")
        inner = self.w2.shape[-1]
        for expert in range(self.w2.shape[0]):
            name = f"{prefix}.experts.{expert}"
            targets = (self.w13[expert, :inner], self.w2[expert], self.w13[expert, inner:])
            for part, target in zip(("w1", "w2", "w3"), targets, strict=True):
                target.copy_(dequantize_mxfp4_rows(read(f"{name}.{part}.weight"), read(f"{name}.{part}.scale"), target.dtype))
        shared = self.shared_w13.weight
        load_dense(read, f"{prefix}.shared_experts.w1", shared[:inner], fp8=True)
        load_dense(read, f"{prefix}.shared_experts.w3", shared[inner:], fp8=True)
        self.shared_w2.load(read, f"{prefix}.shared_experts.w2")


def _grouped(rows: Tensor, weights: Tensor, groups: list[tuple[int, int]]) -> Tensor:
    """rows [R, in], in runs of (expert, length); weights [E, out, in] -> [R, out]."""
    outputs, start = [], 0
    for expert, length in groups:
        outputs.append(nn.functional.linear(rows[start : start + length], weights[expert]))
        start += length
    return torch.cat(outputs)
