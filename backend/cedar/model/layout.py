# SPDX-License-Identifier: Apache-2.0
"""What the released checkpoint layout holds for a configuration: every tensor's name, stored type and shape.

Names have no ``model.`` prefix. Every FP8 or FP4 ``X.weight`` has a sibling ``X.scale`` (UE8M0). The counts are the
loader's self-check: the real configuration has 96,085 tensors (safetensors headers of the release).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from cedar.config.model import LayerSpec, ModelConfig

ITEM_BYTES = {"BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8}
"""Bytes per element of the stored types."""

VISION_PREFIXES = ("vision.", "aligner.", "image_")
RELEASE_VISION_TENSORS = 266
"""The released vision tower: 259 vision.*, 4 aligner.*, 3 image_*. Skipped by a text server, so known by count alone."""
RELEASE_TENSORS = 96_085

_GROUP = 32
_WIDE = ("BF16", "F32")
"""Stored BF16 in the release and used in float32: a float32 checkpoint of these loses nothing."""


@dataclass(frozen=True)
class TensorSpec:
    """dtypes: safetensors names that are accepted, the release's first. part: what `cedar inspect` counts it under."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    part: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtypes[0]]


Named = Iterator[tuple[str, TensorSpec]]


def expected_tensors(config: ModelConfig, *, drafter: bool = True) -> dict[str, TensorSpec]:
    """All tensors of the text model and, with ``drafter``, of the DSpark stages (``mtp.*``), by released name."""
    specs = dict(_text(config))
    if drafter:
        specs.update(_drafter(config))
    return specs


def count_tensors(config: ModelConfig) -> int:
    """Tensors of a complete checkpoint: text, drafter, and the released vision tower if the configuration has one."""
    return len(expected_tensors(config)) + (RELEASE_VISION_TENSORS if config.has_vision else 0)


def _text(c: ModelConfig) -> Named:
    yield "embed.weight", TensorSpec(("BF16",), (c.vocab_size, c.hidden_size), "embedding and head")
    yield "head.weight", TensorSpec(_WIDE, (c.vocab_size, c.hidden_size), "embedding and head")
    yield "norm.weight", TensorSpec(("BF16",), (c.hidden_size,), "norms and mHC")
    for layer in c.layers:
        prefix = f"layers.{layer.index}"
        yield from _block(c, prefix, c.n_routed_experts)
        yield from _sources(c, layer, f"{prefix}.attn")
        if layer.engram:
            yield from _engram(c, layer.index, f"{prefix}.engram")


def _drafter(c: ModelConfig) -> Named:
    stages, hidden = c.num_nextn_predict_layers, c.hidden_size
    if not stages:
        return
    for stage in range(stages):
        for name, spec in _block(c, f"mtp.{stage}", c.dspark_n_routed_experts):
            yield name, TensorSpec(spec.dtypes, spec.shape, "drafter")
    last = f"mtp.{stages - 1}"
    plain = {
        "mtp.0.main_norm.weight": (hidden,),
        f"{last}.norm.weight": (hidden,),
        f"{last}.markov_head.embed.weight": (c.vocab_size, c.dspark_markov_rank),
        f"{last}.markov_head.head.weight": (c.vocab_size, c.dspark_markov_rank),
    }
    yield from _fp8("mtp.0.main_proj", hidden, len(c.dspark_target_layer_ids) * hidden, "drafter")
    for name, shape in plain.items():
        yield name, TensorSpec(("BF16",), shape, "drafter")
    yield f"{last}.confidence_head.proj.weight", TensorSpec(_WIDE, (1, hidden + c.dspark_markov_rank), "drafter")


def _block(c: ModelConfig, prefix: str, experts: int) -> Named:
    """What a text layer and a drafter stage have in common."""
    hidden, inner, hc = c.hidden_size, c.moe_intermediate_size, c.hc_mult
    outputs = (2 + hc) * hc
    for site in ("attn", "ffn"):
        yield f"{prefix}.{site}_norm.weight", TensorSpec(("BF16",), (hidden,), "norms and mHC")
        for name, shape in (("fn", (outputs, hc * hidden)), ("base", (outputs,)), ("scale", (3,))):
            yield f"{prefix}.hc_{site}_{name}", TensorSpec(("F32",), shape, "norms and mHC")
    yield from _attention(c, f"{prefix}.attn")
    yield f"{prefix}.ffn.gate.weight", TensorSpec(("BF16",), (experts, hidden), "gates")
    for name in ("bias", "bias_vl"):
        yield f"{prefix}.ffn.gate.{name}", TensorSpec(("F32",), (experts,), "gates")
    for name, rows, cols in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
        yield from _fp8(f"{prefix}.ffn.shared_experts.{name}", rows, cols, "shared experts")
        packed = TensorSpec(("I8",), (rows, cols // 2), "routed experts")
        scale = TensorSpec(("F8_E8M0",), (rows, cols // _GROUP), "routed experts")
        for expert in range(experts):
            yield f"{prefix}.ffn.experts.{expert}.{name}.weight", packed
            yield f"{prefix}.ffn.experts.{expert}.{name}.scale", scale


def _attention(c: ModelConfig, prefix: str) -> Named:
    width = c.num_attention_heads * c.head_dim
    low_rank = c.o_groups * c.o_lora_rank
    yield f"{prefix}.attn_sink", TensorSpec(("F32",), (c.num_attention_heads,), "attention")
    yield f"{prefix}.q_norm.weight", TensorSpec(("BF16",), (c.q_lora_rank,), "attention")
    yield f"{prefix}.kv_norm.weight", TensorSpec(("BF16",), (c.head_dim,), "attention")
    yield from _fp8(f"{prefix}.wq_a", c.q_lora_rank, c.hidden_size, "attention")
    yield from _fp8(f"{prefix}.wq_b", width, c.q_lora_rank, "attention")
    yield from _fp8(f"{prefix}.wkv", c.head_dim, c.hidden_size, "attention")
    yield from _fp8(f"{prefix}.wo_a", low_rank, width // c.o_groups, "attention")
    yield from _fp8(f"{prefix}.wo_b", c.hidden_size, low_rank, "attention")


def _sources(c: ModelConfig, layer: LayerSpec, prefix: str) -> Named:
    """The compressor of a KV source, the indexer of an index source."""
    part = "compressors and indexers"
    if layer.owns_kv:
        for name in ("wkv", "wgate") if layer.ratio > 1 else ("wkv",):
            yield f"{prefix}.compressor.{name}.weight", TensorSpec(_WIDE, (c.head_dim, c.hidden_size), part)
        yield f"{prefix}.compressor.norm.weight", TensorSpec(("BF16",), (c.head_dim,), part)
        yield f"{prefix}.indexer.wk.weight", TensorSpec(("BF16",), (c.index_head_dim, c.head_dim), part)
        yield f"{prefix}.indexer.k_norm.weight", TensorSpec(("BF16",), (c.index_head_dim,), part)
    if layer.owns_index:
        yield from _fp8(f"{prefix}.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, part)
        yield f"{prefix}.indexer.weights_proj.weight", TensorSpec(("BF16",), (c.index_n_heads, c.hidden_size), part)


def _engram(c: ModelConfig, layer: int, prefix: str) -> Named:
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    yield f"{prefix}.embed.weight", TensorSpec(("F8_E4M3",), (rows, c.engram_head_dim), "Engram tables")
    yield f"{prefix}.embed.scale", TensorSpec(("F8_E8M0",), (rows, c.engram_head_dim // _GROUP), "Engram tables")
    width = c.engram_columns * c.engram_head_dim
    yield from _fp8(f"{prefix}.wkv", (c.hc_mult + 1) * c.hidden_size, width, "Engram projections")
    for name in ("q_weight", "k_weight"):
        yield f"{prefix}.{name}", TensorSpec(("BF16",), (c.hc_mult, c.hidden_size), "Engram projections")


def _fp8(prefix: str, rows: int, cols: int, part: str) -> Named:
    yield f"{prefix}.weight", TensorSpec(("F8_E4M3",), (rows, cols), part)
    yield f"{prefix}.scale", TensorSpec(("F8_E8M0",), (-(-rows // _GROUP), -(-cols // _GROUP)), part)
