# SPDX-License-Identifier: Apache-2.0
"""The rules a `ModelConfig` must keep. Each broken rule is one line: ``field: problem; allowed: …``.

They come from the released configuration, its tensor shapes, and what the cache records and kernels assume: quantisation
groups of 32 along every quantised dimension, one KV head, ratios 0, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cedar.config.model import ModelConfig

GROUP = 32
"""Elements that share a scale along a quantised dimension (FP8 tiles, MXFP4 rows, window records, index keys)."""

_POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank"),
    *("o_groups", "o_lora_rank", "rms_norm_eps", "max_position_embeddings", "sliding_window", "index_n_heads", "index_head_dim"),
    *("index_topk", "candidate_topk_blocks", "candidate_block_size", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    *("engram_head_dim", "engram_compressed_vocab_size"),
)
_GROUPED = ("hidden_size", "head_dim", "q_lora_rank", "o_lora_rank", "index_head_dim", "moe_intermediate_size", "engram_head_dim")
_FIXED: tuple[tuple[str, object], ...] = (
    ("num_key_value_heads", 1),
    ("n_shared_experts", 1),
    ("scoring_func", "sqrtsoftplus"),
    ("topk_method", "noaux_tc"),
    ("norm_topk_prob", True),
    ("hidden_act", "silu"),
    ("tie_word_embeddings", False),
    ("attention_bias", False),
    ("num_hash_layers", 0),
    ("gate_temp", 1.0),
)
_FIXED_QUANTIZATION: tuple[tuple[str, object], ...] = (
    ("quant_method", "fp8"),
    ("activation_scheme", "dynamic"),
    ("weight_block_size", (GROUP, GROUP)),
    ("scale_fmt", "ue8m0"),
    ("expert_dtype", "fp4"),
    ("fmt", "e4m3"),
)


def problems(config: ModelConfig) -> list[str]:
    """Every broken rule."""
    rules = (_variants, _sizes, _ratios, _sources, _candidates, _engram, _drafter)
    return [problem for rule in rules for problem in rule(config)]


def _problem(field: str, problem: object, allowed: object) -> str:
    return f"{field}: {problem}; allowed: {allowed}"


def _variants(c: ModelConfig) -> Iterator[str]:
    for name, allowed in _FIXED:
        if getattr(c, name) != allowed:
            yield _problem(name, f"is {getattr(c, name)!r}", repr(allowed))
    for name, allowed in _FIXED_QUANTIZATION:
        value = getattr(c.quantization, name)
        if value != allowed:
            yield _problem(f"quantization_config.{name}", f"is {value!r}", repr(allowed))
    if c.rope_scaling.rope_type != "yarn":
        yield _problem("rope_scaling.rope_type", f"is {c.rope_scaling.rope_type!r}", "'yarn'")


def _sizes(c: ModelConfig) -> Iterator[str]:
    for name in _POSITIVE:
        if not getattr(c, name) > 0:
            yield _problem(name, f"is {getattr(c, name)}", "above 0")
    for name in _GROUPED:
        if getattr(c, name) % GROUP:
            yield _problem(name, f"is {getattr(c, name)}", f"a multiple of {GROUP}")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        limit = f"even, at most head_dim ({c.head_dim}) and index_head_dim ({c.index_head_dim})"
        yield _problem("qk_rope_head_dim", f"is {c.qk_rope_head_dim}", limit)
    if c.o_groups > 0 and c.num_attention_heads % c.o_groups:
        yield _problem("o_groups", f"is {c.o_groups}", f"a divisor of num_attention_heads ({c.num_attention_heads})")
    if c.num_experts_per_tok > c.n_routed_experts:
        yield _problem("num_experts_per_tok", f"is {c.num_experts_per_tok}", f"at most n_routed_experts ({c.n_routed_experts})")
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(c, name) <= 1:
            yield _problem(name, f"is {getattr(c, name)}", "above 1")
    scaling = c.rope_scaling
    if scaling.factor < 1:
        yield _problem("rope_scaling.factor", f"is {scaling.factor}", "1 or more")
    if scaling.original_max_position_embeddings < 1:
        name = "rope_scaling.original_max_position_embeddings"
        yield _problem(name, f"is {scaling.original_max_position_embeddings}", "above 0")
    if not scaling.beta_fast > scaling.beta_slow > 0:
        allowed = f"above beta_slow ({scaling.beta_slow}), which is above 0"
        yield _problem("rope_scaling.beta_fast", f"is {scaling.beta_fast}", allowed)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            yield _problem(name, f"is {getattr(c, name)}", f"0 to vocab_size - 1 ({c.vocab_size - 1})")
    if not -1 <= c.image_token_id < c.vocab_size:
        yield _problem("image_token_id", f"is {c.image_token_id}", f"-1 (none) to vocab_size - 1 ({c.vocab_size - 1})")
    if c.num_nextn_predict_layers < 0:
        yield _problem("num_nextn_predict_layers", f"is {c.num_nextn_predict_layers}", "0 or more")


def _ratios(c: ModelConfig) -> Iterator[str]:
    layers, drafts = c.num_hidden_layers, c.num_nextn_predict_layers
    if len(c.compress_ratios) not in (layers, layers + drafts):
        allowed = f"num_hidden_layers ({layers}) entries, or {layers + drafts} with the {drafts} drafter stages"
        yield _problem("compress_ratios", f"has {len(c.compress_ratios)} entries", allowed)
    for layer, ratio in enumerate(c.compress_ratios):
        if ratio not in (0, 1, 2):
            yield _problem(f"compress_ratios[{layer}]", f"is {ratio}", "0, 1 or 2")
        elif layer >= layers and ratio:
            yield _problem(f"compress_ratios[{layer}]", f"is {ratio}", "0 for a drafter stage")


def _layer_ids(c: ModelConfig, name: str, *, below: int | None = None) -> Iterator[str]:
    ids = getattr(c, name)
    if list(ids) != sorted(set(ids)):
        yield _problem(name, f"is {list(ids)}", "ascending layer numbers, each once")
    limit = c.num_hidden_layers if below is None else below
    outside = [layer for layer in ids if not 0 <= layer < limit]
    if outside:
        yield _problem(name, f"holds {outside}", f"layer numbers 0 to {limit - 1}")


def _ratio_of(c: ModelConfig, layer: int) -> int:
    return c.compress_ratios[layer] if 0 <= layer < len(c.compress_ratios) else 0


def _sources(c: ModelConfig) -> Iterator[str]:
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        yield from _layer_ids(c, name)
        for layer in getattr(c, name):
            if 0 <= layer < c.num_hidden_layers and not _ratio_of(c, layer):
                yield _problem(name, f"holds layer {layer}, whose compress_ratios entry is 0", "layers with ratio 1 or 2")
    if not c.kv_source_layer_ids:
        yield _problem("kv_source_layer_ids", "is empty", "at least one layer")
    apart = [layer for layer in c.kv_source_layer_ids if layer not in c.index_source_layer_ids]
    if apart:
        # a selection counts compressed positions of one KV source, so a new source needs a new selection
        yield _problem("kv_source_layer_ids", f"holds {apart}, not in index_source_layer_ids", "index sources")
    for layer in range(min(c.num_hidden_layers, len(c.compress_ratios))):
        ratio = _ratio_of(c, layer)
        for name in ("kv_source_layer_ids", "index_source_layer_ids") if ratio else ():
            source = max((s for s in getattr(c, name) if s <= layer), default=None)
            if source is None:
                yield _problem(name, f"has none at or before layer {layer}", f"a source for every layer with a ratio ({ratio})")
            elif _ratio_of(c, source) != ratio:
                allowed = f"the ratio of its source, layer {source} ({_ratio_of(c, source)})"
                yield _problem(f"compress_ratios[{layer}]", f"is {ratio}", allowed)


def _candidates(c: ModelConfig) -> Iterator[str]:
    source = c.candidate_source_layer_id
    if source not in c.index_source_layer_ids:
        yield _problem("candidate_source_layer_id", f"is {source}", f"an index source ({list(c.index_source_layer_ids)})")
    elif any(source < layer for layer in c.kv_source_layer_ids):
        # blocks count the source's compressed positions: a later KV source has other positions
        yield _problem("candidate_source_layer_id", f"is {source}", f"the last KV source ({max(c.kv_source_layer_ids)}) or later")
    kept = c.candidate_topk_blocks * c.candidate_block_size
    least = c.index_topk + c.candidate_block_size
    if kept < least:
        # then a selection inside the candidates never has to take a masked position
        allowed = f"times candidate_block_size, at least index_topk + candidate_block_size ({least})"
        yield _problem("candidate_topk_blocks", f"keeps {kept} positions", allowed)


def _engram(c: ModelConfig) -> Iterator[str]:
    cut = max(c.kv_source_layer_ids, default=c.num_hidden_layers)
    # decoder-side replay drops rows from the cut on; Engram must have seen every row by then
    yield from _layer_ids(c, "engram_layer_ids", below=cut)
    # bounded, so that looking for the primes ends soon whatever the file says
    bounds = (("engram_max_ngram_size", 2, 8), ("engram_vocab_size", 2, 2**31 - 1), ("engram_n_heads", 1, 64))
    outside = [
        _problem(name, f"is {getattr(c, name)}", f"{low} to {high}")
        for name, low, high in bounds
        if not low <= getattr(c, name) <= high
    ]
    if outside:
        yield from outside
        return
    rows = tuple(sum(primes) for primes in c.engram_primes)
    if rows != c.engram_num_embeddings:
        allowed = f"the sums of the bucket primes ({list(rows)}), one per engram_layer_ids entry"
        yield _problem("engram_num_embeddings", f"is {list(c.engram_num_embeddings)}", allowed)


def _drafter(c: ModelConfig) -> Iterator[str]:
    if not c.num_nextn_predict_layers:
        return
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        if getattr(c, name) < 1:
            yield _problem(name, f"is {getattr(c, name)}", "above 0 when num_nextn_predict_layers is")
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        allowed = f"at most dspark_n_routed_experts ({c.dspark_n_routed_experts})"
        yield _problem("dspark_num_experts_per_tok", f"is {c.dspark_num_experts_per_tok}", allowed)
    if not 0 <= c.dspark_noise_token_id < c.vocab_size:
        yield _problem("dspark_noise_token_id", f"is {c.dspark_noise_token_id}", f"0 to vocab_size - 1 ({c.vocab_size - 1})")
    if not c.dspark_target_layer_ids:
        yield _problem("dspark_target_layer_ids", "is empty", "at least one layer")
    yield from _layer_ids(c, "dspark_target_layer_ids")
