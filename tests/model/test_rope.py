# SPDX-License-Identifier: Apache-2.0
"""Rotations and frequencies against the independent implementation, at the tiny and the released dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.model.rope import RopeTable, rope_frequencies
from cedar.ops.rope import rotate

KINDS = [("plain", False), ("yarn", True)]
RELEASE = ModelConfig.from_dict(preset("release"))


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
@pytest.mark.parametrize(("kind", "compressed"), KINDS)
def test_rotations_equal_the_golden_ones(golden: Path, name: str, kind: str, compressed: bool) -> None:
    units = np.load(golden / name / "units_layers.npz")
    table = RopeTable(ModelConfig.load(golden / name / "checkpoint"), compressed)
    positions = torch.from_numpy(units["rope_positions"])
    assert np.array_equal((positions.float()[:, None] * table.frequencies).numpy(), units[f"rope_{kind}_angles"])
    x = torch.from_numpy(units[f"rope_{kind}_in"])
    for inverse, key in ((False, "out"), (True, "inverse")):
        rotated = rotate(x, *table(positions), inverse=inverse)
        np.testing.assert_allclose(rotated.numpy(), units[f"rope_{kind}_{key}"], atol=1e-6)


@pytest.mark.parametrize(("kind", "compressed"), KINDS)
def test_angles_of_the_release_are_exact_up_to_a_million(golden: Path, kind: str, compressed: bool) -> None:
    units = np.load(golden / "tiny-a" / "units_layers.npz")
    positions = torch.from_numpy(units["rope_release_positions"])
    angles = positions.float()[:, None] * rope_frequencies(RELEASE, compressed)
    assert np.array_equal(angles.numpy(), units[f"rope_release_{kind}_angles"])


def test_yarn_frequencies_of_the_release_are_the_published_ones() -> None:
    frequencies = rope_frequencies(RELEASE, compressed=True)
    expected = {0: 1.0, 15: 3.63553858e-3, 16: 2.265625e-3, 20: 2.96977778e-4, 25: 5.37231267e-6, 31: 5.68052904e-7}
    for pair, value in expected.items():
        assert frequencies[pair].item() == pytest.approx(value, rel=2e-6)


def test_the_inverse_undoes_the_rotation_and_other_dimensions_pass() -> None:
    x = torch.randn(5, 3, 96, generator=torch.Generator().manual_seed(0))
    cos, sin = RopeTable(RELEASE, compressed=True)(torch.tensor([0, 1, 777, 65536, 1048575]))
    rotated = rotate(x, cos, sin)
    assert torch.equal(rotated[..., :32], x[..., :32])
    assert torch.equal(rotated[0], x[0]), "position 0 is not rotated"
    assert not torch.allclose(rotated[1:, :, 32:], x[1:, :, 32:])
    torch.testing.assert_close(rotate(rotated, cos, sin, inverse=True), x, atol=1e-6, rtol=0)


def test_bfloat16_is_rotated_in_float32_and_rounded_once() -> None:
    x = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    cos, sin = RopeTable(RELEASE, compressed=False)(torch.tensor([1, 20, 300, 4000]))
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


def test_pairs_are_interleaved() -> None:
    x = torch.zeros(1, 64)
    x[0, 0] = 1.0
    cos, sin = RopeTable(RELEASE, compressed=False)(torch.tensor([1]))
    rotated = rotate(x, cos, sin)[0]
    torch.testing.assert_close(
        rotated[:2], torch.tensor([1.0, 1.0]).cos() * torch.tensor([1.0, 0.0]) + torch.tensor([0.0, 1.0]).sin()
    )
    assert not rotated[2:].any()
