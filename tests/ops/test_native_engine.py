# SPDX-License-Identifier: Apache-2.0
"""The whole network through the library: the golden numbers, the reference's choices, and the same bits in any company."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from native_support import native_library

from cedar.config.engine import EngineConfig
from cedar.engine.memory import ModelSequence
from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.work import DecodeWork, PrefillWork, StepWork, TailWork
from cedar.model.embedded import embedded_model_dir
from cedar.ops import native
from cedar.ops.abi import OPERATIONS
from cedar.text.tokenizer import load_tokenizer
from golden_support import case_arrays, cases, decode, load_runner, open_sequence, prefill, recorded, relative_error, tail

NAMES = ("tiny-a", "tiny-b")
UNEVEN = (5, 1, 2, 33, 1, 1, 16, 3)


def runner_of(name: str, variant: str) -> ModelRunner:
    native_library()
    return load_runner(name, variant, ops="native")


@pytest.mark.parametrize("sizes", [None, UNEVEN], ids=["one-shot", "uneven"])
@pytest.mark.parametrize("name", NAMES)
def test_the_network_differs_from_the_golden_one(name: str, sizes: Sequence[int] | None) -> None:
    runner = runner_of(name, "fp32_noquant")
    for case in cases(name, "cases_fp32_noquant.npz"):
        golden = case_arrays(name, "cases_fp32_noquant.npz", case)
        ids = golden["input_ids"].tolist()
        seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
        try:
            with recorded(runner) as record:
                logits = prefill(runner, seq, ids, sizes)
        finally:
            runner.close(seq)
        assert logits is not None
        positions = golden["positions"]
        for layer, expected in enumerate(golden["streams"]):
            assert relative_error(record.array("streams", layer)[positions], expected).max() <= 1e-4, (case, layer)
        for number, layer in enumerate(runner.config.index_source_layer_ids):
            np.testing.assert_array_equal(record.array("topk", layer), golden["topk_indices"][number], err_msg=f"{case} {layer}")
        blocks = record.array("blocks", runner.config.candidate_source_layer_id)
        np.testing.assert_array_equal(blocks, golden["candidate_blocks"], err_msg=case)
        np.testing.assert_allclose(logits[positions], golden["logits"], atol=2e-3, err_msg=case)
        np.testing.assert_array_equal(logits.argmax(-1), golden["argmax"], err_msg=case)


@functools.cache
def loaded(model: Path, ops: str, dtype: str = "float32") -> ModelRunner:
    native_library()
    return ModelRunner.load(EngineConfig(model=str(model), ops=ops, dtype=dtype, cpu_threads=1, kv_cache_bytes=64 << 20))


def text_like(vocab: int, length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, vocab, length).tolist()  # type: ignore[no-any-return]


def scored(runner: ModelRunner, ids: list[int], sizes: int | Sequence[int] | None) -> np.ndarray:
    """Logits of every position, all rows through all layers."""
    seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
    try:
        logits = prefill(runner, seq, ids, sizes)
    finally:
        runner.close(seq)
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_reference_gives_the_library_what_it_does_not_take(name: str, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """One operation as its reference, its neighbours native: strides and dtypes of what they exchange must fit."""
    ids = text_like(400, 48, 4)
    monkeypatch.setenv(f"CEDAR_OP_{name.upper()}", "reference")
    mixed = loaded.__wrapped__(tiny, "native", "bfloat16")
    monkeypatch.delenv(f"CEDAR_OP_{name.upper()}")
    difference = scored(mixed, ids, None) - scored(loaded(tiny, "native", "bfloat16"), ids, None)
    assert np.abs(difference).mean() < 0.1  # of logits with a deviation of 3; random weights make much of a rounding


def source_text(model: Path) -> list[int]:
    """Python source, of the kind that the embedded model has learnt."""
    return load_tokenizer(model).encode(inspect.getsource(textwrap))[:700]


@pytest.mark.parametrize("trained", [True, False])
def test_teacher_forced_choices_differ_from_the_reference(tiny: Path, trained: bool) -> None:
    model = embedded_model_dir() if trained else tiny
    ids = source_text(model) if trained else text_like(loaded(model, "reference").vocab_size, 700, 1)
    expected, actual = (scored(loaded(model, ops), ids, 256) for ops in ("reference", "native"))
    best, agrees = np.sort(expected, -1), expected.argmax(-1) == actual.argmax(-1)
    assert agrees.mean() >= 0.995
    assert agrees[best[:, -1] - best[:, -2] > 0.5].all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunk_size_changes_a_bit(tiny: Path, dtype: str) -> None:
    runner = loaded(tiny, "native", dtype)
    ids = text_like(runner.vocab_size, 150, 2)
    whole = scored(runner, ids, None)
    for sizes in (1, 7, 64, UNEVEN):
        assert np.array_equal(scored(runner, ids, sizes), whole), sizes


def lives(runner: ModelRunner, prompts: list[list[int]], new: int, mode: DecoderReplay, *, together: bool) -> list[np.ndarray]:
    """Logits [1 + new, vocab] of each sequence, its tail and ``new`` decodes; all in the same steps, or one by one."""
    if not together:
        return [rows for prompt in prompts for rows in lives(runner, [prompt], new, mode, together=True)]
    seqs: list[ModelSequence] = [open_sequence(runner, mode, len(prompt) + new) for prompt in prompts]
    try:
        steps = [
            StepWork(prefills=[PrefillWork(seq, 0, tuple(prompt), True) for seq, prompt in zip(seqs, prompts, strict=True)]),
            StepWork(tails=[TailWork(seq) for seq in seqs]),
        ]
        for n in range(new):
            works = [DecodeWork(seq, len(prompt) + n, prompt[n]) for seq, prompt in zip(seqs, prompts, strict=True)]
            steps.append(StepWork(decodes=works))
        results = [runner.step(step).logits for step in steps]
        got = np.stack([logits.numpy() for logits in results if logits is not None])
    finally:
        for seq in seqs:
            runner.close(seq)
    return [got[:, n] for n in range(len(seqs))]


@pytest.mark.parametrize("mode", list(DecoderReplay))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_changes_a_bit(tiny: Path, dtype: str, mode: DecoderReplay) -> None:
    runner = loaded(tiny, "native", dtype)
    prompts = [text_like(runner.vocab_size, length, length) for length in (70, 9, 31, 16, 100)]
    together = lives(runner, prompts, 8, mode, together=True)
    alone = lives(runner, prompts, 8, mode, together=False)
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one, other)


def test_a_second_thread_changes_a_bit(tiny: Path) -> None:
    """Prompts, tails and decode steps, which repeat passes that were recorded with as many threads."""
    one = loaded(tiny, "native")
    prompts = [text_like(one.vocab_size, length, length) for length in (70, 9, 31)]
    native.set_threads(1)
    alone = lives(one, prompts, 4, DecoderReplay.BOUNDED, together=True)
    try:
        two = ModelRunner.load(
            EngineConfig(model=str(tiny), ops="native", dtype="float32", cpu_threads=2, kv_cache_bytes=64 << 20)
        )
        assert two.operations.startswith("native (cpu: ")
        together = lives(two, prompts, 4, DecoderReplay.BOUNDED, together=True)
    finally:
        native.set_threads(1)
    for one_row, other in zip(alone, together, strict=True):
        assert np.array_equal(one_row, other)


def test_the_tail_after_chunks_differs_from_the_whole_prompt(tiny: Path) -> None:
    runner = loaded(tiny, "native")
    ids = text_like(runner.vocab_size, 120, 3)
    tails = []
    for sizes in (None, 7):
        seq = open_sequence(runner, DecoderReplay.BOUNDED, len(ids))
        prefill(runner, seq, ids, sizes)
        tails.append(tail(runner, seq))
        runner.close(seq)
    assert np.array_equal(*tails)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_pass_differs_from_its_operations(tiny: Path, dtype: str) -> None:
    """Decode steps are repeated passes; the prefill of the same tokens runs its operations one by one. Their logits are one."""
    runner = loaded(tiny, "native", dtype)
    ids = text_like(runner.vocab_size, 90, 4)
    whole = scored(runner, ids, None)
    seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
    try:
        prefill(runner, seq, ids[:10])
        tail(runner, seq)
        for n in range(10, len(ids)):
            assert np.array_equal(decode(runner, seq, ids[n]), whole[n]), n
    finally:
        runner.close(seq)


def test_a_recorded_pass_reads_an_unreserved_page(tiny: Path) -> None:
    runner = loaded(tiny, "native")
    ids = text_like(runner.vocab_size, runner.cache.page_tokens, 5)
    seq = open_sequence(runner, DecoderReplay.BOUNDED, len(ids))
    try:
        prefill(runner, seq, ids)
        tail(runner, seq)
        with pytest.raises(RuntimeError, match="is not reserved"):
            runner.step(StepWork(decodes=[DecodeWork(seq, len(ids), 7)]))
        assert runner.reserve(seq, len(ids) + 1)
        runner.step(StepWork(decodes=[DecodeWork(seq, len(ids), 7)]))
    finally:
        runner.close(seq)
