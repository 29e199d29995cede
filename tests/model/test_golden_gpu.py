# SPDX-License-Identifier: Apache-2.0
"""The golden sets on a GPU: the same code and the same tolerances as on the CPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cedar.engine.request import DecoderReplay
from golden_support import case_arrays, cases, decode, load_runner, open_sequence, prefill, tail

NAMES = ("tiny-a", "tiny-b")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


@pytest.mark.parametrize("sizes", [None, 7], ids=["one-shot", "7"])
@pytest.mark.parametrize("name", NAMES)
def test_gpu_logits_differ_from_the_reference(name: str, sizes: int | None) -> None:
    runner = load_runner(name, "fp32_noquant", device="cuda")
    for case in cases(name, "cases_fp32_noquant.npz"):
        golden = case_arrays(name, "cases_fp32_noquant.npz", case)
        ids = golden["input_ids"].tolist()
        seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
        logits = prefill(runner, seq, ids, sizes)
        runner.close(seq)
        assert logits is not None
        difference = np.abs(logits[golden["positions"]] - golden["logits"])
        assert np.median(difference) <= 5e-5, case
        assert difference.max() <= 2e-3, case
        np.testing.assert_array_equal(logits.argmax(-1), golden["argmax"], err_msg=case)


@pytest.mark.parametrize("name", NAMES)
def test_gpu_decoder_replay_differs_from_the_reference(name: str) -> None:
    runner = load_runner(name, "fp32_noquant", device="cuda")
    for case in cases(name, "replay_fp32_noquant.npz"):
        golden = case_arrays(name, "replay_fp32_noquant.npz", case)
        ids = golden["input_ids"].tolist()
        seq = open_sequence(runner, DecoderReplay.BOUNDED, len(ids))
        prefill(runner, seq, ids, 64)
        rows = [tail(runner, seq), *(decode(runner, seq, token) for token in golden["dec_after_source/decode_ids"].tolist())]
        runner.close(seq)
        expected = np.concatenate([golden["dec_after_source/logits_last2"][-1:], golden["dec_after_source/decode_logits"]])
        assert np.abs(np.stack(rows) - expected).max() <= 2e-3, case


def test_gpu_bfloat16_drifts_beyond_its_noise() -> None:
    for name, least in (("tiny-a", 0.75), ("tiny-b", 0.92)):
        runner = load_runner(name, "bf16", device="cuda")
        golden = case_arrays(name, "cases_bf16.npz", "seed0_len300")
        ids = golden["input_ids"].tolist()
        seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
        logits = prefill(runner, seq, ids, 64)
        runner.close(seq)
        assert logits is not None
        assert (logits.argmax(-1) == golden["argmax"]).mean() >= least
