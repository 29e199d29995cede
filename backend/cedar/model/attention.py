# SPDX-License-Identifier: Apache-2.0
"""One layer's attention in its four modes: window only, Full, Reindex, Reuse."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.cache.records import RecordPool, RecordView
from cedar.cache.rows import TILE_ELEMENTS
from cedar.config.model import LayerSpec, ModelConfig
from cedar.model.compressor import Compressor
from cedar.model.indexer import Indexer
from cedar.model.linear import Linear, Reader
from cedar.model.norm import RMSNorm
from cedar.model.state import PassState, WindowKeys
from cedar.ops.attention import mega_attention, wo_a
from cedar.ops.compress import CompressorWeights, compress_store
from cedar.ops.window import window_store


class Attention(nn.Module):
    """Multi-query attention over the sliding window and, in layers with a ratio, the selected compressed entries.

    A key is its own value. `write` and `attend` are apart because the cut layer writes for every row and attends on kept rows.
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
        heads, dim, hidden, eps = config.num_attention_heads, config.head_dim, config.hidden_size, config.rms_norm_eps
        self.spec = spec
        self.eps = eps
        self.heads, self.dim, self.groups = heads, dim, config.o_groups
        self.scale = dim**-0.5
        self.wq_a = Linear(hidden, config.q_lora_rank, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.wq_b = Linear(config.q_lora_rank, heads * dim, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.wkv = Linear(hidden, dim, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.kv_norm = RMSNorm(dim, eps)
        self.attn_sink = nn.Parameter(torch.empty(heads), requires_grad=False)
        # the release keeps wo_a's input unquantised
        low_rank = config.o_groups * config.o_lora_rank
        self.wo_a = Linear(heads * dim // config.o_groups, low_rank, dtype, fp8=True, weight_dtype=weight_dtype)
        self.wo_b = Linear(low_rank, hidden, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.compressor = Compressor(config, spec.ratio, dtype, narrow=weight_dtype is not None) if spec.owns_kv else None
        self.indexer = None
        if spec.owns_index:
            self.indexer = Indexer(config, spec, dtype, act_quant=act_quant, fake_quant=fake_quant, weight_dtype=weight_dtype)

    def forward(self, x: Tensor, state: PassState) -> Tensor:
        """x [T, D], normalised -> [T, D]. Entries are written first: queries see groups that end in this step."""
        return self.attend(x, self.write(x, state), state)

    def write(self, x: Tensor, state: PassState) -> WindowKeys:
        """Store the window KV and, in a KV source layer, compressed KV and index keys. Returns what this step's queries read."""
        ring = state.cache.window(self.spec.index)
        rotation = state.rotations.rows(self.spec.ratio > 0)
        keys = WindowKeys(*window_store(self.wkv(x), *self.kv_norm.norm, *rotation, ring, state.plan.window))
        if self.compressor is not None:
            self._compress(x, self.compressor, state)
        return keys

    def _compress(self, x: Tensor, compressor: Compressor, state: PassState) -> None:
        source, ratio, cache = self.spec.index, self.spec.ratio, state.cache
        write = state.plan.entries[ratio].write
        assert write is not None
        assert self.indexer is not None
        compress_store(
            compressor(x),
            cache.open_rows(source) if ratio == 2 else None,
            write,
            CompressorWeights(compressor.norm.weight, self.indexer.wk.weight, self.indexer.k_norm.weight, self.eps),
            *state.rotations.groups(ratio, write.positions),
            cache.kv(source),
            cache.index_keys(source),
        )

    def attend(self, x: Tensor, window: WindowKeys, state: PassState) -> Tensor:
        """Queries of x's rows against window keys and selected entries; publishes the selection of an index source."""
        q_latent = self.wq_a(x, self.q_norm.norm)
        query = self.wq_b(q_latent).view(-1, self.heads, self.dim)
        if self.indexer is not None:
            state.selection = self.indexer(x, q_latent, state)
            if self.spec.candidate_source:
                state.candidates = state.selection.blocks
        selection = state.selection if self.spec.ratio else None
        rotation = state.rotations.rows(self.spec.ratio > 0)
        keys = [RecordView(RecordPool(state.cache.window(self.spec.index).record, window.table), state.view.index)]
        if selection is not None and self.spec.kv_source is not None:
            keys.append(RecordView(state.cache.kv(self.spec.kv_source), selection.slots))
        out = mega_attention(query, *rotation, self.attn_sink, keys, self.scale, TILE_ELEMENTS)
        hidden: Tensor = self.wo_b(wo_a(out, self.wo_a.weight, self.groups, self.wo_a.scale))
        return hidden

    def load(self, read: Reader, prefix: str) -> None:
        """Takes the ``<prefix>.*`` tensors of this layer's mode."""
        for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"):
            getattr(self, name).load(read, f"{prefix}.{name}")
        self.attn_sink.copy_(read(f"{prefix}.attn_sink"))
        if self.compressor is not None:
            self.compressor.load(read, f"{prefix}.compressor")
        if self.indexer is not None:
            self.indexer.load(read, f"{prefix}.indexer")
