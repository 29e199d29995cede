# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: sqrt-softplus gate, MXFP4 routed experts, one FP8 shared expert."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.model.linear import Linear, Reader, load_dense
from cedar.model.quantize import dequantize_mxfp4_rows
from cedar.ops.moe import Experts, mega_gate, moe_fp4


class Gate(nn.Module):
    """Chooses experts by biased score, weighs them by unbiased score. All float32; the weight, stored as BF16, may be kept so."""

    def __init__(self, config: ModelConfig, experts: int, top_k: int, weight_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.top_k = top_k
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=weight_dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(experts), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.empty(experts), requires_grad=False)

    def forward(self, x: Tensor, image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, D] -> (expert ids int64 [T, k], weights float32 [T, k]), see `mega_gate`.

        image: bool [T], tokens inside an image span; they select with ``bias_vl``.
        """
        return mega_gate(x, self.weight, self.bias, self.top_k, self.scaling, self.bias_vl, image)

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
        weight_dtype: torch.dtype | None = None,
        experts: int | None = None,
        top_k: int | None = None,
    ) -> None:
        super().__init__()
        count = experts or config.n_routed_experts
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.act_quant = act_quant
        self.gate = Gate(config, count, top_k or config.num_experts_per_tok, weight_dtype or torch.float32)
        kept = weight_dtype or dtype
        self.w13 = nn.Parameter(torch.empty(count, 2 * inner, hidden, dtype=kept), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(count, hidden, inner, dtype=kept), requires_grad=False)
        self.shared_w13 = Linear(hidden, 2 * inner, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.shared_w2 = Linear(inner, hidden, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        ids, weights = self.gate(x, image)
        return moe_fp4(x, ids, weights, self.experts)

    @cached_property
    def experts(self) -> Experts:
        """For an operation."""
        return Experts(self.w13, self.w2, self.shared_w13.weight, self.shared_w2.weight, self.limit, self.act_quant)

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
