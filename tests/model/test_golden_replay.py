# SPDX-License-Identifier: Apache-2.0
"""Bounded replay against its own golden sets: encoder side, decoder side, both, and eight tokens decoded after each."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from tokenizers import Tokenizer

from cedar.engine.request import DecoderReplay
from golden_support import GOLDEN, case_arrays, cases, decode, load_runner, open_sequence, prefill, tail

FORMS = {
    "exact": (False, DecoderReplay.OFF),
    "enc": (True, DecoderReplay.OFF),
    "dec_after_source": (False, DecoderReplay.BOUNDED),
    "enc_dec_after_source": (True, DecoderReplay.BOUNDED),
}
"""Form: is there a prefix hit, and the decoder mode."""


@dataclass
class Outcome:
    """first: the first position computed to the end. logits: float32 from there on. decoded: of each decoded token."""

    first: int
    logits: np.ndarray
    decoded: np.ndarray


def run(name: str, variant: str, case: str, form: str, size: int | None) -> Outcome:
    golden = case_arrays(name, f"replay_{variant}.npz", case)
    hit, mode = FORMS[form]
    ids, new_ids = golden["input_ids"].tolist(), golden[f"{form}/decode_ids"].tolist()
    prefix = int(case.split("_H")[1])
    runner = load_runner(name, variant)
    seq = open_sequence(runner, mode, len(ids) + len(new_ids))
    try:
        first = 0
        if hit:
            prefill(runner, seq, ids[:prefix], 50, last=False)
            first = runner.begin_replay(seq, prefix, ids[:prefix])
        logits = prefill(runner, seq, ids, size)
        if mode is DecoderReplay.OFF:
            tail(runner, seq)
        else:
            first, kept = runner.kept_logits(seq)
            logits = kept.numpy()
        assert logits is not None
        return Outcome(first, logits, np.stack([decode(runner, seq, token) for token in new_ids]))
    finally:
        runner.close(seq)


@pytest.mark.parametrize("size", [None, 7, 64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_replay_differs_from_the_reference(name: str, form: str, size: int | None) -> None:
    for case in cases(name, "replay_fp32_noquant.npz"):
        check_exact(name, case, form, size)


@pytest.mark.parametrize("form", FORMS)
def test_replay_token_by_token_differs_from_the_reference(form: str) -> None:
    check_exact("tiny-a", "S24_H8", form, 1)
    check_exact("tiny-a", "S200_H150", form, 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 128])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_replay_in_any_chunking_differs_from_the_reference(name: str, form: str, size: int) -> None:
    for case in cases(name, "replay_fp32_noquant.npz"):
        check_exact(name, case, form, size)


def expected(name: str, variant: str, case: str, form: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{form}/"): value for key, value in case_arrays(name, f"replay_{variant}.npz", case).items()}


def choices(name: str, outcome: Outcome) -> np.ndarray:
    """The row from which each decoded token is chosen, without the ids that the tokenizer does not have."""
    known = Tokenizer.from_file(str(GOLDEN / name / "checkpoint" / "tokenizer.json")).get_vocab_size()
    return np.concatenate([outcome.logits[-1:], outcome.decoded[:-1]])[:, :known].argmax(-1)


def check_exact(name: str, case: str, form: str, size: int | None) -> None:
    golden = expected(name, "fp32_noquant", case, form)
    outcome = run(name, "fp32_noquant", case, form, size)
    assert outcome.first == golden.get("positions", np.zeros(1))[0], case
    assert np.abs(outcome.logits[-2:] - golden["logits_last2"]).max() <= 2e-3, case
    np.testing.assert_array_equal(outcome.logits.argmax(-1), golden["argmax"], err_msg=case)
    assert np.abs(outcome.decoded - golden["decode_logits"]).max() <= 2e-3, case
    np.testing.assert_array_equal(choices(name, outcome), golden["decode_ids"], err_msg=case)


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_replay_drifts_beyond_its_noise(form: str, size: int | None) -> None:
    """A rounding that falls the other way moves what follows; the decode steps that the reference found steady must agree."""
    noise = json.loads((GOLDEN / "tiny-a" / "noise.json").read_text())["replay"]["fp32"]
    agree, drift, steps = [], [], 0
    for case in cases("tiny-a", "replay_fp32.npz"):
        golden = expected("tiny-a", "fp32", case, form)
        outcome = run("tiny-a", "fp32", case, form, size)
        agree.append(outcome.logits.argmax(-1) == golden["argmax"])
        drift.append(np.abs(np.log(np.exp(outcome.logits.astype(np.float64)).sum(-1)) - golden["logsumexp"]))
        sure = golden["decode_top1_margin"] >= 1
        np.testing.assert_array_equal(choices("tiny-a", outcome)[sure], golden["decode_ids"][sure], err_msg=case)
        steady = np.array(noise.get(f"{case}/{form}", {}).get("decode_alt_abs", [1.0] * 8)) < 1e-4
        assert np.abs(outcome.decoded - golden["decode_logits"])[steady].max(initial=0) <= 2e-3, case
        steps += int(steady.sum())
    assert np.concatenate(agree).mean() >= 0.85
    assert np.median(np.concatenate(drift)) <= 1e-2
    assert np.quantile(np.concatenate(drift), 0.9) <= 1e-1
    assert steps >= 8 or form == "exact"
