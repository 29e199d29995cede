# SPDX-License-Identifier: Apache-2.0
"""The network as training needs it: whole sequences at once, dense masks, gradients.

The same formulas as `cedar.model`, on weights of the same names, without pools, plans and chunks;
``tests/perf/test_quality_forward.py`` holds its logits against the engine's. Several documents share a row of a batch. A row of
the batch behaves as if each document were served alone: positions count from the document's start, and nothing is seen across it.

Quantisers of caches and of index queries are applied with a straight-through gradient; those of the weights when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from perf.quality import fake, parts
from perf.quality.kernels import entries_visible, gather_rows, joint_softmax, sinkhorn
from perf.quality.weights import Lookup, Weights
from torch import Tensor, nn

from cedar.config.model import LayerSpec, ModelConfig
from cedar.model.rope import rope_frequencies

linear = nn.functional.linear


@dataclass
class Pass:
    """What the layers of one forward share. rows = batch * length; a chunk is a range of positions of every sequence.

    cos_sin: by "has a ratio", of the rows' positions, float32 [B, T, dr/2]. entries, index_keys: of the current KV source,
    [B, N, d]. selected: per chunk, bool [B, t, N'] or None (all visible). allowed: per chunk, the candidate mask. mass: per
    chunk, attention per entry summed over the heads of the layers that share the selection, with the scores it is to teach.
    """

    doc_start: Tensor
    cos_sin: dict[bool, tuple[Tensor, Tensor]]
    chunks: list[tuple[int, int]]
    sparse: bool
    entries: Tensor | None = None
    index_keys: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)
    selected: list[Tensor | None] = field(default_factory=list)
    allowed: list[Tensor | None] = field(default_factory=list)
    mass: dict[int, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    load: list[Tensor] = field(default_factory=list)


class Streams:
    """The residual streams, and the last sub-layer's output until it is known what reads it: writing and reading are one pass."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.pre = torch.zeros(values.shape[:2], device=values.device)
        self.pre[:, 0] = 1.0
        self._coefficients: tuple[Tensor, Tensor] | None = None
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None

    def read(self, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, eps: float, norm_eps: float) -> Tensor:
        """The next sub-layer's input [R, D]."""
        if self._pending is None:
            x, self.pre, post, comb = parts.read(self.values, self.pre, fn, scale, base, norm, eps, norm_eps)
        else:
            output, post, comb = self._pending
            self.values, x, self.pre, post, comb = parts.boundary(
                output, self.values, post, comb, self.pre, fn, scale, base, norm, eps, norm_eps
            )
            self._pending = None
        self._coefficients = post, comb
        return x

    def write(self, output: Tensor, config: ModelConfig) -> None:
        """The sub-layer that read last gives its output [R, D]."""
        assert self._coefficients is not None
        post, logits = self._coefficients
        self._pending = output, post, sinkhorn(logits, config.hc_eps, config.hc_sinkhorn_iters)

    def flush(self) -> Tensor:
        """The streams with everything written."""
        if self._pending is not None:
            output, post, comb = self._pending
            self.values = parts.expand(output, self.values, post, comb)
            self._pending = None
        return self.values


class TrainModel(nn.Module):
    """`forward` gives hidden states after the final norm; `logits` the float logits of some of them.

    dtype: of the residual streams and of every matrix product; parameters are float32. fake_quant: caches and index queries
    go through the release's quantisers.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, *, fake_quant: bool = True, chunks: int = 4
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.chunks = chunks
        self.fake_quant = fake_quant
        self.weights = Weights(config)
        for compressed in (False, True):
            self.register_buffer(f"rope_{int(compressed)}", rope_frequencies(config, compressed), persistent=False)
        counts = torch.tensor([config.hc_mult, config.hc_mult, config.hc_mult**2])
        self.register_buffer("spread", torch.eye(3).repeat_interleave(counts, dim=0), persistent=False)

    def forward(
        self, tokens: Tensor, doc_start: Tensor, engram_rows: dict[int, Tensor], *, sparse: bool, weight_quant: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """tokens, doc_start: int64 [B, T] (first row of each row's document); engram_rows: int64 [B * T, columns] a layer.

        sparse: attend only to what the indexer selects, as the engine does; otherwise to every visible entry.
        weight_quant: weights go through their storage formats. Returns hidden [B * T, D], the mean index loss, and each
        layer's share of routed tokens per expert.
        """
        config, (batch, length) = self.config, tokens.shape
        w = self.weights.view(self.dtype, quantised=weight_quant)
        state = self._state(doc_start, length, sparse)
        embedded = gather_rows(w("embed.weight"), tokens.flatten()).to(self.dtype)
        streams = Streams(embedded[:, None].repeat(1, config.hc_mult, 1))
        for spec in config.layers:
            name = f"layers.{spec.index}"
            if spec.engram:
                streams.values = self._engram(w, name, streams.flush(), engram_rows[spec.index])
            x = streams.read(*self._site(w, f"{name}.hc_attn", f"{name}.attn_norm.weight"))
            streams.write(self._attention(w, spec, x.view(batch, length, -1), state), config)
            x = streams.read(*self._site(w, f"{name}.hc_ffn", f"{name}.ffn_norm.weight"))
            streams.write(self._moe(w, name, x, state), config)
        self._close_group(state)
        hidden = parts.collapse_norm(streams.flush(), streams.pre, w("norm.weight"), config.rms_norm_eps)
        return hidden, torch.stack(state.losses).mean(), state.load

    def logits(self, hidden: Tensor, *, weight_quant: bool = False) -> Tensor:
        """[n, D] -> [n, vocab] in the compute dtype."""
        return linear(hidden, self.weights.view(self.dtype, quantised=weight_quant)("head.weight"))

    def _state(self, doc_start: Tensor, length: int, sparse: bool) -> Pass:
        window = self.config.sliding_window
        if length % (window * self.chunks) and length % window:
            raise ValueError(f"the sequence length {length} must be a multiple of the window {window}")
        step = length // self.chunks if length % (window * self.chunks) == 0 else length
        positions = torch.arange(length, device=doc_start.device) - doc_start
        angles = {bool(c): positions[..., None].float() * self.get_buffer(f"rope_{c}") for c in (0, 1)}
        cos_sin = {c: (a.cos(), a.sin()) for c, a in angles.items()}
        return Pass(doc_start, cos_sin, [(at, at + step) for at in range(0, length, step)], sparse)

    def _site(self, w: Lookup, name: str, norm: str) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
        """What `Streams.read` needs to know of a sub-layer."""
        c = self.config
        return (
            w(f"{name}_fn"),
            self.get_buffer("spread") @ w(f"{name}_scale"),
            w(f"{name}_base"),
            w(norm),
            c.hc_eps,
            c.rms_norm_eps,
        )

    def _engram(self, w: Lookup, name: str, streams: Tensor, rows: Tensor) -> Tensor:
        values = gather_rows(w(f"{name}.engram.embed.weight"), rows.flatten()).view(rows.shape[0], -1).to(self.dtype)
        product = linear(values, w(f"{name}.engram.wkv.weight"))
        weight = w(f"{name}.engram.q_weight") * w(f"{name}.engram.k_weight")
        return parts.engram_inject(streams, product, weight, self.config.rms_norm_eps)

    def _moe(self, w: Lookup, name: str, x: Tensor, state: Pass) -> Tensor:
        """Every expert on every row as one wide product; the weight of an expert that was not chosen is 0."""
        c = self.config
        scores = nn.functional.softplus(linear(x.float(), w(f"{name}.ffn.gate.weight"))).sqrt()
        ids = (scores.detach() + w(f"{name}.ffn.gate.bias")).topk(c.num_experts_per_tok, dim=-1).indices
        chosen = torch.zeros_like(scores).scatter_(1, ids, 1.0)
        state.load.append(chosen.detach().mean(0))
        routed = scores * chosen
        routed = routed / (routed.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        factor = torch.cat([routed, torch.ones_like(routed[:, :1])], dim=1)  # the shared expert is the last
        w13, w2 = w(f"{name}.ffn.w13"), w(f"{name}.ffn.w2")
        inner = parts.expert_activation(linear(x, w13.flatten(0, 1)), factor, c.swiglu_limit)
        return linear(inner, w2.transpose(0, 1).flatten(1))

    def _attention(self, w: Lookup, spec: LayerSpec, x: Tensor, state: Pass) -> Tensor:
        """x [B, T, D] -> [B * T, D]."""
        c, name = self.config, f"layers.{spec.index}.attn"
        cos, sin = state.cos_sin[spec.ratio > 0]
        latent = parts.rms(linear(x, w(f"{name}.wq_a.weight")), w(f"{name}.q_norm.weight"), c.rms_norm_eps)
        query = linear(latent, w(f"{name}.wq_b.weight")).view(*latent.shape[:2], c.num_attention_heads, c.head_dim)
        query = parts.rotate(query, cos, sin, False, c.head_dim**-0.5)
        kv = parts.rms(linear(x, w(f"{name}.wkv.weight")), w(f"{name}.kv_norm.weight"), c.rms_norm_eps)
        kv = self._fake(parts.rotate(kv[:, :, None], cos, sin, False)[:, :, 0], fake.fp8_groups)
        if spec.owns_kv:
            self._compress(w, spec, x, state)
        if spec.owns_index:
            self._close_group(state)
            self._index(w, spec, x.detach(), latent.detach(), state)
        out = self._core(spec, query, kv, w(f"{name}.attn_sink"), state)
        heads = parts.rotate(out, cos, sin, True).reshape(-1, c.o_groups, c.num_attention_heads // c.o_groups * c.head_dim)
        wo_a = w(f"{name}.wo_a.weight").view(c.o_groups, c.o_lora_rank, -1)
        low_rank = torch.bmm(heads.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        return linear(low_rank, w(f"{name}.wo_b.weight"))

    def _core(self, spec: LayerSpec, query: Tensor, kv: Tensor, sink: Tensor, state: Pass) -> Tensor:
        """Scores, joint softmax, values; a chunk of rows at a time, so that entries nobody sees are not multiplied."""
        window, (batch, length, heads, dim) = self.config.sliding_window, query.shape
        blocks = nn.functional.pad(kv, (0, 0, window, 0)).view(batch, -1, window, dim)
        near_keys = torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2)
        outs = []
        chunks = state.chunks if spec.ratio else [(0, length)]
        for number, (start, stop) in enumerate(chunks):
            q = query[:, start:stop]
            keys = near_keys[:, start // window : stop // window]
            near = (q.reshape(batch, -1, window * heads, dim) @ keys.transpose(2, 3)).view(batch, -1, heads, 2 * window)
            far = entries = selected = None
            if spec.ratio:
                assert state.entries is not None
                entries = state.entries[:, : stop // spec.ratio]
                far = (q.reshape(batch, -1, dim) @ entries.transpose(1, 2)).view(batch, stop - start, heads, -1)
                selected = state.selected[number]
            doc_start = state.doc_start[:, start:stop]
            p_near, p_far, mass = joint_softmax(near, far, sink, doc_start, selected, start, window, spec.ratio)
            out = (p_near.view(batch, -1, window * heads, 2 * window) @ keys).view(batch, -1, dim)
            if p_far is not None and entries is not None and mass is not None:
                out = torch.baddbmm(out, p_far.view(batch, -1, entries.shape[1]), entries)
                state.mass[number] = mass if number not in state.mass else state.mass[number] + mass
            outs.append(out.view(batch, -1, heads, dim))
        return torch.cat(outs, dim=1)

    def _compress(self, w: Lookup, spec: LayerSpec, x: Tensor, state: Pass) -> None:
        """Entries and index keys of a KV source, [B, T / ratio, .]."""
        c, name, ratio = self.config, f"layers.{spec.index}.attn", spec.ratio
        rows = linear(x, w(f"{name}.compressor.wkv.weight"))
        if ratio == 2:
            gated = torch.cat([rows, linear(x, w(f"{name}.compressor.wgate.weight"))], dim=-1).float()
            rows = parts.pool_pairs(gated[:, 0::2], gated[:, 1::2]).to(self.dtype)
        latent = parts.rms(rows, w(f"{name}.compressor.norm.weight"), c.rms_norm_eps)
        cos, sin = (table[:, ::ratio] for table in state.cos_sin[True])
        state.entries = self._fake(parts.rotate(latent[:, :, None], cos, sin, False)[:, :, 0], fake.nvfp4)
        key = linear(latent.detach(), w(f"{name}.indexer.wk.weight"))
        key = parts.rms(key, w(f"{name}.indexer.k_norm.weight"), c.rms_norm_eps)
        state.index_keys = self._fake(parts.rotate(key[:, :, None], cos, sin, False)[:, :, 0], fake.mxfp4)

    def _index(self, w: Lookup, spec: LayerSpec, x: Tensor, latent: Tensor, state: Pass) -> None:
        """Scores of every chunk and, when sparse, what they select. The indexer learns from the attention it serves alone."""
        c, name, batch = self.config, f"layers.{spec.index}.attn.indexer", x.shape[0]
        query = linear(latent, w(f"{name}.wq_b.weight")).view(*latent.shape[:2], c.index_n_heads, c.index_head_dim)
        query = self._fake(parts.rotate(query, *state.cos_sin[True], False), fake.mxfp4)
        weight = linear(x, w(f"{name}.weights_proj.weight")).float() * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        assert state.index_keys is not None
        state.scores, state.selected = [], []
        if spec.candidate_source:
            state.allowed = []
        for number, (start, stop) in enumerate(state.chunks):
            keys = state.index_keys[:, : stop // spec.ratio]
            raw = (query[:, start:stop].reshape(batch, -1, c.index_head_dim) @ keys.transpose(1, 2)).view(
                batch, stop - start, c.index_n_heads, -1
            )
            scores = parts.index_scores(raw, weight[:, start:stop])
            rows = torch.arange(start, stop, device=x.device)
            seen = entries_visible(rows, state.doc_start[:, start:stop], spec.ratio, scores.shape[-1])
            allowed = state.allowed[number] if spec.uses_candidates else None
            if allowed is not None:
                seen = seen & allowed
            picked = parts.select(scores.detach(), seen, c.index_topk) if state.sparse else None
            if spec.candidate_source:
                blocks = (c.candidate_block_size, c.candidate_topk_blocks)
                state.allowed.append(parts.candidates(scores.detach(), seen, *blocks) if state.sparse else None)
            state.scores.append(scores.masked_fill(~(seen if picked is None else picked), -torch.inf))
            state.selected.append(picked)

    def _close_group(self, state: Pass) -> None:
        """The index loss of the layers since the last index source: their attention is what the scores should have ranked."""
        for number, scores in enumerate(state.scores):
            state.losses.append(parts.index_loss(scores, state.mass[number]))
        state.scores, state.mass = [], {}

    def _fake(self, x: Tensor, quantise: Callable[[Tensor], Tensor]) -> Tensor:
        return fake.straight_through(x, quantise(x.detach())) if self.fake_quant else x
