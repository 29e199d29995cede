# SPDX-License-Identifier: Apache-2.0
"""Core attention against its formula, its tiling, and what a masked key may not do."""

from __future__ import annotations

import math

import pytest
import torch

from cedar.cache.records import FloatRecords, RecordPool, RecordView
from cedar.engine.request import DecoderReplay
from cedar.ops.attention import mega_attention, wo_a
from cedar.ops.rope import rotate
from golden_support import load_runner, open_sequence, prefill

ROWS, HEADS, DIM, WINDOW, SELECTED = 5, 3, 16, 4, 6


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    angle = torch.randn(ROWS, 4, generator=generator)
    masked = torch.rand(ROWS, WINDOW + SELECTED, generator=generator) < 0.3
    masked[:, WINDOW - 1] = False
    return {
        "query": torch.randn(ROWS, HEADS, DIM, generator=generator).to(dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "sink": torch.randn(HEADS, generator=generator),
        "window": torch.randn(20, DIM, generator=generator).to(dtype),
        "entries": torch.randn(30, DIM, generator=generator).to(dtype),
        "window_index": torch.randint(1, 20, (ROWS, WINDOW), generator=generator).masked_fill(masked[:, :WINDOW], 0),
        "entry_index": torch.randint(1, 30, (ROWS, SELECTED), generator=generator).masked_fill(masked[:, WINDOW:], 0),
    }


def run(x: dict[str, torch.Tensor], max_elements: int = 1 << 20) -> torch.Tensor:
    record = FloatRecords(DIM, x["window"].dtype)
    views = [
        RecordView(RecordPool(record, x["window"]), x["window_index"]),
        RecordView(RecordPool(record, x["entries"]), x["entry_index"]),
    ]
    return mega_attention(x["query"], x["cos"], x["sin"], x["sink"], views, DIM**-0.5, max_elements)


def test_output_differs_from_the_formula() -> None:
    x = inputs()
    query = rotate(x["query"], x["cos"], x["sin"]).double()
    keys = torch.cat([x["window"][x["window_index"]], x["entries"][x["entry_index"]]], dim=1).double()
    expected = torch.zeros(ROWS, HEADS, DIM, dtype=torch.float64)
    for row in range(ROWS):
        for head in range(HEADS):
            scores = keys[row] @ query[row, head] * DIM**-0.5
            weights = scores.exp() * (torch.cat([x["window_index"], x["entry_index"]], 1)[row] != 0)
            expected[row, head] = weights @ keys[row] / (weights.sum() + math.exp(float(x["sink"][head])))
    expected = rotate(expected.float(), x["cos"], x["sin"], inverse=True)
    torch.testing.assert_close(run(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("max_elements", [1, DIM * (WINDOW + SELECTED) * 2, DIM * (WINDOW + SELECTED) * 3 + 1])
def test_tiling_changes_the_output(max_elements: int) -> None:
    torch.testing.assert_close(run(inputs(), max_elements), run(inputs()), atol=1e-6, rtol=0)


def test_bfloat16_sums_are_not_float32() -> None:
    """Rounded inputs, float32 inside, one rounding at the end."""
    x = inputs(torch.bfloat16)
    wide = {key: value.float() if value.is_floating_point() else value for key, value in x.items()}
    wide["query"] = rotate(x["query"], x["cos"], x["sin"]).float()
    still = {"cos": torch.ones_like(x["cos"]), "sin": torch.zeros_like(x["sin"])}
    expected = rotate(run({**wide, **still}).bfloat16(), x["cos"], x["sin"], inverse=True)
    assert run(x).dtype is torch.bfloat16
    torch.testing.assert_close(run(x), expected, atol=0, rtol=0)


def test_a_masked_key_leaks_through_a_zero_weight() -> None:
    """A masked index reads the null row, so another row's infinities cannot become 0 * inf."""
    x = inputs()
    x["window_index"][:, 0] = 0
    x["window"][0] = 0
    x["entries"][0] = 0
    clean = run(x)
    x["window"][1:][~torch.isin(torch.arange(1, 20), x["window_index"])] = torch.inf
    torch.testing.assert_close(run(x), clean, atol=0, rtol=0)


def test_output_projection_mixes_groups() -> None:
    generator = torch.Generator().manual_seed(2)
    out, weight = torch.randn(4, 6, 8, generator=generator), torch.randn(2 * 5, 3 * 8, generator=generator)
    low_rank = wo_a(out, weight, 2)
    for group in range(2):
        expected = out[:, 3 * group : 3 * group + 3].reshape(4, 24) @ weight[5 * group : 5 * group + 5].T
        torch.testing.assert_close(low_rank[:, 5 * group : 5 * group + 5], expected)


def test_null_rows_are_written() -> None:
    runner = load_runner("tiny-a", "fp32")
    seq = open_sequence(runner, DecoderReplay.OFF, 100)
    prefill(runner, seq, [5 + i % 300 for i in range(100)], (7, 1, 30))
    runner.close(seq)
    cache, config = runner.cache, runner.config
    pools = [cache.window(layer) for layer in range(config.num_hidden_layers)]
    pools += [pool for source in config.kv_source_layer_ids for pool in (cache.kv(source), cache.index_keys(source))]
    assert all((pool.rows[0] == 0).all() for pool in pools)
    assert all((pool.rows[1:] != 0).any() for pool in pools)
