# SPDX-License-Identifier: Apache-2.0
"""Encoder-side bounded replay through the engine: what is found, what is run again, and who may use the result.

A hit must give what `ModelRunner.begin_replay` gives after an exact prefix, which the golden sets cover. tiny-a: W = 16;
tiny-b: W = 128.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefix_support import (
    MODES,
    PAGE,
    TOLERANCE,
    Lab,
    all_pages,
    assert_equal_to_cold,
    make_lab,
    reference,
    settings,
    spoil,
    spoil_unused,
    text,
    tight_runner,
)

from cedar.cache.prefix import TokenChain
from cedar.engine.request import DecoderReplay, EncoderReplay

DECODERS = list(DecoderReplay)
WINDOWS = {"tiny-a": 16, "tiny-b": 128}


def bounded(name: str = "tiny-a", **changes: object) -> Lab:
    return make_lab(settings(name, **{"encoder_replay": "bounded", "decoder_replay": "bounded", **changes}))


def known_pages(lab: Lab, ids: list[int], *, exact: bool) -> list[int]:
    """Pages that a prompt could find."""
    return lab.watched.cache.match(TokenChain(ids, "", PAGE), len(ids), exact=exact)


def published(lab: Lab, pages: list[int]) -> list[torch.Tensor]:
    return [memory[pages].clone() for memory in all_pages(lab.watched)]


@pytest.mark.parametrize(
    ("budget", "decoder"),
    [(1, "bounded"), (64, "exact"), (127, "off"), (128, "bounded"), (129, "exact")],
)
def test_a_budget_around_the_window_changes_a_replay(budget: int, decoder: str) -> None:
    """H = 256, W = 128: chunks that end inside, at the end of and behind the replayed rows. Shared pages are not written."""
    prompt = text(1, 256)
    lab = bounded("tiny-b")
    lab.ask(prompt, max_tokens=1)
    pages = known_pages(lab, prompt, exact=True)
    before = published(lab, pages)
    spoil_unused(lab.watched)
    lab = make_lab(settings("tiny-b", **{**vars(lab.config), "max_num_batched_tokens": budget}), keep=True)
    answer = lab.ask(prompt + text(2, 20), max_tokens=3, decoder_replay=decoder)
    assert (answer.cached, answer.replayed) == (256, 128)
    assert (answer.passes[0].replay_start, answer.passes[0].rows) == (128, 148)
    assert assert_equal_to_cold("tiny-b", answer.ids, answer.passes, replayed=True) == 3
    assert all(torch.equal(*pair) for pair in zip(published(lab, pages), before, strict=True))


@pytest.mark.parametrize(
    ("name", "first", "decoder"),
    [
        (name, first, DECODERS[number % 3])
        for name in ("tiny-a", "tiny-b")
        for number, first in enumerate([31, 32, 33, 143, 144, 160, 161, 300])
    ],
)
def test_a_hit_of_any_length_is_not_the_simulated_one(name: str, first: int, decoder: DecoderReplay) -> None:
    lab = bounded(name)
    prompt = text(1, first)
    lab.ask(prompt, max_tokens=1)
    spoil_unused(lab.watched)
    answer = lab.ask(prompt + text(2, 37), max_tokens=3, decoder_replay=decoder)
    pages = first // PAGE * PAGE
    hit = pages if pages > WINDOWS[name] else 0
    assert (answer.cached, answer.replayed) == (hit, WINDOWS[name] if hit else 0)
    assert answer.passes[0].rows == first + 37 - hit + answer.replayed
    assert_equal_to_cold(name, answer.ids, answer.passes, replayed=True)
    lab.assert_empty()


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("pages", [9, 10, 16])
def test_a_hit_covers_the_whole_prompt(pages: int, extra: int) -> None:
    """A prompt that ends with a page, and one more token, sent twice: the last token is always run."""
    prompt = text(1, pages * PAGE + extra)
    lab = bounded("tiny-b")
    lab.ask(prompt, max_tokens=2)
    answer = lab.ask(prompt, max_tokens=2)
    hit = (pages - 1 + extra) * PAGE
    hit = hit if hit > 128 else 0
    assert (answer.cached, answer.replayed) == (hit, min(hit, 128))
    assert_equal_to_cold("tiny-b", answer.ids, answer.passes, replayed=True)


@pytest.mark.parametrize(
    ("length", "encoder", "decoder"),
    [(length, *mode) for length in (1, 128) for mode in MODES] + [(2, *MODES[0]), (127, *MODES[0])],
)
def test_a_prompt_within_the_window_differs_from_replay_off(length: int, encoder: EncoderReplay, decoder: DecoderReplay) -> None:
    """Even when it is sent again, and its beginning is cached: nothing is skipped, so nothing is approximated."""
    lab = make_lab(settings("tiny-b", encoder_replay=encoder.value, decoder_replay=decoder.value))
    prompt = text(1, length)
    lab.ask(prompt + text(2, 60), max_tokens=1)
    answer = lab.ask(prompt, max_tokens=4)
    assert answer.cached == 0 or encoder is EncoderReplay.OFF
    (one,) = answer.passes
    expected = reference("tiny-b", answer.ids[:-1], length, DecoderReplay.OFF)
    assert np.abs(np.stack(list(one.logits.values())) - expected).max() <= 1e-4


def test_replay_is_not_an_approximation() -> None:
    """Otherwise nothing in this file would tell a replay from an exact run."""
    for name, window in WINDOWS.items():
        lab = bounded(name)
        prompt = text(1, 3 * window)
        lab.ask(prompt, max_tokens=1)
        answer = lab.ask(prompt + text(2, 20), max_tokens=1, decoder_replay="off")
        expected = reference(name, answer.ids[:-1], answer.num_prompt, DecoderReplay.OFF)
        assert answer.replayed == window
        assert np.abs(answer.passes[0].logits[answer.num_prompt - 1] - expected[0]).max() > TOLERANCE


# provenance


def conversation(lab: Lab, turns: int, **options: object) -> list[int]:
    """Turns that each find the one before. Returns the ids of the last."""
    ids = text(3, 100)
    for turn in range(turns):
        ids = lab.ask(ids, max_tokens=4, **options).ids + text(10 + turn, 40)
    return ids


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_exact_request_reads_a_bounded_page(decoder: DecoderReplay) -> None:
    """Bounded pages are full of NaN here: whoever reads one shows it."""
    lab = bounded("tiny-a")
    ids = conversation(lab, 4)
    exact, either = known_pages(lab, ids, exact=True), known_pages(lab, ids, exact=False)
    assert 0 < len(exact) < len(either) - 3
    for memory in all_pages(lab.watched):
        spoil(memory, [page for page in either if page not in exact])
    answer = lab.ask(ids, max_tokens=4, encoder_replay="off", decoder_replay=decoder)
    assert_equal_to_cold("tiny-a", answer.ids, answer.passes)
    assert len(known_pages(lab, ids, exact=True)) == len(ids) // PAGE, "what an exact run computed is exact"


def test_a_bounded_request_prefers_bounded_pages() -> None:
    """Two pages of one name: what follows a hit on the exact one is the simulated replay, which has an exact prefix."""
    lab = bounded("tiny-a")
    ids = conversation(lab, 4)
    bounded_before = known_pages(lab, ids, exact=False)
    lab.ask(ids, max_tokens=1, encoder_replay="off")
    exact = known_pages(lab, ids, exact=True)
    assert known_pages(lab, ids, exact=False) == exact
    for memory in all_pages(lab.watched):
        spoil(memory, [page for page in bounded_before if page not in exact])
    answer = lab.ask(ids + text(9, 20), max_tokens=3)
    assert answer.cached == len(ids) // PAGE * PAGE
    assert_equal_to_cold("tiny-a", answer.ids, answer.passes, replayed=True)


def test_what_follows_a_bounded_hit_counts_as_exact() -> None:
    """And so does what a bounded sequence computes in full, but not what it computes after a hit."""
    lab = bounded("tiny-a")
    first = lab.ask(text(1, 70), max_tokens=20)
    assert len(known_pages(lab, first.ids, exact=True)) == 89 // PAGE
    second = lab.ask(first.ids + text(2, 50), max_tokens=20)
    assert second.replayed == 16
    assert len(known_pages(lab, second.ids, exact=False)) == 159 // PAGE
    assert len(known_pages(lab, second.ids, exact=True)) == 89 // PAGE


# who finds what


def test_prompt_logprobs_come_from_a_hit() -> None:
    """Their request finds nothing, whatever is cached; they are those of the full run; and its pages serve others."""
    lab = bounded("tiny-b")
    prompt = text(1, 300)
    lab.ask(prompt, max_tokens=1)
    handle = lab.add(prompt, max_tokens=3, prompt_logprobs=0)
    ids = lab.ids(handle)
    lab.run()
    (one,) = lab.watched.passes[id(ids)]
    assert (one.hit, one.rows, one.mode) == (0, 300, DecoderReplay.OFF)
    assert_equal_to_cold("tiny-b", ids, [one])
    found = [record.logprob for update in lab.updates for record in update.prompt_logprobs][1:]
    rows = torch.from_numpy(reference("tiny-b", prompt, 1, DecoderReplay.OFF))[:-1]
    expected = rows[:, : lab.engine._facts.num_valid_ids].log_softmax(-1)[torch.arange(299), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_a_salt_finds_the_pages_of_another() -> None:
    lab = bounded("tiny-a")
    prompt = text(1, 100)
    for salt, cached in (("", 0), ("a", 0), ("b", 0), ("a", 80), ("", 80), ("ab", 0)):
        assert lab.ask(prompt[:90] + text(2, 5), max_tokens=1, cache_salt=salt).cached == cached, salt


@pytest.mark.parametrize("encoder", list(EncoderReplay))
def test_a_server_without_a_prefix_cache_finds_something(encoder: EncoderReplay) -> None:
    lab = make_lab(settings(prefix_cache=False, encoder_replay=encoder.value))
    for _ in range(2):
        assert lab.ask(text(1, 300), max_tokens=1).cached == 0
    assert lab.watched.usage().bytes_cached == 0


def test_a_request_cannot_override_the_servers_modes() -> None:
    for server in MODES:
        lab = make_lab(settings(encoder_replay=server[0].value, decoder_replay=server[1].value))
        lab.ask(text(1, 260), max_tokens=1, encoder_replay="off", decoder_replay="off")
        for number, (encoder, decoder) in enumerate(MODES):
            answer = lab.ask(text(1, 260) + text(2 + number, 60), max_tokens=1, encoder_replay=encoder, decoder_replay=decoder)
            (one,) = answer.passes
            assert one.mode is decoder
            assert answer.cached == 256
            assert one.replay_start == (256 - 16 if encoder is EncoderReplay.BOUNDED else 0)


def test_hits_and_replays_are_not_counted() -> None:
    lab = bounded("tiny-b")
    lab.ask(text(1, 200), max_tokens=1)
    lab.ask(text(1, 200) + text(2, 9), max_tokens=1)
    lab.ask(text(1, 100), max_tokens=1)
    counted = {
        name: lab.counts.counters[name]
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "replayed_tokens_total")
    }
    assert counted == {"prefix_cache_queries_total": 509, "prefix_cache_hits_total": 192, "replayed_tokens_total": 128}


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_preempted_sequence_begins_again_from_nothing(decoder: DecoderReplay) -> None:
    """It finds its own pages, prompt and output, and goes on from a replay of them."""
    lab = make_lab(settings(encoder_replay="bounded", decoder_replay=decoder.value), tight_runner("tiny-a", pages=14, slots=4))
    first, second = (lab.add(text(seed, 80), max_tokens=40) for seed in (1, 2))
    known = lab.ids(first), lab.ids(second)
    lab.run()
    assert lab.counts.counters["preemptions_total"] > 0
    assert len(lab.watched.passes[id(known[0])]) == 1, "the older one was preempted"
    passes = lab.watched.passes[id(known[1])]
    assert passes[0].hit == 0
    assert any(one.hit > 80 for one in passes[1:])
    assert_equal_to_cold("tiny-a", known[0], lab.watched.passes[id(known[0])])
    assert_equal_to_cold("tiny-a", known[1], passes[:2], replayed=True)
    lab.assert_empty()


@pytest.mark.parametrize(("decoder", "budget"), [("bounded", 7), ("off", 64)])
def test_a_replay_in_packed_records_depends_on_the_chunks(decoder: str, budget: int) -> None:
    """Release formats: hit after hit, the same steps give the same bits, and stale bytes give others."""
    outcome = []
    for byte in (0x00, 0x7F, 0xFF):
        lab = bounded("tiny-b", fake_quant=True, decoder_replay=decoder, max_num_batched_tokens=budget)
        lab.ask(text(1, 190), max_tokens=1)
        spoil_unused(lab.watched, byte)
        answer = lab.ask(text(1, 190) + text(2, 31), max_tokens=5)
        assert (answer.cached, answer.replayed) == (176, 128)
        outcome.append(np.stack(list(answer.passes[0].logits.values())))
    assert np.isfinite(outcome[0]).all()
    for other in outcome[1:]:
        np.testing.assert_array_equal(other, outcome[0])
