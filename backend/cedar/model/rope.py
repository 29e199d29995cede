# SPDX-License-Identifier: Apache-2.0
"""Angles of the rotary position embedding: plain or YaRN frequencies. `cedar.ops.rope.rotate` applies them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cedar.config.model import ModelConfig


def rope_frequencies(config: ModelConfig, compressed: bool, device: torch.device | str | None = None) -> Tensor:
    """Radians per position, float32 [qk_rope_head_dim / 2].

    compressed: the YaRN frequencies of every rotation in a layer with a ratio; otherwise the plain ones of the
    window-only layers and the drafter. There is no attention factor (released inference code semantics).
    """
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    frequencies = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if compressed:
        scaling = config.rope_scaling
        ramp = _yarn_ramp(dim, base, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow)
        frequencies = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
    return frequencies.to(device)


def _yarn_ramp(dim: int, base: float, original: int, beta_fast: float, beta_slow: float) -> Tensor:
    """0 where a pair turns more than beta_fast times in the original context (kept), 1 below beta_slow (stretched)."""

    def pair_that_turns(count: float) -> float:
        return dim * math.log(original / (count * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), dim - 1)
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp_(0, 1)


class RopeTable:
    """cos and sin of the positions of a step, for one set of frequencies."""

    def __init__(self, config: ModelConfig, compressed: bool, device: torch.device | str | None = None) -> None:
        self.frequencies = rope_frequencies(config, compressed, device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Integer positions [T] -> (cos, sin), float32 [T, dr/2]. The angle is float32(position) * float32(frequency)."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        return angles.cos(), angles.sin()
