# SPDX-License-Identifier: Apache-2.0
"""Indexer: which compressed entries each row attends to (index source layers only)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cedar.cache.records import RecordPool
from cedar.cache.rows import TILE_ELEMENTS, EntryPlan, ScoreTile
from cedar.config.model import LayerSpec, ModelConfig
from cedar.model.linear import Linear, Reader
from cedar.model.norm import RMSNorm
from cedar.model.state import PassState, Selection
from cedar.ops.index import mqa_logits_topk, sparse_logits_topk
from cedar.ops.rope import rotate


class Indexer(nn.Module):
    """Index queries and selection; in a KV source layer also the index keys' projection.

    score[t, j] = sum_h w[t, h] relu(q[t, h] . k[j]) over the entries j < n(t). A candidate source also publishes its best
    blocks of positions; later index sources search only inside them. No score is computed where a row sees at most top-k entries.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        *,
        act_quant: bool,
        quantise: Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.heads, self.dim = heads, dim
        self.topk = config.index_topk
        self.block = config.candidate_block_size
        self.spec = spec
        self.publish = (config.candidate_block_size, config.candidate_topk_blocks) if spec.candidate_source else None
        self.quantise = quantise
        self.weight_scale = dim**-0.5 * heads**-0.5
        self.wq_b = Linear(config.q_lora_rank, heads * dim, dtype, fp8=True, act_quant=act_quant)
        self.weights_proj = Linear(config.hidden_size, heads, dtype, fp8=False)
        if spec.owns_kv:
            self.wk = Linear(config.head_dim, dim, dtype, fp8=False)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, q_latent: Tensor, state: PassState) -> Selection:
        """x [T, D], the attention input; q_latent [T, q_lora_rank], shared with the attention -> the rows' selection."""
        plan = state.plan.entries[self.spec.ratio]
        if plan.index is not None and plan.slots is not None:
            return Selection(plan.index, plan.slots)
        query, weight = self.queries(x, q_latent, state)
        assert self.spec.kv_source is not None
        pool = state.cache.index_keys(self.spec.kv_source)
        parts: list[Tensor] = []
        published: list[Tensor | None] = []
        candidates = state.candidates if self.spec.uses_candidates else (None,) * len(plan.tiles)
        for tile, allowed in zip(plan.tiles, candidates, strict=True):
            rows = slice(tile.start, tile.stop)
            if allowed is None:
                index, blocks = mqa_logits_topk(
                    query[rows], weight[rows], pool, plan.table, tile, min(self.topk, tile.num_keys), self.publish
                )
                published.append(blocks)
            else:
                index = self._search(query[rows], weight[rows], pool, plan, tile, allowed)
            if index.shape[1] < plan.width:
                index = nn.functional.pad(index, (0, plan.width - index.shape[1]), value=-1)
            parts.append(index)
        index = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Selection(index, plan.pool_rows(index), tuple(published) if self.publish else ())

    def queries(self, x: Tensor, q_latent: Tensor, state: PassState) -> tuple[Tensor, Tensor]:
        """Index queries [T, heads, dim], rotated and quantised, and head weights float32 [T, heads]."""
        query = rotate(self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim)), *state.rotations.rows(True))
        query = query if self.quantise is None else self.quantise(query)
        return query, self.weights_proj(x).float() * self.weight_scale

    def _search(
        self, query: Tensor, weight: Tensor, pool: RecordPool, plan: EntryPlan, tile: ScoreTile, blocks: Tensor
    ) -> Tensor:
        """Selection inside candidate blocks, in runs of rows whose gathered keys fit the element budget."""
        visible, base = plan.visible[tile.start : tile.stop], plan.base[tile.start : tile.stop]
        step = max(1, TILE_ELEMENTS // (blocks.shape[1] * self.block * (self.dim + self.heads)))
        parts = []
        for start in range(0, query.shape[0], step):
            run = slice(start, start + step)
            arguments = (query[run], weight[run], pool, blocks[run], self.block, visible[run], plan.table, base[run], self.topk)
            parts.append(sparse_logits_topk(*arguments))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.wq_b``, ``.weights_proj`` and, in a KV source layer, ``.wk`` and ``.k_norm``."""
        self.wq_b.load(read, f"{prefix}.wq_b")
        self.weights_proj.load(read, f"{prefix}.weights_proj")
        if self.spec.owns_kv:
            self.wk.load(read, f"{prefix}.wk")
            self.k_norm.load(read, f"{prefix}.k_norm")
