# SPDX-License-Identifier: Apache-2.0
"""Configurations in the released ``config.json`` form: the release itself and random models small enough for a laptop.

`tiny` and `small` keep every mechanism (all four layer modes, both ratios, candidates, Engram, drafter) in 12 layers.
`tiny40` is the release's 40-layer schedule at `tiny`'s width. Fields that follow from the tokenizer
(``engram_compressed_vocab_size`` and special token ids) are set when a checkpoint is made (`cedar.model.make`).
"""

from __future__ import annotations

import copy
from typing import Any

from cedar.errors import invalid

_RELEASE_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2304,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}

_RELEASE: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": _RELEASE_TEXT,
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "max_position_embeddings": 16384,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 128,
    },
    "sliding_window": 8,
    "compress_ratios": [0, 0, *[2] * 4, *[1] * 6, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 16,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [1362, 1552],
    "engram_vocab_size": 200,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_compressed_vocab_size": 300,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 3,
    "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

_SMALL: dict[str, Any] = {
    **_TINY,
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 4,
    "o_lora_rank": 64,
    "max_position_embeddings": 32768,
    "sliding_window": 32,
    "index_n_heads": 8,
    "index_topk": 32,
    "candidate_topk_blocks": 12,
    "candidate_block_size": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "engram_num_embeddings": [24562, 25586],
    "engram_vocab_size": 2000,
    "engram_n_heads": 4,
    "engram_head_dim": 64,
    "dspark_block_size": 5,
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
}

_SCHEDULE = (
    *("num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id"),
    *("engram_layer_ids", "num_nextn_predict_layers", "dspark_target_layer_ids", "sliding_window"),
)
_TINY40: dict[str, Any] = {**_TINY, **{name: _RELEASE_TEXT[name] for name in _SCHEDULE}}

_TEXT: dict[str, dict[str, Any]] = {"release": {}, "tiny": _TINY, "small": _SMALL, "tiny40": _TINY40}

PRESETS = tuple(_TEXT)
"""Names that `preset` knows."""


def preset(name: str) -> dict[str, Any]:
    """A fresh ``config.json`` content of the released layout. ``release`` is the real model's."""
    if name not in _TEXT:
        raise invalid("preset", f"is {name!r}", " | ".join(PRESETS))
    config = copy.deepcopy(_RELEASE)
    config["text_config"].update(copy.deepcopy(_TEXT[name]))
    if name != "release":
        config["image_token_id"] = -1
        del config["vision_config"]
    return config
