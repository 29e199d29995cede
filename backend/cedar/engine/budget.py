# SPDX-License-Identifier: Apache-2.0
"""What the settings make of a KV budget: the records that are kept, and how many pages and slots there are."""

from __future__ import annotations

import torch

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import CacheFormats, FloatRecords
from cedar.cache.store import CacheSizes
from cedar.config.engine import EngineConfig
from cedar.config.model import ModelConfig
from cedar.engine.replay import SeamSizes
from cedar.engine.request import DecoderReplay, EncoderReplay


def cache_formats(config: ModelConfig, dtype: torch.dtype, *, fake_quant: bool, global_kv: str = "nvfp4") -> CacheFormats:
    """The packed records of `cedar.cache.layout`; with fake_quant off, unquantised values in the compute dtype.

    global_kv: nvfp4, the release's; fp8: compressed KV in the window's records.
    """
    head, index = config.head_dim, config.index_head_dim
    if fake_quant:
        entry = GlobalRecords(head) if global_kv == "nvfp4" else WindowRecords(head)
        return CacheFormats(WindowRecords(head), entry, IndexKeyRecords(index))
    return CacheFormats(FloatRecords(head, dtype), FloatRecords(head, dtype), FloatRecords(index, dtype))


def plan_cache(
    config: ModelConfig, formats: CacheFormats, settings: EngineConfig, dtype: torch.dtype, budget_bytes: int
) -> CacheSizes:
    """How a server with these settings divides ``budget_bytes``. Raises `CedarError` when they are too few."""
    seam = SeamSizes.of(config, dtype, formats.window)
    return CacheSizes.plan(
        config,
        formats,
        budget_bytes=budget_bytes,
        max_sequences=settings.max_num_seqs,
        page_tokens=settings.page_tokens,
        seam_bytes=seam.bytes(DecoderReplay(settings.decoder_replay_mode)),
        largest_seam_bytes=max(map(seam.bytes, DecoderReplay)),
        snapshots=settings.prefix_cache and settings.encoder_replay_mode == EncoderReplay.OFF,
    )
