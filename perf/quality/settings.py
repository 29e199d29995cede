# SPDX-License-Identifier: Apache-2.0
"""The trained model's configuration: every mechanism of the release in 16 layers of width 256."""

from __future__ import annotations

from typing import Any

import tokenizers

from cedar.config.presets import preset
from cedar.model.make import with_tokenizer

CONTEXT = 2048
"""Length of a training sequence. Longer documents were not seen."""

TEXT: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 192,
    "o_groups": 2,
    "o_lora_rank": 128,
    "max_position_embeddings": 16384,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 6, *[1] * 8],
    "kv_source_layer_ids": [2, 5, 8],
    "index_source_layer_ids": [2, 5, 8, 11, 14],
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 128,
    "candidate_source_layer_id": 8,
    "candidate_topk_blocks": 96,
    "candidate_block_size": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 4000,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": [],
}
"""What differs from the preset ``small``. Layers 0, 1: window only; 2, 5, 8: Full; 11, 14: Reindex; the others: Reuse."""


def model_config() -> dict[str, Any]:
    """A fresh ``config.json`` content, still with the preset's tokenizer facts."""
    config = preset("small")
    config["text_config"].update(TEXT)
    return config


def complete_config(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """`model_config` with what follows from the tokenizer: special ids and the sizes of the Engram tables."""
    return with_tokenizer(model_config(), tokenizer)
