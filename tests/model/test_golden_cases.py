# SPDX-License-Identifier: Apache-2.0
"""Whole prompts against the golden sets, in several chunkings, at the tolerances of its README."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cedar.engine.request import DecoderReplay
from golden_support import (
    GOLDEN,
    Record,
    case_arrays,
    cases,
    load_runner,
    open_sequence,
    prefill,
    recorded,
    relative_error,
    tail,
)

NAMES = ("tiny-a", "tiny-b")
UNEVEN = (5, 1, 2, 33, 1, 1, 16, 3)


def run(name: str, variant: str, ids: list[int], sizes: int | Sequence[int] | None) -> tuple[np.ndarray, Record]:
    """Logits of every position, and what the layers computed."""
    runner = load_runner(name, variant)
    seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
    try:
        with recorded(runner) as record:
            logits = prefill(runner, seq, ids, sizes)
        assert logits is not None
        np.testing.assert_allclose(tail(runner, seq), logits[-1], atol=2e-5)
    finally:
        runner.close(seq)
    return logits, record


def stream_errors(record: Record, golden: dict[str, np.ndarray]) -> np.ndarray:
    """Relative error of the streams [layers, sampled positions]."""
    positions, expected = golden["positions"], golden["streams"]
    return np.stack(
        [relative_error(record.array("streams", layer)[positions], expected[layer]) for layer in range(len(expected))]
    )


def logsumexp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1)
    return top + np.log(np.exp(logits - top[:, None]).sum(-1))


def check_exact(name: str, case: str, sizes: int | Sequence[int] | None) -> None:
    """Every array of a ``fp32_noquant`` case."""
    golden = case_arrays(name, "cases_fp32_noquant.npz", case)
    logits, record = run(name, "fp32_noquant", golden["input_ids"].tolist(), sizes)
    positions = golden["positions"]
    errors = stream_errors(record, golden)
    assert np.median(errors) <= 1e-5
    assert errors.max() <= 1e-4
    config = load_runner(name, "fp32_noquant").config
    probe = np.load(GOLDEN / name / "stream_probe.npy")
    for layer in range(config.num_hidden_layers):
        probed = record.array("streams", layer).reshape(len(logits), -1) @ probe
        scale = np.abs(golden["stream_probe"][layer]).max()
        np.testing.assert_allclose(probed, golden["stream_probe"][layer], atol=1e-4 * scale, err_msg=f"layer {layer}")
        np.testing.assert_allclose(record.array("premix", layer)[positions], golden["premix"][layer], atol=1e-4)
        np.testing.assert_array_equal(record.array("experts", layer), golden["expert_indices"][layer], err_msg=f"layer {layer}")
        np.testing.assert_allclose(record.array("expert_weights", layer)[positions], golden["expert_weights"][layer], atol=1e-4)
    for number, layer in enumerate(config.index_source_layer_ids):
        np.testing.assert_array_equal(record.array("topk", layer), golden["topk_indices"][number], err_msg=f"layer {layer}")
    blocks = record.array("blocks", config.candidate_source_layer_id)
    np.testing.assert_array_equal(blocks, golden["candidate_blocks"])
    np.testing.assert_allclose(record.array("final_hidden", 0)[positions], golden["final_hidden"], atol=1e-3)
    difference = np.abs(logits[positions] - golden["logits"])
    assert np.median(difference) <= 5e-5
    assert difference.max() <= 2e-3
    np.testing.assert_array_equal(logits.argmax(-1), golden["argmax"])
    np.testing.assert_allclose(logsumexp(logits), golden["logsumexp"], atol=1e-4)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in NAMES for case in cases(name, "cases_fp32_noquant.npz")])
def test_one_shot_differs_from_the_reference(name: str, case: str) -> None:
    check_exact(name, case, None)


@pytest.mark.parametrize("sizes", [7, 64, UNEVEN], ids=["7", "64", "uneven"])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_differ_from_the_reference(name: str, sizes: int | Sequence[int]) -> None:
    for case in cases(name, "cases_fp32_noquant.npz"):
        if case.startswith("seed0"):
            check_exact(name, case, sizes)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_differs_from_the_reference(name: str) -> None:
    for case in ("seed0_len129", "seed0_len17"):
        check_exact(name, case, 1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [1, 2, 7, 64, UNEVEN], ids=["1", "2", "7", "64", "uneven"])
@pytest.mark.parametrize("name", NAMES)
def test_any_chunking_of_any_case_differs_from_the_reference(name: str, sizes: int | Sequence[int]) -> None:
    for case in cases(name, "cases_fp32_noquant.npz"):
        check_exact(name, case, sizes)


def overlap(actual: np.ndarray, expected: np.ndarray) -> tuple[int, int]:
    """How many of the expected selections (-1: none) were made, and how many there are."""
    hits = sum(len(np.intersect1d(mine[mine >= 0], theirs[theirs >= 0])) for mine, theirs in zip(actual, expected, strict=True))
    return hits, int((expected >= 0).sum())


@pytest.mark.parametrize("sizes", [None, 64, UNEVEN], ids=["one-shot", "64", "uneven"])
@pytest.mark.parametrize("name", NAMES)
def test_cache_quantisers_differ_from_the_reference(name: str, sizes: int | Sequence[int] | None) -> None:
    config = load_runner(name, "fp32").config
    errors, steady, hits, selected = [], [], 0, 0
    for case in cases(name, "cases_fp32.npz"):
        golden = case_arrays(name, "cases_fp32.npz", case)
        _, record = run(name, "fp32", golden["input_ids"].tolist(), sizes)
        last = stream_errors(record, golden)[-1]
        errors.append(last)
        steady.append(golden["alt_rel_err"][golden["positions"]] < 1e-4)
        for number, layer in enumerate(config.index_source_layer_ids):
            found, there = overlap(record.array("topk", layer), golden["topk_indices"][number])
            hits, selected = hits + found, selected + there
    error, steadily = np.concatenate(errors), np.concatenate(steady)
    assert steadily.sum() > 10
    assert np.mean(error[steadily] <= 1e-3) >= 0.95
    assert np.median(error) <= 1e-2
    assert np.quantile(error, 0.9) <= 1e-1
    assert hits / selected >= 0.97


@pytest.mark.parametrize("sizes", [None, 64], ids=["one-shot", "64"])
@pytest.mark.parametrize(
    ("name", "last_layer", "agreement", "divergence"), [("tiny-a", 0.15, 0.75, 0.1), ("tiny-b", 0.04, 0.92, 0.01)]
)
def test_bfloat16_drifts_beyond_its_noise(
    name: str, last_layer: float, agreement: float, divergence: float, sizes: int | None
) -> None:
    errors, agree, kl = [], [], []
    for case in cases(name, "cases_bf16.npz"):
        golden = case_arrays(name, "cases_bf16.npz", case)
        logits, record = run(name, "bf16", golden["input_ids"].tolist(), sizes)
        errors.append(stream_errors(record, golden))
        agree.append(logits.argmax(-1) == golden["argmax"])
        positions = golden["positions"]
        expected = golden["logits"] - logsumexp(golden["logits"])[:, None]
        actual = logits[positions] - logsumexp(logits[positions])[:, None]
        kl.append((np.exp(expected) * (expected - actual)).sum(-1))
    error = np.concatenate(errors, axis=1)
    assert np.median(error[0]) <= 8e-3
    assert np.median(error[-1]) <= last_layer
    assert np.concatenate(agree).mean() >= agreement
    assert np.concatenate(kl).mean() <= divergence
