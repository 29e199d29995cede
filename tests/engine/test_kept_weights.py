# SPDX-License-Identifier: Apache-2.0
"""Weights as a device's operations read them: which, and that it changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cedar.config.engine import EngineConfig
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner, weights_kept_as
from cedar.ops.abi import OPERATIONS
from golden_support import open_sequence, prefill

NOTHING: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("model", "device", "dtype", "without", "kept"),
    [
        ("release", "cuda", torch.bfloat16, NOTHING, torch.float8_e4m3fn),
        ("tiny", "cuda", torch.bfloat16, NOTHING, torch.bfloat16),  # too narrow for a tile of experts
        ("release", "cuda", torch.bfloat16, {"wo_a"}, torch.bfloat16),
        ("release", "cuda", torch.float32, NOTHING, None),
        ("release", "cpu", torch.float32, NOTHING, torch.bfloat16),
        ("release", "cpu", torch.float32, {"engram_gate"}, None),
    ],
)
def test_weights_are_kept_as_an_operation_does_not_read_them(
    model: str, device: str, dtype: torch.dtype, without: frozenset[str], kept: torch.dtype | None
) -> None:
    assert weights_kept_as(ModelConfig.from_dict(preset(model)), torch.device(device), dtype, set(OPERATIONS) - without) is kept


def test_codes_in_place_of_values_change_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear, the grouped projection and the experts, from what a GPU keeps."""
    logits = []
    settings = EngineConfig(device="cpu", dtype="bfloat16", ops="reference", kv_cache_bytes=64 << 20)
    for kept, held in ((torch.bfloat16, set()), (torch.float8_e4m3fn, {torch.float8_e4m3fn, torch.uint8})):
        monkeypatch.setattr("cedar.engine.runner.weights_kept_as", lambda *_, kept=kept: kept)
        runner = ModelRunner.load(settings)
        assert {parameter.dtype for parameter in runner.model.parameters()} == {torch.bfloat16, torch.float32, *held}
        seq = open_sequence(runner, DecoderReplay.OFF, 150)
        logits.append(prefill(runner, seq, [5 + 7 * n % 4000 for n in range(150)], None))
        runner.close(seq)
    np.testing.assert_array_equal(*logits)
