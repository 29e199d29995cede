# SPDX-License-Identifier: Apache-2.0
"""Compressor: one latent per group of ``ratio`` consecutive tokens (only in KV source layers)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.model.linear import Reader, load_dense, load_wide
from cedar.model.norm import RMSNorm
from cedar.ops.linear import mxfp8_linear


class Compressor(nn.Module):
    """The projection that latents are made of, and their norm; `cedar.ops.compress` pools, normalises and stores them.

    Ratio 1: RMSNorm(wkv x). Ratio 2: RMSNorm(sum_t kv_t softmax_t(gate_t)) over the group's two tokens, per channel, pooled in
    float32; ``wkv`` and ``wgate`` are one matrix, of float32 or narrow (`load_wide`), whose product is float32.
    """

    def __init__(self, config: ModelConfig, ratio: int, dtype: torch.dtype, *, narrow: bool = False) -> None:
        super().__init__()
        self.ratio = ratio
        self.dim = config.head_dim
        weight_dtype = dtype if ratio == 1 else torch.bfloat16 if narrow else torch.float32
        self.weight = nn.Parameter(
            torch.empty(ratio * config.head_dim, config.hidden_size, dtype=weight_dtype), requires_grad=False
        )
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D], the attention input -> [T, ratio * head_dim]: values, with ratio 2 float32 ``kv | gate``."""
        return mxfp8_linear(x, self.weight, wide=self.ratio == 2)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.wkv``, ``.wgate`` (ratio 2) and ``.norm``."""
        if self.ratio == 2:
            self.weight = load_wide(read, [f"{prefix}.wkv.weight", f"{prefix}.wgate.weight"], self.weight)
        else:
            load_dense(read, f"{prefix}.wkv", self.weight, fp8=False)
        self.norm.load(read, f"{prefix}.norm")
