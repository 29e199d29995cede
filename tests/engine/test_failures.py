# SPDX-License-Identifier: Apache-2.0
"""Failures that other engines of this architecture were reported to have, as scenarios; each test carries its number.

F1   test_f01_stale_ring_after_prefix_reuse
F2   no host cache. Snapshots: test_prefix_equivalence.test_a_hit_changes_the_result_without_encoder_replay
F3   test_f03_a_step_writes_where_others_read, test_f03_nan_in_one_sequence_spreads
F4   no transfer between engines
F5   no transfer between engines
F6   test_f06_prompt_of_as_many_rows_as_a_decode (no drafts)
F7   test_f07_prompt_logprobs_of_a_trimmed_prompt; test_bounded_replay.test_prompt_logprobs_come_from_a_hit (no drafts, no graphs)
F8   test_f08_second_identical_request_kills_the_engine; test_bounded_replay.test_a_hit_covers_the_whole_prompt
F9   test_f09_eviction_of_a_tail_loses_the_windows_before_it
F10  test_f10_admission_counts_what_is_shared; test_prefix_sharing.test_a_hit_needs_memory_for_what_others_hold
F11  no graphs. Rows that see no entry at all: test_f26_short_prompts_and_window_edges
F12  no padded rows and no graphs. Masked indices: test_runner.test_a_page_shows_its_last_owner
F13  test_f13_short_requests_in_a_row_hang_the_long_one
F14  test_f14_decode_past_the_window_reads_reused_memory
F15  test_f15_client_leaves_in_the_middle_of_a_replay; test_prefix_sharing.test_a_leader_that_goes_leaves_its_followers_waiting
F16  test_f16_two_conversations_evict_each_other
F17  no drafts
F18  test_detokenizer.test_stream_cut_anyhow_equals_the_whole_text; test_parse.test_block_that_breaks_off_keeps_whole_calls_only
F19  no grammars and no drafts
F20  test_chat.test_prompt_is_exactly
F21  needs the release's weights. Long prompts in two ways: test_layer_work.test_exact_differs_from_off_on_the_releases_schedule
F22  test_checkpoint.test_a_defect_is_named
F23  test_f23_nan_of_a_batch_mate; test_f03_nan_in_one_sequence_spreads
F24  one engine, no idle ranks
F25  test_bounded_replay.test_a_budget_around_the_window_changes_a_replay; test_f25_hits_around_the_window_of_any_parity
F26  test_f26_short_prompts_and_window_edges, test_f26_empty_prompt_is_served
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from prefix_support import (
    MODES,
    PAGE,
    Lab,
    all_pages,
    all_rings,
    ask,
    assert_equal_to_cold,
    make_lab,
    reference,
    same_bytes,
    settings,
    spoil,
    spoil_unused,
    text,
    tight_runner,
)
from pydantic import ValidationError

from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason
from golden_support import load_runner, open_sequence, prefill, tail

DECODERS = list(DecoderReplay)


def lab_of(encoder: str, decoder: str, name: str = "tiny-a", **changes: object) -> Lab:
    return make_lab(settings(name, encoder_replay=encoder, decoder_replay=decoder, **changes))


def test_the_table_is_out_of_date() -> None:
    """Every number has a line, and every test that a line names exists."""
    lines = [line for line in (__doc__ or "").splitlines() if re.match(r"F\d", line)]
    assert [int(line.split()[0][1:]) for line in lines] == list(range(1, 27))
    tests = Path(__file__).parents[1]
    for module, name in re.findall(r"(?:(test_\w+)\.)?(test_\w+)", "\n".join(lines)):
        (path,) = tests.glob(f"*/{module}.py") if module else [Path(__file__)]
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path.name}: {name}"
    own = {name for name in globals() if re.match(r"test_f\d", name)}
    assert all(name in (__doc__ or "") for name in own)


@pytest.mark.parametrize(
    ("encoder", "decoder", "packed"), [*((*mode, True) for mode in MODES), (*MODES[0], False), (*MODES[5], False)]
)
def test_f01_stale_ring_after_prefix_reuse(encoder: EncoderReplay, decoder: DecoderReplay, packed: bool) -> None:
    """Two requests share a prefix, and the second gets a slot that is full of NaN."""
    outcome = []
    for dirty in (False, True):
        lab = lab_of(encoder, decoder, fake_quant=packed)
        lab.ask(text(1, 300), max_tokens=1)
        if dirty:
            spoil_unused(lab.watched)
        answer = lab.ask(text(1, 300) + text(2, 61), max_tokens=3)
        assert answer.cached == 288
        outcome.append(np.stack(list(answer.passes[0].logits.values())))
    assert np.isfinite(outcome[1]).all()
    np.testing.assert_array_equal(outcome[1], outcome[0])


@pytest.mark.parametrize(("encoder", "decoder"), MODES[::2])
def test_f03_a_step_writes_where_others_read(encoder: EncoderReplay, decoder: DecoderReplay) -> None:
    """Canaries: a request with a hit changes its own slot, its own pages and new snapshots, and not a byte of anything else."""
    lab = lab_of(encoder, decoder, max_num_batched_tokens=50)
    lab.ask(text(1, 300), max_tokens=1)
    cache = lab.watched.cache
    other = lab.add(text(1, 280) + text(2, 60), max_tokens=2)
    lab.until(lambda: other in lab.ready)
    before = [memory.clone() for memory in (*all_pages(lab.watched), *all_rings(lab.watched))]
    pages, snapshots = set(cache._pages._names), dict(cache._slots._snapshots)
    handle = lab.start(text(1, 300) + text(3, 61), max_tokens=5)
    lab.until(lambda: len(lab.tokens.get(handle, [])) == 2)
    mine, theirs = (lab.engine._live[each].seq.memory.blocks for each in (handle, other))
    pages |= set(theirs.pages)
    slots = [
        theirs.slot,
        *(snapshot.slot for digest, snapshot in snapshots.items() if cache._slots._snapshots.get(digest) is snapshot),
    ]
    assert len(set(mine.pages) & pages) >= 16
    assert mine.slot not in slots
    count = len(all_pages(lab.watched))
    for number, (memory, old) in enumerate(zip((*all_pages(lab.watched), *all_rings(lab.watched)), before, strict=True)):
        rows = [0, *(sorted(pages) if number < count else slots)]
        assert same_bytes(memory[rows], old[rows])
    lab.engine.abort(handle=handle)
    lab.engine.abort(handle=other)
    lab.run()
    lab.assert_empty()


@pytest.mark.parametrize("decoder", DECODERS)
def test_f03_nan_in_one_sequence_spreads(decoder: DecoderReplay) -> None:
    """It ends alone, with an error that names it; its batch-mates are right; and what it left is found by nobody."""
    lab = lab_of("bounded", decoder)
    prompts = [text(1, 100), text(2, 90), text(1, 80) + text(3, 30)]
    handles = [lab.add(prompt, max_tokens=30) for prompt in prompts]
    known = [lab.ids(handle) for handle in handles]
    lab.until(
        lambda: [lab.engine.attach(handle) for handle in lab.ready] and all(len(lab.tokens.get(h, [])) > 2 for h in handles)
    )
    ill = lab.engine._live[handles[0]].seq.memory.blocks
    for memory in all_rings(lab.watched):
        spoil(memory, [ill.slot])
    lab.run()
    ends = [lab.ends[handle] for handle in handles]
    assert [end.finish_reason for end in ends] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert "request_key r1: its logits are not finite" in ends[0].error.message
    for ids in known[1:]:
        assert_equal_to_cold("tiny-a", ids, lab.watched.passes[id(ids)], replayed=True)
    again = lab.ask(known[0], max_tokens=3)
    assert again.cached == 0
    assert_equal_to_cold("tiny-a", again.ids, again.passes)
    lab.assert_empty()


@pytest.mark.parametrize("decoder", DECODERS)
def test_f06_prompt_of_as_many_rows_as_a_decode(decoder: DecoderReplay) -> None:
    """Prompts, last chunks and replays of one row beside decodes: what a step does is decided by state, not by shape."""
    lab = lab_of("bounded", decoder, max_num_batched_tokens=33)
    decoding = [lab.start(text(seed, 20), max_tokens=12) for seed in range(3)]
    known = [lab.ids(handle) for handle in decoding]
    lab.until(lambda: len(lab.tokens.get(decoding[2], [])) > 1)
    for prompt in ([7], [0], text(5, 2), text(6, 34), text(7, 67)):
        known.append(lab.ids(lab.start(prompt, max_tokens=2)))
        lab.step()
    lab.run()
    lab.assert_empty()
    assert all(update.finish_reason is FinishReason.LENGTH for update in lab.ends.values())
    for ids in known:
        assert_equal_to_cold("tiny-a", ids, lab.watched.passes[id(ids)])


@pytest.mark.parametrize("length", [200, 201, 512])
def test_f07_prompt_logprobs_of_a_trimmed_prompt(length: int) -> None:
    """Twice, beside prompts that are trimmed: every row of it goes through every layer, both times."""
    lab = lab_of("bounded", "bounded", max_num_batched_tokens=190)
    prompt = text(1, length)
    expected = reference("tiny-a", prompt, 1, DecoderReplay.OFF)[:, : lab.engine._facts.num_valid_ids]
    logprob = torch.from_numpy(expected).log_softmax(-1)[torch.arange(length - 1), torch.tensor(prompt[1:])]
    for _ in range(2):
        handle = lab.add(prompt, max_tokens=2, prompt_logprobs=0)
        lab.add(prompt, max_tokens=2)
        lab.add(text(2, 150), max_tokens=2)
        lab.run()
        found = [record.logprob for update in lab.updates if update.handle == handle for record in update.prompt_logprobs]
        np.testing.assert_allclose(found[1:], logprob, atol=2e-3)
        assert lab.ends[handle].cached_tokens == 0


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("encoder", "decoder"), MODES)
def test_f08_second_identical_request_kills_the_engine(encoder: EncoderReplay, decoder: DecoderReplay, extra: int) -> None:
    """A prompt that ends at a page, or one token behind, sent three times for one token; then something else."""
    lab = lab_of(encoder, decoder)
    prompt = text(1, 20 * PAGE + extra)
    answers = [lab.ask(prompt, max_tokens=1) for _ in range(3)]
    assert answers[1].tokens == answers[2].tokens
    assert answers[0].cached == 0 < answers[1].cached == answers[2].cached < len(prompt)
    if encoder is EncoderReplay.OFF:
        assert answers[0].tokens == answers[1].tokens
    other = lab.ask(text(2, 40), max_tokens=3)
    assert_equal_to_cold("tiny-a", other.ids, other.passes)
    lab.assert_empty()


@pytest.mark.parametrize("length", [255, 256, 273, 528])
def test_f09_eviction_of_a_tail_loses_the_windows_before_it(length: int) -> None:
    """Encoder replay off: as pages go, last ones first, hits fall back to the last snapshot that still has its pages."""
    lab = make_lab(settings(decoder_replay="bounded"), tight_runner("tiny-a", pages=60, slots=12))
    prompt = text(1, length)
    kept = length // PAGE
    snapshots = {256 // PAGE * n for n in range(1, length // 256 + 1)} | {(length - 1) // PAGE, (length - 16) // PAGE}
    for taken in (1, 2, kept // 2):
        lab.engine.clear_cache()
        lab.ask(prompt, max_tokens=1)
        handle = lab.add(text(50 + taken, (60 - kept + taken) * PAGE - 1), max_tokens=1)
        lab.until(lambda handle=handle: handle in lab.ready)
        lab.engine.abort(handle=handle)
        left = kept - taken
        hit = max((page for page in snapshots if page <= min(left, (length + 20 - 16) // PAGE)), default=0)
        answer = lab.ask(prompt + text(2, 20), max_tokens=1)
        assert answer.cached == hit * PAGE, f"{taken} of {kept} pages taken"
        assert_equal_to_cold("tiny-a", answer.ids, answer.passes)
    lab.assert_empty()


@pytest.mark.parametrize("encoder", ["bounded", "off"])
def test_f10_admission_counts_what_is_shared(encoder: str) -> None:
    """A pool for one long prompt and a little: five sequences that share it run at once; with 16 pages more each, none would."""
    config = settings(encoder_replay=encoder, decoder_replay="bounded", max_num_batched_tokens=200)
    lab = make_lab(config, tight_runner("tiny-a", pages=16 + 5 * 2, slots=8))
    lab.ask(text(1, 256) + text(9, 20), max_tokens=1)
    handles = [lab.add(text(1, 256) + text(seed, 25), max_tokens=4) for seed in range(10, 15)]
    lab.step()
    assert lab.watched.usage().sequences == 5
    assert lab.watched.usage().pages_used == 16 + 5 * 2
    lab.run()
    assert all(lab.ends[handle].cached_tokens == 256 for handle in handles)
    assert "preemptions_total" not in lab.counts.counters
    lab.assert_empty()


@pytest.mark.parametrize(("encoder", "decoder"), MODES[::5])
def test_f13_short_requests_in_a_row_hang_the_long_one(encoder: EncoderReplay, decoder: DecoderReplay) -> None:
    lab = make_lab(
        settings(encoder_replay=encoder.value, decoder_replay=decoder.value, max_num_batched_tokens=64),
        tight_runner("tiny-a", pages=60, slots=4),
    )
    known = lab.ids(lab.start(text(1, 800), max_tokens=2))
    for seed in range(20):
        handle = lab.start(text(100 + seed % 7, 6), max_tokens=2)
        lab.until(lambda handle=handle: handle in lab.ends, limit=40)
    lab.run(limit=100)
    assert len(lab.ends) == 21
    assert {end.finish_reason for end in lab.ends.values()} == {FinishReason.LENGTH}
    assert_equal_to_cold("tiny-a", known, lab.watched.passes[id(known)])
    lab.assert_empty()


@pytest.mark.parametrize("decoder", DECODERS)
def test_f14_decode_past_the_window_reads_reused_memory(decoder: DecoderReplay) -> None:
    """No prefix cache. Three windows of decodes, and before each step all memory that nobody holds is NaN."""
    lab = make_lab(settings(decoder_replay=decoder.value), tight_runner("tiny-a", pages=20, slots=5, prefix_cache=False))
    others = [lab.add(text(seed, 40), max_tokens=seed) for seed in (2, 9, 20)]
    handle = lab.add(text(1, 10), max_tokens=52)
    known = lab.ids(handle)
    while lab.engine.num_live:
        spoil_unused(lab.watched)
        for update in lab.step():
            if update.ready:
                lab.engine.attach(update.handle)
    assert {lab.ends[each].finish_reason for each in (handle, *others)} == {FinishReason.LENGTH}
    assert_equal_to_cold("tiny-a", known, lab.watched.passes[id(known)])
    lab.assert_empty()


@pytest.mark.parametrize("decoder", [DecoderReplay.BOUNDED, DecoderReplay.OFF])
def test_f15_client_leaves_in_the_middle_of_a_replay(decoder: DecoderReplay) -> None:
    """After each step of replay, suffix and decode; later commands for it change nothing; and the cache is as it was."""
    lab = lab_of("bounded", decoder, name="tiny-b", max_num_batched_tokens=40)
    prompt = text(1, 256)
    lab.ask(prompt, max_tokens=1)
    expected = None
    for steps in (0, 1, 3, 4, 6):
        handle = lab.start(prompt + text(2, 30), max_tokens=5)
        for _ in range(steps):
            lab.step()
        assert lab.engine.abort(handle=handle)
        assert not lab.engine.abort(handle=handle)
        assert not lab.engine.attach(handle)
        lab.step()
        assert lab.watched.usage().bytes_used == 0
        answer = lab.ask(prompt + text(3, 15), max_tokens=1)
        assert answer.cached == 256
        expected = expected or answer.tokens
        assert answer.tokens == expected
    assert_equal_to_cold("tiny-b", answer.ids, answer.passes, replayed=True)
    lab.assert_empty()


@pytest.mark.parametrize("encoder", ["bounded", "off"])
def test_f16_two_conversations_evict_each_other(encoder: str) -> None:
    """Three turns each, in turns, in a pool that holds both: each turn finds as much as if it were the only conversation."""

    def run(speakers: list[int]) -> list[list[int]]:
        lab = make_lab(
            settings(encoder_replay=encoder, decoder_replay="bounded", max_num_batched_tokens=256),
            tight_runner("tiny-a", pages=90, slots=12),
        )
        history = {speaker: text(speaker, 400) for speaker in speakers}
        found: dict[int, list[int]] = {speaker: [] for speaker in speakers}
        for turn in range(3):
            for speaker in speakers:
                answer = lab.ask(history[speaker], max_tokens=10)
                found[speaker].append(answer.cached)
                history[speaker] = answer.ids + text(10 * speaker + turn, 60)
        lab.assert_empty()
        return list(found.values())

    (alone,) = run([1])
    assert run([1, 2]) == [alone, alone]
    assert alone[1] >= 400 - PAGE
    assert alone[2] >= 460 - PAGE


@pytest.mark.parametrize("mode", DECODERS)
def test_f23_nan_of_a_batch_mate(mode: DecoderReplay) -> None:
    """Rows of NaN first, last and in the middle of a batch of prompts: to the others they are not there."""
    runner = load_runner("tiny-a", "fp32")
    outcome = []
    for dirty in (False, True):
        seqs = [open_sequence(runner, mode, 60) for _ in range(5)]
        for number, seq in enumerate(seqs):
            prefill(runner, seq, text(number, 20), last=False)
            if dirty and number % 2 == 0:
                for memory in all_rings(runner):
                    spoil(memory, [seq.blocks.slot])
        for number, seq in enumerate(seqs):
            prefill(runner, seq, text(number, 20) + text(number + 10, 20), 20)
        outcome.append([tail(runner, seq) for seq in seqs])
        for seq in seqs:
            runner.close(seq)
    np.testing.assert_array_equal(outcome[0][1::2], outcome[1][1::2])
    assert np.isnan(outcome[1][::2]).any(axis=1).all()


@pytest.mark.parametrize("hit", [128, 129, 160])
def test_f25_hits_around_the_window_of_any_parity(hit: int) -> None:
    """A prefix of any length, as another engine could hand one over: at most W is dropped, else W rows are run again."""
    runner = load_runner("tiny-b", "fp32_noquant")
    ids = text(1, 300)
    rows = []
    for size in (None, 64, 129):
        seq = open_sequence(runner, DecoderReplay.OFF, 300)
        prefill(runner, seq, ids[:hit], last=False)
        assert runner.begin_replay(seq, hit, ids[:hit]) == (hit - 128 if hit > 128 else 0)
        computed = prefill(runner, seq, ids, size)
        assert computed is not None
        rows.append(computed[-20:])
        runner.close(seq)
    for other in rows[1:]:
        np.testing.assert_allclose(other, rows[0], atol=1e-4)
    cold = reference("tiny-b", ids, 281, DecoderReplay.OFF)
    assert (np.abs(rows[0] - cold).max() < 1e-4) == (hit <= 128)


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_f26_short_prompts_and_window_edges(name: str) -> None:
    """1 token, the token that begins a text, W … 2 W: served, twice; replay shows in none that the window covers."""
    window = load_runner(name, "fp32_noquant").config.sliding_window
    for prompt in ([5], [0], text(1, 2), *(text(2, length) for length in (window, window + 1, 2 * window))):
        answers = []
        for encoder, decoder in (("off", "off"), ("bounded", "bounded")):
            lab = lab_of(encoder, decoder, name)
            answers += [lab.ask(prompt, max_tokens=3) for _ in range(2)]
            lab.assert_empty()
        cold = [np.stack(list(answer.passes[0].logits.values())) for answer in answers]
        for answer, logits in zip(answers, cold, strict=True):
            if len(prompt) <= window:
                assert answer.replayed == 0
                np.testing.assert_allclose(logits, cold[0], atol=1e-4)
        assert answers[0].tokens == answers[1].tokens


def test_f26_empty_prompt_is_served() -> None:
    with pytest.raises(ValidationError, match="input_ids"):
        ask("r", [])
