# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding against the golden sequences: prefill in chunks, then one token per step through all layers."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from cedar.engine.request import DecoderReplay
from golden_support import GOLDEN, VARIANTS, case_arrays, decode, golden_arrays, load_runner, open_sequence, prefill, tail


@pytest.mark.parametrize(
    ("size", "mode"),
    [(None, DecoderReplay.OFF), (7, DecoderReplay.OFF), (64, DecoderReplay.EXACT)],
    ids=["one-shot", "7", "exact"],
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_greedy_tokens_differ_from_the_reference(name: str, variant: str, size: int | None, mode: DecoderReplay) -> None:
    known = Tokenizer.from_file(str(GOLDEN / name / "checkpoint" / "tokenizer.json")).get_vocab_size()
    prompts = sorted({key.split("/")[1] for key in golden_arrays(name, "greedy.npz") if key.startswith(f"{variant}/")})
    compared = sum(compare(name, variant, prompt, size, mode, known) for prompt in prompts)
    assert compared == 16 * len(prompts) if variant == "fp32_noquant" else compared > 4


def compare(name: str, variant: str, prompt: str, size: int | None, mode: DecoderReplay, known: int) -> int:
    """Follow the golden tokens; with quantisers only choices with a margin of 1 are sure, one flipped rounding moves the rest.

    The reference never chooses an id that the tokenizer does not have. Returns the number of choices compared.
    """
    golden = case_arrays(name, "greedy.npz", f"{variant}/{prompt}")
    runner = load_runner(name, variant)
    ids, new_ids = golden["prompt_ids"].tolist(), golden["new_ids"].tolist()
    seq = open_sequence(runner, mode, len(ids))
    compared = 0
    try:
        prefill(runner, seq, ids, size)
        logits = tail(runner, seq)[:known]
        for step, token in enumerate(new_ids):
            if variant == "fp32_noquant" or golden["top1_margin"][step] >= 1:
                assert int(logits.argmax()) == token, f"{prompt}: step {step}"
                compared += 1
            if variant == "fp32_noquant":
                logprob = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                assert abs(logprob - golden["logprob"][step]) < 1e-3, f"{prompt}: step {step}"
            logits = decode(runner, seq, token)[:known]
        return compared
    finally:
        runner.close(seq)
