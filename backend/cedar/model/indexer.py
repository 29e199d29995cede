# SPDX-License-Identifier: Apache-2.0
"""Indexer: which compressed entries each row attends to (index source layers only)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.model import LayerSpec, ModelConfig
from cedar.model.linear import Linear, Reader
from cedar.model.norm import RMSNorm
from cedar.model.state import PassState, Selection
from cedar.ops.index import IndexSearch, mqa_logits_topk


class Indexer(nn.Module):
    """Index queries and selection; in a KV source layer also the index keys' projection.

    A candidate source also publishes its best blocks of positions; later index sources search only inside them. No score is
    computed where a row sees at most top-k entries.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        *,
        act_quant: bool,
        fake_quant: bool,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.heads, self.dim = heads, dim
        self.spec = spec
        self.search = IndexSearch(
            top_k=config.index_topk,
            weight_scale=dim**-0.5 * heads**-0.5,
            quantise=fake_quant,
            block=config.candidate_block_size,
            publish=config.candidate_topk_blocks if spec.candidate_source else 0,
        )
        self.wq_b = Linear(config.q_lora_rank, heads * dim, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.weights_proj = Linear(config.hidden_size, heads, dtype, fp8=False)
        if spec.owns_kv:
            self.wk = Linear(config.head_dim, dim, dtype, fp8=False)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, q_latent: Tensor, state: PassState) -> Selection:
        """x [T, D], the attention input; q_latent [T, q_lora_rank], shared with the attention -> the rows' selection."""
        plan = state.plan.entries[self.spec.ratio]
        if plan.index is not None and plan.slots is not None:
            return Selection(plan.index, plan.slots)
        query, weight = self.wq_b(q_latent).view(-1, self.heads, self.dim), self.weights_proj(x)
        assert self.spec.kv_source is not None
        keys = state.cache.index_keys(self.spec.kv_source)
        candidates = state.candidates if self.spec.uses_candidates else None
        return Selection(*mqa_logits_topk(query, weight, *state.rotations.rows(True), keys, plan, self.search, candidates))

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.wq_b``, ``.weights_proj`` and, in a KV source layer, ``.wk`` and ``.k_norm``."""
        self.wq_b.load(read, f"{prefix}.wq_b")
        self.weights_proj.load(read, f"{prefix}.weights_proj")
        if self.spec.owns_kv:
            self.wk.load(read, f"{prefix}.wk")
            self.k_norm.load(read, f"{prefix}.k_norm")
