# SPDX-License-Identifier: Apache-2.0
"""What a prefix hit may not change: nothing at all without replay; with it, only what a bounded replay of the hit changes.

Exact variant (float32, no cache quantisers) unless a test says otherwise. A sequence's logits are compared with those of a cold
run of its own tokens, its prompt in one chunk, on another runner.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from prefix_support import (
    MODES,
    PAGE,
    Lab,
    assert_equal_to_cold,
    kept_rows,
    make_lab,
    name_of,
    settings,
    spoil_unused,
    text,
    tight_runner,
)

from cedar.engine.hits import SNAPSHOT_TOKENS
from cedar.engine.request import DecoderReplay

NAMES = ["tiny-a", "tiny-b"]
DECODERS = list(DecoderReplay)


def zip_modes() -> list[tuple[str, DecoderReplay]]:
    """Each mode once, and both checkpoints."""
    return list(zip(itertools.cycle(NAMES), DECODERS, strict=False))


def aligned(length: int) -> int:
    return length // PAGE * PAGE


def snapshot_hit(name: str, mode: DecoderReplay, first: int, common: int, second: int) -> int:
    """Where a prompt of ``second`` tokens continues that has ``common`` with one of ``first``, of the same mode."""
    kept = kept_rows(name, mode)
    positions = {*range(SNAPSHOT_TOKENS, first + 1, SNAPSHOT_TOKENS), aligned(first - 1), aligned(max(0, first - kept))}
    usable = [position for position in positions if position <= min(aligned(common), second - kept)]
    return max(usable, default=0)


@st.composite
def hits(draw: st.DrawFn) -> tuple[str, DecoderReplay, int, int, int, int]:
    """Checkpoint, decoder replay, tokens of the first prompt, of these the second has, tokens of its own, token budget."""
    name = draw(st.sampled_from(NAMES))
    first = draw(st.one_of(st.integers(1, 420), st.sampled_from([16, 17, 32, 33, 255, 256, 257, 272, 273])))
    common = draw(st.one_of(st.integers(0, first), st.just(first)))
    own = draw(st.integers(0 if common else 1, 150))
    return name, draw(st.sampled_from(DECODERS)), first, common, own, draw(st.sampled_from([3, 16, 50, 128, 512]))


@hypothesis_settings(max_examples=12, derandomize=True, database=None)
@given(hits())
def test_a_hit_changes_the_result_without_encoder_replay(case: tuple[str, DecoderReplay, int, int, int, int]) -> None:
    name, mode, first, common, own, budget = case
    lab = make_lab(settings(name, decoder_replay=mode.value, max_num_batched_tokens=budget))
    shared, fresh = text(1, first), text(2, own)
    lab.ask(shared, max_tokens=1)
    spoil_unused(lab.watched)
    answer = lab.ask(shared[:common] + fresh, max_tokens=3)
    assert (answer.cached, answer.replayed) == (snapshot_hit(name, mode, first, common, common + own), 0)
    assert assert_equal_to_cold(name, answer.ids, answer.passes) == 3
    lab.assert_empty()


def family(seed: int, count: int, longest: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths: each branches off from one that came before."""
    draw = random.Random(seed)
    prompts = [text(1000 * seed, draw.randrange(1, longest))]
    for number in range(1, count):
        base = draw.choice(prompts)
        kept = draw.choice([0, len(base), aligned(len(base)), draw.randrange(len(base) + 1)])
        prompts.append(base[:kept] + text(1000 * seed + number, draw.randrange(1, 90)))
    return prompts


def run_mix(lab: Lab, seed: int, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts that come in random steps, some twice, with outputs of random lengths. Returns the ids of each in the end."""
    draw = random.Random(seed)
    waiting = [*prompts, *draw.sample(prompts, len(prompts) // 3)]
    known = []
    while waiting or lab.engine.num_live:
        while waiting and draw.random() < 0.4:
            handle = lab.add(waiting.pop(0), max_tokens=draw.choice([1, 9, 30]), priority=draw.choice([0, 0, 1]))
            known.append(lab.ids(handle))
        for update in lab.step():
            if update.ready:
                lab.engine.attach(update.handle)
    lab.assert_empty()
    return known


MIXES = {"tiny-a": (34, 12, 200), "tiny-b": (50, 9, 450)}
"""Pages of the pool, prompts, tokens of the longest first one: so that there are hits and preemptions."""


def mixed(name: str, seed: int, decoder: DecoderReplay) -> Lab:
    """Run a mix in a small pool and compare every pass: a preempted sequence is a new prompt for the decoder half."""
    pages, count, longest = MIXES[name]
    config = settings(name, decoder_replay=decoder.value, max_num_seqs=6, max_num_batched_tokens=70)
    lab = make_lab(config, tight_runner(name, pages=pages, slots=16))
    known = run_mix(lab, seed, family(seed, count, longest))
    assert sum(assert_equal_to_cold(name, ids, lab.watched.passes[id(ids)]) for ids in known) > 60
    return lab


@pytest.mark.parametrize(("name", "decoder"), [("tiny-a", DecoderReplay.OFF), ("tiny-b", DecoderReplay.EXACT)])
def test_a_mix_of_hits_chunks_preemptions_and_batches_changes_a_result(name: str, decoder: DecoderReplay) -> None:
    lab = mixed(name, 2, decoder)
    assert lab.counts.counters["prefix_cache_hits_total"] > 200
    assert lab.counts.counters["preemptions_total"] > 0
    if name == "tiny-a":
        assert any(one.hit for passes in lab.watched.passes.values() for one in passes[1:]), "a preempted one began from 0"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", NAMES)
def test_another_mix_changes_a_result(name: str, decoder: DecoderReplay, seed: int) -> None:
    mixed(name, seed, decoder)


@pytest.mark.parametrize("name", ["tiny-a", pytest.param("tiny-b", marks=pytest.mark.slow)])
def test_requests_of_all_modes_disturb_each_other(name: str) -> None:
    """All six combinations over the same beginnings in one engine; those with encoder replay off are as if alone."""
    lab = make_lab(settings(name, max_num_batched_tokens=90))
    prompts = family(7, 6, 400)
    known = []
    for prompt in prompts:
        for encoder, decoder in MODES:
            handle = lab.add(prompt, max_tokens=3, encoder_replay=encoder, decoder_replay=decoder)
            known.append((lab.ids(handle), encoder))
        lab.step()
    lab.run()
    lab.assert_empty()
    hits = {"off": 0, "bounded": 0}
    for ids, encoder in known:
        passes = lab.watched.passes[id(ids)]
        hits[encoder] += passes[-1].hit
        if encoder == "off":
            assert_equal_to_cold(name, ids, passes)
    assert min(hits.values()) > 0


@pytest.mark.parametrize(("name", "decoder"), zip_modes())
def test_a_snapshot_in_packed_records_is_not_the_state_it_was_taken_from(name: str, decoder: DecoderReplay) -> None:
    """Chunks that end where snapshots are: the steps after a hit are then those of a cold run, to the bit."""
    config = settings(name, fake_quant=True, decoder_replay=decoder.value, max_num_batched_tokens=64)
    lab = make_lab(config)
    prompt, other = text(3, 520), text(4, 150)
    lab.ask(prompt, max_tokens=1)
    spoil_unused(lab.watched)
    found = lab.ask(prompt[:512] + other, max_tokens=6)
    cold = make_lab(config).ask(prompt[:512] + other, max_tokens=6)
    assert (found.cached, cold.cached) == (snapshot_hit(name, decoder, 520, 512, 662), 0)
    assert found.cached % 64 == 0 < found.cached
    assert found.tokens == cold.tokens
    for position, logits in cold.passes[-1].logits.items():
        np.testing.assert_array_equal(found.passes[-1].logits[position], logits)


@pytest.mark.parametrize(("name", "decoder"), zip_modes())
def test_what_decodes_leave_behind_is_found_wrong(name: str, decoder: DecoderReplay) -> None:
    """Pages and snapshots that decode steps fill are as good as those of a prompt."""
    lab = make_lab(settings(name, decoder_replay=decoder.value))
    first = lab.ask(text(5, 250), max_tokens=12)
    answer = lab.ask(first.ids[:-1] + text(6, kept_rows(name, decoder)), max_tokens=3)
    assert answer.cached == SNAPSHOT_TOKENS
    assert_equal_to_cold(name, answer.ids, answer.passes)


def test_the_checkpoints_have_other_windows() -> None:
    """The numbers of this file are chosen for one window below and one above the length of short prompts."""
    assert [make_lab(settings(name)).watched.config.sliding_window for name in NAMES] == [16, 128]
    assert [name_of(settings(name).model) for name in NAMES] == NAMES
