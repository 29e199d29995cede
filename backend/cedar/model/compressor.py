# SPDX-License-Identifier: Apache-2.0
"""Compressor: one latent per group of ``ratio`` consecutive tokens (only in KV source layers)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.cache.rows import WritePlan
from cedar.config.model import ModelConfig
from cedar.model.linear import Reader, load_dense
from cedar.model.norm import RMSNorm
from cedar.ops.compress import pool_pairs


class Compressor(nn.Module):
    """Latents of the groups that end in a step: normalised, not rotated, not quantised.

    Ratio 1: RMSNorm(wkv x). Ratio 2: RMSNorm(sum_t kv_t softmax_t(gate_t)) over the group's two tokens, per channel, pooled in
    float32; ``wkv`` and ``wgate`` are one float32 matrix. The row of a token whose group is still open is kept in
    ``open_rows`` until the next step.
    """

    def __init__(self, config: ModelConfig, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ratio = ratio
        self.dtype = dtype
        self.dim = config.head_dim
        weight_dtype = dtype if ratio == 1 else torch.float32
        self.weight = nn.Parameter(
            torch.empty(ratio * config.head_dim, config.hidden_size, dtype=weight_dtype), requires_grad=False
        )
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, write: WritePlan, open_rows: Tensor | None) -> Tensor:
        """x [T, D], the attention input; open_rows float32 [slots, 2 * head_dim] (ratio 2) -> latents [g, head_dim]."""
        if open_rows is None:
            ending = x if write.rows is None else x.index_select(0, write.rows)
            return self.norm(nn.functional.linear(ending, self.weight))  # type: ignore[no-any-return]
        rows = nn.functional.linear(x.float(), self.weight)
        table = rows if write.open_from is None else torch.cat([open_rows.index_select(0, write.open_from), rows])
        if write.open_rows is not None and write.open_to is not None:
            open_rows.index_copy_(0, write.open_to, rows.index_select(0, write.open_rows))
        if write.first is None or write.rows is None or not len(write.rows):
            return x.new_empty(0, self.dim)
        pooled = pool_pairs(table.index_select(0, write.first), rows.index_select(0, write.rows))
        return self.norm(pooled.to(self.dtype))  # type: ignore[no-any-return]

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.wkv``, ``.wgate`` (ratio 2) and ``.norm``."""
        load_dense(read, f"{prefix}.wkv", self.weight[: self.dim], fp8=False)
        if self.ratio == 2:
            load_dense(read, f"{prefix}.wgate", self.weight[self.dim :], fp8=False)
        self.norm.load(read, f"{prefix}.norm")
