# SPDX-License-Identifier: Apache-2.0
"""The seam: what its rolling buffers keep, what they cost, and what each mode promises of the result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.records import FloatRecords
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.engine.replay import EncodedSequence, SeamSizes
from cedar.engine.request import DecoderReplay
from cedar.engine.work import PrefillWork, StepWork
from golden_support import decode, golden_arrays, load_runner, open_sequence, prefill, tail

CONFIG = ModelConfig.from_dict(preset("tiny"))
SIZES = SeamSizes.of(CONFIG, torch.float32, FloatRecords(CONFIG.head_dim, torch.float32))
W = CONFIG.sliding_window
CPU = torch.device("cpu")


def held_bytes(seam: EncodedSequence) -> int:
    """Bytes of all tensors that a seam refers to, one by one or in tuples."""
    values = [item for value in vars(seam).values() for item in (value if isinstance(value, tuple) else (value,))]
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))


def test_the_release_keeps_another_number_of_rows() -> None:
    config = ModelConfig.from_dict(preset("release"))
    sizes = SeamSizes.of(config, torch.bfloat16, FloatRecords(config.head_dim, torch.bfloat16))
    assert sizes.rows == {DecoderReplay.BOUNDED: 128, DecoderReplay.EXACT: 2414, DecoderReplay.OFF: 0}
    row = 4 * 5120 * 2 + 4 * 4
    assert sizes.bytes(DecoderReplay.BOUNDED) == 128 * row + 255 * 512 * 2


@pytest.mark.parametrize("mode", [DecoderReplay.BOUNDED, DecoderReplay.EXACT])
def test_buffers_cost_other_bytes_than_charged(mode: DecoderReplay) -> None:
    seam = EncodedSequence(SIZES, mode, CPU)
    hc, hidden = SIZES.streams
    seam.append(0, torch.zeros(3, hc, hidden), torch.zeros(3, hc), torch.zeros(3, CONFIG.head_dim))
    assert held_bytes(seam) == SIZES.bytes(mode)
    seam.release()
    assert held_bytes(seam) == 0


def test_a_sequence_that_waits_for_memory_allocates_boundary_rows() -> None:
    """Opening is tried again in every step while a sequence waits for pages."""
    runner = load_runner("tiny-a", "fp32")
    seq = open_sequence(runner, DecoderReplay.EXACT, 1)
    assert held_bytes(seq.seam) == 0
    assert seq.blocks.charged_bytes == runner._seam.bytes(DecoderReplay.EXACT, 1) > 0
    runner.close(seq)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 3 * W + 70), min_size=1, max_size=6),
    st.integers(0, 40),
    st.sampled_from([DecoderReplay.BOUNDED, DecoderReplay.EXACT]),
)
def test_kept_rows_are_not_the_last(chunks: list[int], floor: int, mode: DecoderReplay) -> None:
    seam = EncodedSequence(SIZES, mode, CPU)
    end = floor
    for count in chunks:
        at = torch.arange(end, end + count, dtype=torch.float32)
        hc, hidden = SIZES.streams
        streams, pre = at[:, None, None].expand(count, hc, hidden), at[:, None].expand(count, hc)
        seam.append(end, streams, pre, at[:, None].expand(count, CONFIG.head_dim))
        end += count
    kept = seam.kept(end, floor)
    first = max(floor, end - SIZES.rows[mode])
    assert kept.first == first
    assert kept.streams[:, 0, 0].tolist() == kept.pre[:, 0].tolist() == list(range(first, end))
    assert kept.window_first == max(floor, first - W + 1)
    assert kept.records[:, 0].tolist() == list(range(kept.window_first, end))


def outputs(name: str, ids: list[int], mode: DecoderReplay, size: int | None, new_ids: list[int]) -> np.ndarray:
    """Logits of the last prompt row and of each new token."""
    runner = load_runner(name, "fp32_noquant")
    seq = open_sequence(runner, mode, len(ids))
    try:
        prefill(runner, seq, ids, size)
        return np.stack([tail(runner, seq), *[decode(runner, seq, token) for token in new_ids]])
    finally:
        runner.close(seq)


IDS = golden_arrays("tiny-a", "cases_fp32_noquant.npz")["seed0_len300/input_ids"].tolist()
NEW = [11, 300, 7, 42]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 45, 46, 47, 61, 62, 92, 150, 200])
def test_exact_differs_from_off(length: int) -> None:
    """tiny-a: W = 16 and three layers after the cut, so the halo is 46 rows."""
    expected = outputs("tiny-a", IDS[:length], DecoderReplay.OFF, None, NEW)
    for size in (None, 19):
        actual = outputs("tiny-a", IDS[:length], DecoderReplay.EXACT, size, NEW)
        np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("short", [40, 30])
def test_a_shorter_halo_would_do(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The halo is not larger than needed: with fewer rows the result moves."""
    runner = load_runner("tiny-a", "fp32_noquant")
    expected = outputs("tiny-a", IDS[:150], DecoderReplay.OFF, None, NEW)
    monkeypatch.setitem(runner._seam.rows, DecoderReplay.EXACT, short)
    assert np.abs(outputs("tiny-a", IDS[:150], DecoderReplay.EXACT, None, NEW) - expected).max() > 1e-4


@pytest.mark.parametrize("length", [1, 2, 7, 15, 16])
def test_bounded_differs_from_off_for_a_prompt_within_the_window(length: int) -> None:
    expected = outputs("tiny-a", IDS[:length], DecoderReplay.OFF, None, NEW)
    for size in (None, 1, 5):
        np.testing.assert_allclose(outputs("tiny-a", IDS[:length], DecoderReplay.BOUNDED, size, NEW), expected, atol=2e-5)


def test_bounded_equals_off_for_a_longer_prompt() -> None:
    """The approximation is there: otherwise the modes would not be told apart by any other test."""
    expected = outputs("tiny-a", IDS[:100], DecoderReplay.OFF, None, NEW)
    assert np.abs(outputs("tiny-a", IDS[:100], DecoderReplay.BOUNDED, None, NEW) - expected).max() > 1e-3


@pytest.mark.parametrize("mode", [DecoderReplay.BOUNDED, DecoderReplay.EXACT])
def test_an_intermediate_chunk_runs_decoder_layers(mode: DecoderReplay) -> None:
    runner = load_runner("tiny-a", "fp32")
    ran: list[int] = []
    handles = [
        layer.register_forward_hook(lambda _, __, ___, index=index: ran.append(index))  # type: ignore[misc]
        for index, layer in enumerate(runner.model.layers)
    ]
    seq = open_sequence(runner, mode, 100)
    try:
        for start in range(0, 100, 20):
            result = runner.step(StepWork(prefills=[PrefillWork(seq, start, IDS[start : start + 20], start == 80)]))
            assert result.logits is None
        assert max(ran) == runner.config.cut - 1
        ran.clear()
        tail(runner, seq)
        assert ran == list(range(runner.config.cut, runner.config.num_hidden_layers))
    finally:
        runner.close(seq)
        for handle in handles:
            handle.remove()


def test_a_seam_grows_with_the_prompt() -> None:
    runner = load_runner("tiny-a", "fp32")
    seq = open_sequence(runner, DecoderReplay.BOUNDED, 300)
    used = runner.usage().bytes_used
    prefill(runner, seq, IDS, 50)
    assert held_bytes(seq.seam) == runner._seam.bytes(DecoderReplay.BOUNDED)
    assert runner.usage().bytes_used == used
    tail(runner, seq)
    assert runner.usage().bytes_used == used - runner._seam.bytes(DecoderReplay.BOUNDED)
    runner.close(seq)
