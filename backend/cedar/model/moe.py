# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: sqrt-softplus gate, MXFP4 routed experts, one FP8 shared expert."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from cedar.cache.formats import MX_GROUP
from cedar.config.model import ModelConfig
from cedar.model.linear import Linear, Reader, load_dense
from cedar.model.quantize import dequantize_mxfp4_rows
from cedar.ops.fp4_tiles import TILE_DEPTH, pack_tiles
from cedar.ops.moe import Experts, mega_gate, moe_fp4

Stored = tuple[Tensor, Tensor]
"""A matrix of a routed expert as the checkpoint has it: packed E2M1 codes and UE8M0 scales."""


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
    weight_dtype: as of `Linear`; float8_e4m3fn keeps the routed experts' codes too, in a GPU's order (`pack_tiles`), and I is
    padded with zeros to the next multiple of a tile's depth.
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
        packed = weight_dtype is torch.float8_e4m3fn
        self.inner = inner
        if packed:
            inner += -inner % TILE_DEPTH
        self.limit = config.swiglu_limit
        self.act_quant = act_quant
        gate_dtype = torch.bfloat16 if packed else weight_dtype or torch.float32
        self.gate = Gate(config, count, top_k or config.num_experts_per_tok, gate_dtype)
        kept, width = (torch.uint8, 2) if packed else (weight_dtype or dtype, 1)
        self.w13 = nn.Parameter(torch.empty(count, 2 * inner, hidden // width, dtype=kept), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(count, hidden, inner // width, dtype=kept), requires_grad=False)
        self.w13_scale: nn.Parameter | None = None
        self.w2_scale: nn.Parameter | None = None
        if packed:
            scales = [
                torch.empty(count, rows, depth // MX_GROUP, dtype=kept) for rows, depth in ((2 * inner, hidden), (hidden, inner))
            ]
            self.w13_scale, self.w2_scale = (nn.Parameter(scale, requires_grad=False) for scale in scales)
        self.shared_w13 = Linear(hidden, 2 * inner, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.shared_w2 = Linear(inner, hidden, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        ids, weights = self.gate(x, image)
        return moe_fp4(x, ids, weights, self.experts)

    @cached_property
    def experts(self) -> Experts:
        """For an operation."""
        one, two = self.shared_w13, self.shared_w2
        scales = self.w13_scale, self.w2_scale, one.scale, two.scale
        return Experts(self.w13, self.w2, one.weight, two.weight, self.limit, self.act_quant, *scales)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.gate``, ``.experts.E.w1/w2/w3`` and ``.shared_experts.w1/w2/w3``."""
        self.gate.load(read, f"{prefix}.gate")
        put = self._put_values if self.w13_scale is None else self._put_tiles
        for expert in range(self.w2.shape[0]):
            names = (f"{prefix}.experts.{expert}.{part}" for part in ("w1", "w2", "w3"))
            put(expert, *((read(f"{name}.weight"), read(f"{name}.scale")) for name in names))
        self._load_shared(read, f"{prefix}.shared_experts")

    def _put_values(self, expert: int, w1: Stored, w2: Stored, w3: Stored) -> None:
        targets = (self.w13[expert, : self.inner], w1), (self.w2[expert], w2), (self.w13[expert, self.inner :], w3)
        for target, (codes, scale) in targets:
            target.copy_(dequantize_mxfp4_rows(codes, scale, target.dtype))

    def _put_tiles(self, expert: int, w1: Stored, w2: Stored, w3: Stored) -> None:
        """Packed where the tiles will lie: on a CPU it would take hours."""
        assert self.w13_scale is not None
        assert self.w2_scale is not None
        lacking, device = self.w13.shape[1] // 2 - self.inner, self.w2.device
        gate, up = ([pad(tensor.to(device), (0, 0, 0, lacking)) for tensor in matrix] for matrix in (w1, w3))
        self.w13[expert], self.w13_scale[expert] = pack_tiles(
            torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]]), gated=True
        )
        codes, scale = (pad(tensor.to(device), (0, lacking // each)) for tensor, each in zip(w2, (2, MX_GROUP), strict=True))
        self.w2[expert], self.w2_scale[expert] = pack_tiles(codes, scale, gated=False)

    def _load_shared(self, read: Reader, prefix: str) -> None:
        first, second = self.shared_w13, self.shared_w2
        for tensor in (first.weight, second.weight, first.scale, second.scale):
            if tensor is not None:
                tensor.zero_()
        for part, start in (("w1", 0), ("w3", first.weight.shape[0] // 2)):
            tiles = None if first.scale is None else first.scale[start // MX_GROUP :][: self.inner // MX_GROUP]
            load_dense(read, f"{prefix}.{part}", first.weight[start : start + self.inner], fp8=True, scale=tiles)
        tiles = None if second.scale is None else second.scale[:, : self.inner // MX_GROUP]
        load_dense(read, f"{prefix}.w2", second.weight[:, : self.inner], fp8=True, scale=tiles)
