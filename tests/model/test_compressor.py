# SPDX-License-Identifier: Apache-2.0
"""Latents of groups: the pooling formula, and groups that are open between steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.rows import RowGeometry, RowPlan, Segment
from cedar.cache.store import SequenceBlocks
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.model.compressor import Compressor
from cedar.ops.compress import CompressorWeights, latents
from cedar.ops.norm import rms_norm
from golden_support import block_tables, entry_rows

CONFIG = ModelConfig.from_dict(preset("tiny"))
GEOMETRY = RowGeometry.of(CONFIG)
CPU = torch.device("cpu")
PAGE = 16


def make(ratio: int, dtype: torch.dtype = torch.float32) -> Compressor:
    generator = torch.Generator().manual_seed(3)
    compressor = Compressor(CONFIG, ratio, dtype)
    compressor.weight.copy_(torch.randn(compressor.weight.shape, generator=generator) * 0.3)
    compressor.norm.weight.copy_(1 + 0.1 * torch.randn(CONFIG.head_dim, generator=generator))
    return compressor


def weights(compressor: Compressor, dtype: torch.dtype = torch.float32) -> CompressorWeights:
    """Those of the latent; no index key is made."""
    key = torch.zeros(CONFIG.index_head_dim)
    return CompressorWeights(compressor.norm.weight, key[:, None].to(dtype).expand(-1, CONFIG.head_dim), key, compressor.norm.eps)


def pooled(compressor: Compressor, x: torch.Tensor) -> torch.Tensor:
    """The formula for a whole sequence, in float64."""
    dim, weight = CONFIG.head_dim, compressor.weight.double()
    kv = x.double() @ weight[:dim].T
    if compressor.ratio == 2:
        gate = x.double() @ weight[dim:].T
        groups = len(x) // 2
        share = torch.softmax(gate[: 2 * groups].view(groups, 2, dim), dim=1)
        kv = (kv[: 2 * groups].view(groups, 2, dim) * share).sum(1)
    return rms_norm(kv.float(), compressor.norm.weight, compressor.norm.eps)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 23), max_size=8), st.sampled_from([1, 2]))
def test_a_split_changes_a_latent(cuts: list[int], ratio: int) -> None:
    compressor = make(ratio)
    x = torch.randn(24, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4))
    other = torch.randn(24, CONFIG.hidden_size, generator=torch.Generator().manual_seed(5))
    first, second = SequenceBlocks(1, pages=[1, 2]), SequenceBlocks(2, pages=[3, 4])
    tables = {ratio: block_tables([first, second], PAGE)[ratio]}
    open_rows = torch.full((3, 2 * CONFIG.head_dim), torch.nan)
    stored: dict[int, torch.Tensor] = {}
    bounds = sorted({0, 24, *cuts})
    for start, end in pairwise(bounds):
        segments = [Segment(first, start, end - start), Segment(second, start, end - start)]
        write = RowPlan.build(segments, GEOMETRY, tables, CPU, writes=True).entries[ratio].write
        assert write is not None
        projected = compressor(torch.cat([x[start:end], other[start:end]]))
        rows = latents(projected, open_rows if ratio == 2 else None, write, weights(compressor))
        stored |= dict(zip(write.slots.tolist(), rows, strict=True))
    for blocks, tokens in ((first, x), (second, other)):
        slots = entry_rows(blocks, PAGE // ratio, 24 // ratio).tolist()
        torch.testing.assert_close(
            torch.stack([stored[slot] for slot in slots]), pooled(compressor, tokens), atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize("floor", [5, 6])
def test_a_suppressed_group_is_written_again(floor: int) -> None:
    """The group that ends at the floor exists; the one that straddles an odd floor does not."""
    blocks = SequenceBlocks(1, pages=[1])
    segments = [Segment(blocks, 3, 9, 3, floor)]
    write = RowPlan.build(segments, GEOMETRY, block_tables([blocks], PAGE), CPU, writes=True).entries[2].write
    assert write is not None
    assert write.positions.tolist() == ([4, 6, 8, 10] if floor == 5 else [6, 8, 10])


def test_pooling_is_rounded_before_the_sum() -> None:
    """Ratio 2 is float32 up to the pooled value in every compute dtype; then one rounding, then the norm."""
    compressor = make(2, torch.bfloat16)
    assert compressor.weight.dtype is torch.float32
    x = torch.randn(8, CONFIG.hidden_size, generator=torch.Generator().manual_seed(6)).bfloat16()
    blocks = SequenceBlocks(1, pages=[1])
    write = RowPlan.build([Segment(blocks, 0, 8)], GEOMETRY, block_tables([blocks], PAGE), CPU, writes=True).entries[2].write
    assert write is not None
    latent = latents(compressor(x), torch.zeros(2, 2 * CONFIG.head_dim), write, weights(compressor, torch.bfloat16))
    kv = x.float() @ compressor.weight[: CONFIG.head_dim].T
    gate = x.float() @ compressor.weight[CONFIG.head_dim :].T
    summed = (kv.view(4, 2, -1) * torch.softmax(gate.view(4, 2, -1), 1)).sum(1)
    expected = rms_norm(summed.bfloat16(), compressor.norm.weight, compressor.norm.eps)
    assert latent.dtype is torch.bfloat16
    assert (latent == expected).float().mean() > 0.99  # float32 sums in another order may round the other way
