# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the released ``config.json`` (nested ``text_config``), validated, with its layer schedule.

Attribute names are the file's. The DSpark fields (``dspark_*``, ``num_nextn_predict_layers``) are validated and kept: they
size the drafter's tensors in a checkpoint. ``vision_config`` may be present; Cedar serves the text model, so the vision
tower's tensors are skipped at loading and a request for it is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cedar.config.rules import problems
from cedar.errors import CedarError, ErrorCode, invalid


class LayerMode(StrEnum):
    """What a layer's attention computes itself (V4.1 report, CSA2).

    SWA: sliding window only. FULL: owns compressed KV, index keys and an indexer. REINDEX: shares a FULL layer's KV and
    index keys, selects with its own index queries. REUSE: shares KV and selection.
    """

    SWA = "swa"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True)
class LayerSpec:
    """One row of the layer schedule. ``kv_source``/``index_source``: the layer whose KV/selection this one reads."""

    index: int
    ratio: int
    mode: LayerMode
    kv_source: int | None
    index_source: int | None
    candidate_source: bool
    uses_candidates: bool
    engram: bool

    @property
    def owns_kv(self) -> bool:
        """Has a compressor and index keys (FULL)."""
        return self.mode is LayerMode.FULL

    @property
    def owns_index(self) -> bool:
        """Has index queries and publishes a selection (FULL, REINDEX)."""
        return self.mode in (LayerMode.FULL, LayerMode.REINDEX)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class RopeScaling(_Frozen):
    """YaRN parameters of the compressed layers' rotations."""

    rope_type: str
    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int


class QuantizationConfig(_Frozen):
    """How the checkpoint stores weights. Only the release's form is served; see `cedar.config.rules`."""

    quant_method: str
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    expert_dtype: str = "fp4"
    fmt: str = "e4m3"


class ModelConfig(_Frozen):
    """The text model (and the sizes of its drafter). Make one with `load` or `from_dict`; instances are always valid."""

    # top level of config.json
    model_type: Literal["deepseek_v41"]
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    quantization: QuantizationConfig
    has_vision: bool
    # text_config
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    hidden_act: str
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    # variants that other members of the family use and this one does not
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    num_hash_layers: int = 0
    gate_temp: float = 1.0

    @classmethod
    def load(cls, path: Path | str, *, vision: bool = False) -> ModelConfig:
        """Read a checkpoint directory (or a ``config.json``). Raises `CedarError` that lists every problem.

        vision: ask for the vision tower; always refused. A configuration that merely has one loads as the text model.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if vision:
            raise invalid("vision", "the vision tower is not served", "false (its tensors are skipped at loading)")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise invalid(str(path), "no config.json", "a checkpoint directory in the released layout") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise invalid(str(file), f"cannot be read ({error})", "the released config.json") from error
        return cls.from_dict(data, name=str(file))

    @classmethod
    def from_dict(cls, data: Any, *, name: str = "config.json") -> ModelConfig:
        """Validate the content of a ``config.json``; one `CedarError` lists all problems, each naming its field."""
        if not isinstance(data, dict) or not isinstance(data.get("text_config"), dict):
            raise invalid(f"{name}: text_config", "is missing", "the released layout with nested text_config")
        text = data["text_config"]
        top = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
        merged = {**text, **{key: data[key] for key in top if key in data}}
        merged["quantization"] = data.get("quantization_config") or {}
        merged["has_vision"] = bool((data.get("vision_config") or {}).get("num_hidden_layers"))
        merged["tie_word_embeddings"] = bool(data.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
        try:
            config = cls.model_validate_json(json.dumps(merged))  # as JSON: strict types, yet lists become tuples
        except ValidationError as error:
            raise _listing(name, [_type_problem(item) for item in error.errors()]) from None
        found = problems(config)
        if found:
            raise _listing(name, found)
        return config

    @cached_property
    def cut(self) -> int:
        """The first decoder layer: the last KV source. Layers below it are the encoder."""
        return max(self.kv_source_layer_ids)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The schedule of the ``num_hidden_layers`` text layers."""
        return tuple(self._layer(index) for index in range(self.num_hidden_layers))

    def _layer(self, index: int) -> LayerSpec:
        ratio = self.compress_ratios[index]
        kv = max((s for s in self.kv_source_layer_ids if s <= index), default=None) if ratio else None
        select = max((s for s in self.index_source_layer_ids if s <= index), default=None) if ratio else None
        mode = LayerMode.REUSE
        if ratio == 0:
            mode = LayerMode.SWA
        elif kv == index:
            mode = LayerMode.FULL
        elif select == index:
            mode = LayerMode.REINDEX
        return LayerSpec(
            index=index,
            ratio=ratio,
            mode=mode,
            kv_source=kv,
            index_source=select,
            candidate_source=index == self.candidate_source_layer_id,
            uses_candidates=select == index and index > self.candidate_source_layer_id,
            engram=index in self.engram_layer_ids,
        )

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes of packed global cache a token costs: an FP4 KV record and an MXFP4 index key per entry (890 for the release)."""
        kv = self.head_dim // 2 + self.head_dim // 16
        key = self.index_head_dim // 2 + self.index_head_dim // 32
        return sum((kv + key) / self.compress_ratios[layer] for layer in self.kv_source_layer_ids)

    @cached_property
    def window_bytes_per_sequence(self) -> int:
        """Bytes of packed FP8 window rings of one sequence, all text layers (2.70 MB for the release)."""
        return self.num_hidden_layers * self.sliding_window * (self.head_dim + self.head_dim // 32)

    @cached_property
    def engram_columns(self) -> int:
        """Hash columns of one Engram layer: heads for each n-gram size 2..max."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @cached_property
    def engram_primes(self) -> tuple[tuple[int, ...], ...]:
        """Bucket counts of the hash columns, one row per Engram layer; see `bucket_primes`."""
        return bucket_primes(len(self.engram_layer_ids), self.engram_max_ngram_size, self.engram_n_heads, self.engram_vocab_size)


def bucket_primes(layers: int, max_ngram: int, heads: int, least: int) -> tuple[tuple[int, ...], ...]:
    """One row per Engram layer: (2-gram heads…), (3-gram heads…), …; all distinct (released Engram code).

    Every n-gram size starts again at ``least`` and takes the smallest primes that no earlier column took.
    """
    used: set[int] = set()

    def take() -> int:
        found = next(n for n in count(least) if n not in used and _is_prime(n))
        used.add(found)
        return found

    return tuple(tuple(take() for _ in range((max_ngram - 1) * heads)) for _ in range(layers))


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    return n % 2 != 0 and all(n % d for d in range(3, int(n**0.5) + 1, 2))


def _type_problem(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    field = field.replace("quantization", "quantization_config", 1) if field.startswith("quantization") else field
    if item["type"] == "missing":
        return f"{field}: is missing"
    return f"{field}: is {item['input']!r}; {item['msg'][:1].lower()}{item['msg'][1:]}"


def _listing(name: str, found: list[str]) -> CedarError:
    head = f"{name}: {len(found)} problem{'s' if len(found) > 1 else ''}"
    return CedarError(ErrorCode.INVALID_ARGUMENT, "\n  ".join([head, *found]))
