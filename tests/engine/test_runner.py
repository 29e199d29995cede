# SPDX-License-Identifier: Apache-2.0
"""Steps of many sequences: what one sequence may not see of another, what a broken caller is told, what must be free again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cedar.config.engine import EngineConfig
from cedar.engine.memory import ModelSequence
from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.work import DecodeWork, PrefillWork, StepWork, TailWork
from cedar.errors import CedarError
from golden_support import GOLDEN, decode, golden_arrays, load_runner, open_sequence, prefill, recorded, stored_rows, tail

IDS = golden_arrays("tiny-a", "cases_fp32_noquant.npz")["seed0_len300/input_ids"].tolist()
MODES = list(DecoderReplay)


class Script:
    """One sequence's life: a prompt in random chunks, its tail, then given tokens; every row of logits it gets."""

    def __init__(self, runner: ModelRunner, mode: DecoderReplay, prompt: list[int], new_ids: list[int]) -> None:
        self.runner, self.mode, self.prompt, self.new_ids = runner, mode, prompt, list(new_ids)
        self.seq = open_sequence(runner, mode, len(prompt) + len(new_ids))
        self.got: list[np.ndarray] = []

    @property
    def done(self) -> bool:
        return self.seq.decoding and not self.new_ids

    def next(self, chunk: int) -> PrefillWork | TailWork | DecodeWork:
        seq = self.seq
        if seq.decoding:
            return DecodeWork(seq, seq.num_computed, self.new_ids.pop(0))
        if seq.encoded:
            return TailWork(seq)
        start = seq.num_computed
        ids = self.prompt[start : start + chunk]
        return PrefillWork(seq, start, ids, start + len(ids) == len(self.prompt))

    def alone(self) -> np.ndarray:
        """The same life in steps of its own, the prompt in one chunk."""
        seq = open_sequence(self.runner, self.mode, len(self.prompt))
        new_ids = list(self.new_ids)
        try:
            prefill(self.runner, seq, self.prompt)
            return np.stack([tail(self.runner, seq), *[decode(self.runner, seq, token) for token in new_ids]])
        finally:
            self.runner.close(seq)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_a_ragged_batch_differs_from_each_alone(name: str, seed: int) -> None:
    """Prefill chunks, tails and decodes of all modes in one step; each sequence's logits are its own."""
    runner = load_runner(name, "fp32_noquant")
    draw = random.Random(seed)
    top = 370
    scripts, expected = [], []
    for number in range(7):
        prompt = [draw.randrange(3, top) for _ in range(draw.choice([1, 2, 16, 17, 40, 90, 140]))]
        scripts.append(Script(runner, MODES[number % 3], prompt, [draw.randrange(3, top) for _ in range(5)]))
        expected.append(scripts[-1].alone())
    mixed = 0
    try:
        while live := [script for script in scripts if not script.done]:
            chosen = draw.sample(live, draw.randint(1, len(live)))
            works = [(script, script.next(draw.choice([1, 2, 7, 33, 64]))) for script in chosen]
            by_kind = {kind: [(s, w) for s, w in works if isinstance(w, kind)] for kind in (PrefillWork, TailWork, DecodeWork)}
            result = runner.step(
                StepWork(*([work for _, work in by_kind[kind]] for kind in (PrefillWork, TailWork, DecodeWork)))  # type: ignore[arg-type]
            )
            mixed += all(by_kind.values())
            for row, (script, _) in enumerate([*by_kind[TailWork], *by_kind[DecodeWork]]):
                assert result.logits is not None
                script.got.append(result.logits[row].numpy())
        for script, alone in zip(scripts, expected, strict=True):
            np.testing.assert_allclose(np.stack(script.got), alone, atol=5e-5)
    finally:
        for script in scripts:
            runner.close(script.seq)
    assert mixed > 0


def test_all_rows_of_a_prompt_are_mixed_up() -> None:
    """`all_logits` of two prompts beside a decode and a tail."""
    runner = load_runner("tiny-a", "fp32_noquant")
    decoding = open_sequence(runner, DecoderReplay.BOUNDED, 60)
    prefill(runner, decoding, IDS[:40])
    tail(runner, decoding)
    waiting = open_sequence(runner, DecoderReplay.BOUNDED, 60)
    prefill(runner, waiting, IDS[10:60])
    first, second = (open_sequence(runner, DecoderReplay.OFF, 60) for _ in range(2))
    result = runner.step(
        StepWork(
            prefills=[PrefillWork(first, 0, IDS[:30], True, True), PrefillWork(second, 0, IDS[100:133], True, True)],
            tails=[TailWork(waiting)],
            decodes=[DecodeWork(decoding, 40, 9)],
        )
    )
    for seq in (decoding, waiting, first, second):
        runner.close(seq)
    assert list(result.prompt_logits) == [0, 1]
    for number, ids in ((0, IDS[:30]), (1, IDS[100:133])):
        seq = open_sequence(runner, DecoderReplay.OFF, 60)
        np.testing.assert_allclose(result.prompt_logits[number], prefill(runner, seq, ids), atol=5e-5)
        runner.close(seq)


def spoil(rows: torch.Tensor) -> None:
    """Floats become NaN; the bytes of packed records the codes and scales of NaN."""
    rows.fill_(0xFF if rows.dtype == torch.uint8 else torch.nan)


def poison(runner: ModelRunner, slot: int) -> None:
    """Everything private to a slot becomes NaN."""
    window = runner.config.sliding_window
    for layer in range(runner.config.num_hidden_layers):
        spoil(runner.cache.window(layer).rows[slot * window : (slot + 1) * window])
    for source in runner.config.kv_source_layer_ids:
        if runner.config.compress_ratios[source] == 2:
            spoil(runner.cache.open_rows(source)[slot])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [None, 1, 7])
def test_a_reused_slot_shows_its_last_owner(size: int | None, mode: DecoderReplay) -> None:
    runner = load_runner("tiny-a", "fp32")
    for source in runner.config.kv_source_layer_ids:
        spoil(runner.cache.kv(source).rows[64:])  # entries that nobody has written
    outcome = []
    for dirty in (False, True):
        seq = open_sequence(runner, mode, 60)
        if dirty:
            poison(runner, seq.blocks.slot)
        prefill(runner, seq, IDS[:50], size)
        outcome.append([tail(runner, seq), *[decode(runner, seq, token) for token in (5, 6, 7)]])
        runner.close(seq)
    np.testing.assert_array_equal(outcome[0], outcome[1])
    assert np.isfinite(outcome[1]).all()


def test_a_page_shows_its_last_owner() -> None:
    """Index keys are read page by page: the unwritten end of a sequence's last page must not win a place."""
    runner = load_runner("tiny-a", "fp32")
    outcome = []
    for left in (0, 0xFF, 0x7E):  # nothing, NaN, the largest values
        for source in runner.config.kv_source_layer_ids:
            for pool in (runner.cache.kv(source), runner.cache.index_keys(source)):
                pool.rows[runner.cache.page_tokens :] = left
        seqs = [open_sequence(runner, DecoderReplay.OFF, 300) for _ in range(2)]
        for seq, length in zip(seqs, (281, 163), strict=True):
            prefill(runner, seq, IDS[:length], 50)
            tail(runner, seq)
        assert all(runner.reserve(seq, 301) for seq in seqs)
        for token in (5, 6, 7):
            result = runner.step(StepWork(decodes=[DecodeWork(seq, seq.num_computed, token) for seq in seqs]))
            assert result.logits is not None
            outcome.append(result.logits.numpy())
        for seq in seqs:
            runner.close(seq)
    assert np.isfinite(outcome).all()
    for other in outcome[3:6], outcome[6:]:
        np.testing.assert_array_equal(other, outcome[:3])


@pytest.mark.parametrize("hit", [17, 18, 41, 64, 99])
@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("mode", MODES)
def test_a_prefix_hit_reads_dropped_windows_or_rewrites_entries(mode: DecoderReplay, size: int | None, hit: int) -> None:
    """Any parity: all window state is rebuilt from R = hit - W, and entries of groups that end at or below the hit stay."""
    runner = load_runner("tiny-a", "fp32_noquant")
    prompt = IDS[:100]
    seq = open_sequence(runner, mode, 110)
    prefill(runner, seq, prompt[:hit], last=False)
    entries = {source: stored_rows(runner, seq, source, hit) for source in runner.config.kv_source_layer_ids}
    before = {
        source: (runner.cache.kv(source).load(rows), runner.cache.index_keys(source).load(rows))
        for source, rows in entries.items()
    }
    poison(runner, seq.blocks.slot)
    assert runner.begin_replay(seq, hit, prompt[:hit]) == hit - runner.config.sliding_window
    prefill(runner, seq, prompt, size)
    logits = [tail(runner, seq), *[decode(runner, seq, token) for token in (5, 6, 7)]]
    for source, rows in entries.items():
        assert torch.equal(runner.cache.kv(source).load(rows), before[source][0])
        assert torch.equal(runner.cache.index_keys(source).load(rows), before[source][1])
    runner.close(seq)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_chunk_boundary_moves_a_replay(mode: DecoderReplay) -> None:
    runner = load_runner("tiny-a", "fp32_noquant")
    for hit in (33, 64):
        outcome = []
        for size in (None, 5, 17):
            seq = open_sequence(runner, mode, 90)
            prefill(runner, seq, IDS[:hit], 30, last=False)
            runner.begin_replay(seq, hit, IDS[:hit])
            prefill(runner, seq, IDS[:80], size)
            outcome.append(np.stack([tail(runner, seq), *[decode(runner, seq, token) for token in (5, 6, 7)]]))
            runner.close(seq)
        for other in outcome[1:]:
            np.testing.assert_allclose(other, outcome[0], atol=2e-5)


@pytest.mark.parametrize("hit", [1, 2, 15, 16])
def test_a_hit_within_the_window_is_kept(hit: int) -> None:
    runner = load_runner("tiny-a", "fp32_noquant")
    seq = open_sequence(runner, DecoderReplay.OFF, 60)
    prefill(runner, seq, IDS[:hit], last=False)
    assert runner.begin_replay(seq, hit, IDS[:hit]) == 0
    replayed = prefill(runner, seq, IDS[:50], 9)
    runner.close(seq)
    seq = open_sequence(runner, DecoderReplay.OFF, 60)
    np.testing.assert_allclose(replayed, prefill(runner, seq, IDS[:50]), atol=2e-5)
    runner.close(seq)


def test_reindex_layers_search_outside_the_candidates() -> None:
    runner = load_runner("tiny-a", "fp32")
    config = runner.config
    seq = open_sequence(runner, DecoderReplay.OFF, 300)
    with recorded(runner) as record:
        prefill(runner, seq, IDS, 40)
    runner.close(seq)
    blocks = record.array("blocks", config.candidate_source_layer_id)
    restricted = [layer.index for layer in config.layers if layer.uses_candidates]
    assert restricted
    for layer in restricted:
        chosen = record.array("topk", layer)
        block_of = np.where(chosen >= 0, chosen // config.candidate_block_size, -2)
        assert ((block_of[:, :, None] == blocks[:, None]).any(-1) | (chosen < 0)).all()


def ends(runner: ModelRunner, seq: ModelSequence) -> dict[str, Callable[[], object]]:
    """States in which a client may go away."""
    return {
        "opened": lambda: None,
        "encoding": lambda: prefill(runner, seq, IDS[:40], 16, last=False),
        "replaying": lambda: (prefill(runner, seq, IDS[:40], last=False), runner.begin_replay(seq, 40, IDS[:40])),
        "encoded": lambda: prefill(runner, seq, IDS[:40]),
        "decoding": lambda: (prefill(runner, seq, IDS[:40]), tail(runner, seq), decode(runner, seq, 7)),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", ["opened", "encoding", "replaying", "encoded", "decoding"])
def test_an_aborted_sequence_holds_memory(state: str, mode: DecoderReplay) -> None:
    runner = load_runner("tiny-a", "fp32")
    assert runner.usage().bytes_used == 0
    seq = open_sequence(runner, mode, 60)
    ends(runner, seq)[state]()
    assert runner.usage().sequences == 1
    runner.close(seq)
    usage = runner.usage()
    assert (usage.bytes_used, usage.pages_used, usage.sequences) == (0, 0, 0)
    with pytest.raises(RuntimeError, match="closed already"):
        runner.close(seq)


def broken(runner: ModelRunner, seq: ModelSequence, other: ModelSequence) -> dict[str, tuple[StepWork, str]]:
    """Steps that a correct engine never asks for; ``seq`` has computed 10 tokens, ``other`` none."""
    return {
        "nothing": (StepWork(), "no work"),
        "twice": (StepWork(prefills=[PrefillWork(seq, 10, [1], False)], decodes=[DecodeWork(seq, 11, 1)]), "appears twice"),
        "gap": (StepWork(prefills=[PrefillWork(seq, 11, [1], False)]), "at position 11, the sequence is at 10"),
        "repeat": (StepWork(prefills=[PrefillWork(seq, 9, [1], False)]), "at position 9"),
        "early tail": (StepWork(tails=[TailWork(seq)]), "whose last chunk has not run"),
        "early decode": (StepWork(decodes=[DecodeWork(seq, 10, 1)]), "not decoding"),
        "empty chunk": (StepWork(prefills=[PrefillWork(seq, 10, [], True)]), "of 0 tokens"),
        "negative id": (StepWork(prefills=[PrefillWork(seq, 10, [-1], False)]), "token id outside"),
        "large id": (StepWork(prefills=[PrefillWork(seq, 10, [runner.vocab_size], False)]), "token id outside"),
        "all logits": (StepWork(prefills=[PrefillWork(seq, 10, [1], False, True)]), "all_logits needs decoder replay off"),
        "unreserved": (StepWork(prefills=[PrefillWork(other, 0, IDS[:40], False)]), "not reserved"),
    }


BROKEN = ["nothing", "twice", "gap", "repeat", "early tail", "early decode", "empty chunk", "negative id", "large id"]


@pytest.mark.parametrize("name", [*BROKEN, "all logits", "unreserved"])
def test_a_broken_step_gives_wrong_numbers(name: str) -> None:
    runner = load_runner("tiny-a", "fp32")
    seq, other = open_sequence(runner, DecoderReplay.BOUNDED, 60), open_sequence(runner, DecoderReplay.BOUNDED, 16)
    prefill(runner, seq, IDS[:10], last=False)
    work, message = broken(runner, seq, other)[name]
    with pytest.raises(RuntimeError, match=message):
        runner.step(work)
    runner.close(seq)
    runner.close(other)
    with pytest.raises(RuntimeError, match="closed sequence"):
        runner.step(StepWork(prefills=[PrefillWork(other, 0, [1], False)]))


def small(**settings: object) -> ModelRunner:
    values = {"device": "cpu", "kv_cache_bytes": 4 << 20, "page_tokens": 16, "max_num_seqs": 2, "cpu_threads": 1, **settings}
    return ModelRunner.load(EngineConfig(model=str(GOLDEN / "tiny-a" / "checkpoint"), **values))  # type: ignore[arg-type]


def test_memory_is_overcommitted() -> None:
    runner = small()
    usage = runner.usage()
    assert usage.kv_bytes_per_token == 2 * (36 + 17)  # two ratio-2 sources and one of ratio 1, packed
    assert runner.fits(runner.max_model_len, DecoderReplay.EXACT)
    assert not runner.fits(runner.max_model_len + 1, DecoderReplay.OFF)
    first, second = runner.open_alone(DecoderReplay.BOUNDED, 0), runner.open_alone(DecoderReplay.EXACT, 0)
    assert first is not None
    assert second is not None
    assert runner.open_alone(DecoderReplay.OFF, 0) is None
    assert not runner.reserve(second, usage.pages_total * 16)
    assert runner.reserve(second, 160)
    assert runner.usage().pages_used == 10
    assert runner.usage().bytes_used <= runner.usage().bytes_total
    runner.close(first)
    runner.close(second)


@pytest.mark.parametrize("mode", MODES)
def test_a_server_becomes_ready_that_can_run_nothing(mode: DecoderReplay) -> None:
    """The least budget runs a request in the server's own replay mode; one byte less is refused with that number."""
    with pytest.raises(CedarError, match="kv_cache_bytes: is 1000; allowed: at least") as caught:
        small(kv_cache_bytes=1000, decoder_replay=str(mode))
    least = int(caught.value.message.split("at least ")[1].split()[0])
    with pytest.raises(CedarError, match=f"at least {least}"):
        small(kv_cache_bytes=least - 1, decoder_replay=str(mode))
    runner = small(kv_cache_bytes=least, decoder_replay=str(mode))
    assert runner.fits(16, mode)
    seq = open_sequence(runner, mode, 16)
    prefill(runner, seq, IDS[:15])
    assert np.isfinite(tail(runner, seq)).all()
    runner.close(seq)


def test_more_tokens_than_the_context_run() -> None:
    runner = small(max_model_len=32)
    seq = open_sequence(runner, DecoderReplay.OFF, 40)
    with pytest.raises(RuntimeError, match="the limit is 32"):
        runner.step(StepWork(prefills=[PrefillWork(seq, 0, IDS[:33], True)]))
    runner.close(seq)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 5000}, "max_model_len: is 5000; allowed: at most max_position_embeddings"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes: is 1000; allowed: at least"),
        ({"model": "/nowhere"}, "/nowhere: no config.json"),
    ],
)
def test_a_bad_setting_is_not_named(settings: dict[str, object], message: str) -> None:
    model = str(settings.get("model", GOLDEN / "tiny-a" / "checkpoint"))
    with pytest.raises(CedarError) as caught:
        ModelRunner.load(EngineConfig(**{**settings, "model": model, "device": "cpu"}))  # type: ignore[arg-type]
    assert message in caught.value.message


def test_loading_is_silent(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    runner = ModelRunner.load(
        EngineConfig(model=str(GOLDEN / "tiny-a" / "checkpoint"), device="cpu", kv_cache_bytes=1 << 20),
        lambda done, total, name: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] > 0
    assert runner.vocab_size == 512
