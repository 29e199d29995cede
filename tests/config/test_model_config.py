# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the released file loads, every broken rule is named, the schedule is the report's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cedar.config.model import LayerMode, ModelConfig
from cedar.config.presets import PRESETS, preset
from cedar.errors import CedarError, ErrorCode


def change(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set ``a.b`` of a config (``text_config.`` implied); None deletes."""
    *parents, name = path.split(".")
    at = config if parents[:1] == ["top"] or parents[:1] == ["quantization_config"] else config["text_config"]
    for parent in parents:
        at = at if parent == "top" else at[parent]
    if value is None:
        del at[name]
    else:
        at[name] = value
    return config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_configuration(name: str) -> None:
    config = ModelConfig.from_dict(preset(name))
    assert len(config.layers) == config.num_hidden_layers


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_a_checkpoint_configuration_with_a_vision_section_loads_as_text(golden: Path, name: str) -> None:
    config = ModelConfig.load(golden / name / "checkpoint")
    assert config.image_token_id == config.vocab_size - 1
    assert ModelConfig.load(golden / name / "checkpoint" / "config.json") == config


def test_release_sizes_are_the_published_ones() -> None:
    config = ModelConfig.from_dict(preset("release"))
    assert config.kv_bytes_per_token == 890
    assert config.window_bytes_per_sequence == 40 * 128 * 528
    assert config.cut == 20
    assert config.has_vision
    assert config.image_token_id == 129264
    assert [layer.index for layer in config.layers if layer.engram] == [1, 14]


def test_release_schedule_is_the_reports() -> None:
    layers = ModelConfig.from_dict(preset("release")).layers
    modes = {mode: [layer.index for layer in layers if layer.mode is mode] for mode in LayerMode}
    assert modes[LayerMode.SWA] == [0, 1]
    assert modes[LayerMode.FULL] == [2, 8, 14, 20] == [layer.index for layer in layers if layer.owns_kv]
    assert modes[LayerMode.REINDEX] == [24, 28, 32, 36] == [layer.index for layer in layers if layer.uses_candidates]
    assert [layer.index for layer in layers if layer.owns_index] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layer.index for layer in layers if layer.candidate_source] == [20]
    for layer in layers[2:]:
        expected_kv = max(s for s in (2, 8, 14, 20) if s <= layer.index)
        expected_index = max(s for s in (2, 8, 14, 20, 24, 28, 32, 36) if s <= layer.index)
        assert (layer.kv_source, layer.index_source, layer.ratio) == (expected_kv, expected_index, 1 if expected_kv == 20 else 2)
    assert layers[0].kv_source is None
    assert layers[0].index_source is None


def test_release_primes_are_the_published_ones() -> None:
    first, second = ModelConfig.from_dict(preset("release")).engram_primes
    offsets = (57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409, 447, 463)
    assert first == tuple(16_000_000 + offset for offset in offsets)
    assert second[:2] == (16_000_477, 16_000_487)
    assert second[-1] == 16_000_889
    assert (sum(first), sum(second)) == (384_006_168, 384_016_682)


def test_tiny_primes_are_the_published_ones() -> None:
    tiny = ModelConfig.from_dict(preset("tiny"))
    assert tiny.engram_primes == ((211, 223, 227, 229, 233, 239), (241, 251, 257, 263, 269, 271))


def test_compress_ratios_without_the_drafter_stages_are_accepted() -> None:
    data = preset("release")
    data["text_config"]["compress_ratios"] = data["text_config"]["compress_ratios"][:40]
    assert ModelConfig.from_dict(data).layers == ModelConfig.from_dict(preset("release")).layers


# field to change (text_config implied), its value (None: delete), what the message must name
BAD = [
    ("vocab_size", 0, "vocab_size"),
    ("vocab_size", "512", "vocab_size"),
    ("vocab_size", True, "vocab_size"),
    ("vocab_size", None, "vocab_size: is missing"),
    ("hidden_size", 65, "hidden_size: is 65; allowed: a multiple of 32"),
    ("head_dim", 48, "head_dim: is 48; allowed: a multiple of 32"),
    ("q_lora_rank", 50, "q_lora_rank"),
    ("o_lora_rank", 50, "o_lora_rank"),
    ("index_head_dim", 40, "index_head_dim"),
    ("moe_intermediate_size", 33, "moe_intermediate_size"),
    ("engram_head_dim", 16, "engram_head_dim"),
    ("num_hidden_layers", 13, "compress_ratios"),
    ("num_attention_heads", 5, "o_groups"),
    ("o_groups", 3, "o_groups: is 3; allowed: a divisor of num_attention_heads (4)"),
    ("num_key_value_heads", 2, "num_key_value_heads: is 2; allowed: 1"),
    ("qk_rope_head_dim", 31, "qk_rope_head_dim"),
    ("qk_rope_head_dim", 96, "qk_rope_head_dim"),
    ("rms_norm_eps", 0, "rms_norm_eps"),
    ("max_position_embeddings", 0, "max_position_embeddings"),
    ("rope_theta", 1, "rope_theta"),
    ("compress_rope_theta", 0.5, "compress_rope_theta"),
    ("rope_scaling", None, "rope_scaling: is missing"),
    ("rope_scaling.rope_type", "linear", "rope_scaling.rope_type: is 'linear'; allowed: 'yarn'"),
    ("rope_scaling.factor", 0.5, "rope_scaling.factor"),
    ("rope_scaling.original_max_position_embeddings", 0, "rope_scaling.original_max_position_embeddings"),
    ("rope_scaling.beta_fast", 1, "rope_scaling.beta_fast"),
    ("sliding_window", 0, "sliding_window"),
    ("compress_ratios", [0, 0, 2], "compress_ratios: has 3 entries"),
    ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 1], "compress_ratios[13]"),
    ("compress_ratios", [0, 0, 2, 3, 2, 2, 1, 1, 1, 1, 1, 1], "compress_ratios[3]: is 3; allowed: 0, 1 or 2"),
    ("compress_ratios", [0, 0, 2, 1, 2, 2, 1, 1, 1, 1, 1, 1], "compress_ratios[3]: is 1; allowed: the ratio of its source"),
    ("compress_ratios", [0, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], "kv_source_layer_ids: has none at or before layer 1"),
    ("kv_source_layer_ids", [], "kv_source_layer_ids: is empty"),
    ("kv_source_layer_ids", [4, 2, 6], "kv_source_layer_ids"),
    ("kv_source_layer_ids", [2, 4, 6, 6], "kv_source_layer_ids"),
    ("kv_source_layer_ids", [2, 4, 6, 12], "kv_source_layer_ids: holds [12]"),
    ("kv_source_layer_ids", [0, 2, 4, 6], "kv_source_layer_ids: holds layer 0"),
    ("kv_source_layer_ids", [2, 4, 6, 7], "kv_source_layer_ids: holds [7], not in index_source_layer_ids"),
    ("kv_source_layer_ids", ["2"], "kv_source_layer_ids"),
    ("index_source_layer_ids", [4, 6, 8, 10], "index_source_layer_ids: has none at or before layer 2"),
    ("index_source_layer_ids", [2, 4, 6, 8, -1], "index_source_layer_ids"),
    ("index_n_heads", 0, "index_n_heads"),
    ("index_topk", 0, "index_topk"),
    ("index_topk", 24, "candidate_topk_blocks: keeps 24 positions; allowed: times candidate_block_size"),
    ("candidate_source_layer_id", 7, "candidate_source_layer_id: is 7; allowed: an index source"),
    ("candidate_source_layer_id", 4, "candidate_source_layer_id: is 4; allowed: the last KV source (6) or later"),
    ("candidate_topk_blocks", 4, "candidate_topk_blocks"),
    ("candidate_block_size", 0, "candidate_block_size"),
    ("n_routed_experts", 1, "num_experts_per_tok"),
    ("num_experts_per_tok", 9, "num_experts_per_tok: is 9; allowed: at most n_routed_experts (8)"),
    ("n_shared_experts", 2, "n_shared_experts"),
    ("scoring_func", "sigmoid", "scoring_func: is 'sigmoid'; allowed: 'sqrtsoftplus'"),
    ("topk_method", "greedy", "topk_method"),
    ("norm_topk_prob", False, "norm_topk_prob"),
    ("routed_scaling_factor", 0, "routed_scaling_factor"),
    ("swiglu_limit", -1, "swiglu_limit"),
    ("hidden_act", "gelu", "hidden_act"),
    ("tie_word_embeddings", True, "tie_word_embeddings"),
    ("top.tie_word_embeddings", True, "tie_word_embeddings"),
    ("attention_bias", True, "attention_bias"),
    ("num_hash_layers", 1, "num_hash_layers: is 1; allowed: 0"),
    ("gate_temp", 0.5, "gate_temp"),
    ("hc_mult", 0, "hc_mult"),
    ("hc_sinkhorn_iters", 0, "hc_sinkhorn_iters"),
    ("hc_eps", 0, "hc_eps"),
    ("engram_layer_ids", [1, 6], "engram_layer_ids: holds [6]; allowed: layer numbers 0 to 5"),
    ("engram_layer_ids", [4, 1], "engram_layer_ids"),
    ("engram_num_embeddings", [1362, 1553], "engram_num_embeddings: is [1362, 1553]; allowed: the sums of the bucket primes"),
    ("engram_max_ngram_size", 1, "engram_max_ngram_size"),
    ("engram_vocab_size", 10**12, "engram_vocab_size"),
    ("engram_n_heads", 0, "engram_n_heads"),
    ("engram_pad_token_id", 512, "engram_pad_token_id"),
    ("engram_compressed_vocab_size", 0, "engram_compressed_vocab_size"),
    ("num_nextn_predict_layers", -1, "num_nextn_predict_layers"),
    ("dspark_target_layer_ids", [12], "dspark_target_layer_ids"),
    ("dspark_target_layer_ids", [], "dspark_target_layer_ids: is empty"),
    ("dspark_num_experts_per_tok", 5, "dspark_num_experts_per_tok"),
    ("dspark_block_size", 0, "dspark_block_size"),
    ("dspark_noise_token_id", 512, "dspark_noise_token_id"),
    ("top.model_type", "deepseek_v4", "model_type"),
    ("top.bos_token_id", -1, "bos_token_id"),
    ("top.eos_token_id", 512, "eos_token_id"),
    ("top.pad_token_id", None, "pad_token_id: is missing"),
    ("top.image_token_id", 512, "image_token_id"),
    ("quantization_config.quant_method", "awq", "quantization_config.quant_method: is 'awq'; allowed: 'fp8'"),
    ("quantization_config.weight_block_size", [128, 128], "quantization_config.weight_block_size"),
    ("quantization_config.scale_fmt", "float", "quantization_config.scale_fmt"),
    ("quantization_config.expert_dtype", "fp8", "quantization_config.expert_dtype: is 'fp8'; allowed: 'fp4'"),
    ("quantization_config.activation_scheme", "static", "quantization_config.activation_scheme"),
    ("top.quantization_config", None, "quantization_config.quant_method: is missing"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD, ids=[f"{path}={value}" for path, value, _ in BAD])
def test_a_broken_rule_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(CedarError) as caught:
        ModelConfig.from_dict(change(preset("tiny"), path, value))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert f"\n  {message}" in caught.value.message


def test_all_problems_are_listed_at_once() -> None:
    data = preset("tiny")
    for path, value in (("o_groups", 3), ("scoring_func", "sigmoid"), ("candidate_topk_blocks", 1), ("engram_layer_ids", [9])):
        change(data, path, value)
    with pytest.raises(CedarError, match=r"5 problems") as caught:
        ModelConfig.from_dict(data)
    for field in ("o_groups", "scoring_func", "candidate_topk_blocks", "engram_layer_ids", "engram_num_embeddings"):
        assert f"\n  {field}: " in caught.value.message


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"text_config": []}', "{", '{"text_config": {}}'])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CedarError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CedarError, match=r"no config\.json"):
        ModelConfig.load(tmp_path)
    with pytest.raises(CedarError, match=r"no config\.json"):
        ModelConfig.load(tmp_path / "absent")


def test_the_vision_tower_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset("release")))
    assert ModelConfig.load(tmp_path).has_vision
    with pytest.raises(CedarError, match="vision: the vision tower is not served"):
        ModelConfig.load(tmp_path, vision=True)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CedarError, match=r"preset: is 'huge'; allowed: release \| tiny \| small \| tiny40"):
        preset("huge")


def test_a_preset_is_a_fresh_copy() -> None:
    preset("tiny")["text_config"]["rope_scaling"]["factor"] = 0
    assert ModelConfig.from_dict(preset("tiny")).rope_scaling.factor == 4
