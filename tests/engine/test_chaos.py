# SPDX-License-Identifier: Apache-2.0
"""Everything at once, in pools that are too small: whatever happens, every request ends once and nothing is left held.

After every step the books are audited: each page and slot is free, idle or held, by exactly as many as refer to it. What is free
is full of NaN, so that a stale read ends a request with an error, and no error is allowed but the injected ones.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from prefix_support import (
    MODES,
    PAGE,
    Lab,
    ask,
    assert_equal_to_cold,
    make_lab,
    settings,
    spoil_unused,
    text,
    tight_runner,
)

from cedar.engine.engine import MAX_FAILED_STEPS
from cedar.engine.request import EncoderReplay, FinishReason
from cedar.errors import CedarError, ErrorCode

BEGINNINGS = [text(seed, length) for seed, length in ((1, 160), (2, 64), (3, 33), (4, 15))]
REFUSALS = {ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARGUMENT, ErrorCode.DEADLINE_EXCEEDED}


class Chaos:
    """One run. ``name``: checkpoint; everything else follows from the seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.draw = draw = random.Random(seed)
        encoder, decoder = draw.choice(MODES)
        slots = draw.randint(2, 6)
        config = settings(
            name,
            encoder_replay=encoder.value,
            decoder_replay=decoder.value,
            max_num_seqs=slots,
            max_waiting=6,
            max_num_batched_tokens=draw.choice([5, 33, 128]),
            lease_ms=150,
        )
        self.runner = tight_runner(name, pages=draw.randint(14, 26), slots=slots + draw.randint(0, 4))
        self.lab: Lab = make_lab(config, self.runner)
        self.handles: list[str] = []
        self.known: dict[str, tuple[list[int], EncoderReplay]] = {}
        self.refused: Counter[ErrorCode] = Counter()
        self.cleared = 0

    def prompt(self) -> list[int]:
        draw = self.draw
        beginning = draw.choice(BEGINNINGS)
        kept = draw.choice([0, len(beginning), len(beginning), draw.randrange(len(beginning))])
        return beginning[:kept] + text(draw.randrange(1000), draw.randint(1, 40))

    def add(self) -> None:
        draw = self.draw
        encoder, decoder = draw.choice(MODES)
        options: dict[str, Any] = {"max_tokens": draw.choice([1, 3, 20, 50]), "priority": draw.choice([0, 0, 0, -1, 2])}
        if draw.random() < 0.5:
            options |= {"encoder_replay": encoder, "decoder_replay": decoder}
        if draw.random() < 0.1:
            options["prompt_logprobs"] = 1
        if draw.random() < 0.2:
            options["timeout_ms"] = draw.choice([1, 20, 100, 400])
        if draw.random() < 0.2:
            options["cache_salt"] = "tenant"
        if draw.random() < 0.05:
            options["max_tokens"] = 1500
        try:
            handle = self.lab.engine.add(ask(f"r{len(self.handles)}", self.prompt(), **options))
        except CedarError as error:
            self.refused[error.code] += 1
            return
        seq = self.lab.engine._live[handle].seq
        self.handles.append(handle)
        self.known[handle] = seq.ids, seq.encoder_replay

    def disturb(self) -> None:
        """Something that comes from outside."""
        draw, engine = self.draw, self.lab.engine
        live = list(engine._live)
        dice = draw.random()
        if dice < 0.45:
            self.add()
        elif dice < 0.55 and live:
            assert engine.abort(handle=draw.choice(live))
        elif dice < 0.85 and live:
            engine.attach(draw.choice(live))
        elif dice < 0.88:
            self.cleared += engine.clear_cache()
        elif dice < 0.91 and engine._failed_steps + 1 < MAX_FAILED_STEPS:
            self.runner.fail_in = 1
        elif dice < 0.95:
            self.lab.clock.pass_ms(draw.choice([1, 30, 160]))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.draw.randrange(4)):
                self.disturb()
            spoil_unused(self.runner)
            self.lab.step()
            audit(self.lab)
        self.runner.fail_in = 0
        for handle in list(self.lab.engine._live):
            self.lab.engine.attach(handle)
        self.lab.run()
        audit(self.lab)

    def check_ends(self) -> None:
        assert self.refused.keys() <= REFUSALS
        assert set(self.lab.ends) == set(self.handles)
        for end in self.lab.ends.values():
            assert end.finish_reason is not FinishReason.ERROR or "injected" in end.error.message, end.error

    def check_results(self, most: int) -> int:
        """Those without encoder replay that came to their end, however often they were preempted, are as if alone."""
        good = [handle for handle, end in self.lab.ends.items() if end.finish_reason is FinishReason.LENGTH]
        exact = [self.known[handle][0] for handle in good if self.known[handle][1] is EncoderReplay.OFF]
        return sum(assert_equal_to_cold(self.name, ids, self.runner.passes[id(ids)]) for ids in exact[:most])

    def check_still_serving(self) -> None:
        """Nothing is held; with the cache cleared all memory is free; and an answer is right."""
        self.lab.assert_empty()
        self.lab.engine.clear_cache()
        cache = self.runner.cache
        assert self.runner.usage().bytes_cached == 0
        assert sorted(cache._pages._free) == list(range(1, cache.sizes.num_pages + 1))
        assert sorted(cache._slots._free) == list(range(1, cache.sizes.num_slots + 1))
        for _ in range(2):
            answer = self.lab.ask(BEGINNINGS[0] + text(7, 20), max_tokens=3, encoder_replay="off", decoder_replay="off")
            assert_equal_to_cold(self.name, answer.ids, answer.passes)
        assert answer.cached == 176 // PAGE * PAGE


def audit(lab: Lab) -> None:
    """The books of the pools, page by page and slot by slot."""
    cache = lab.watched.cache
    pages, slots = cache._pages, cache._slots
    held = [seq.memory.blocks for seq in lab.engine._scheduler.open]
    references = Counter(page for blocks in held for page in blocks.pages)
    assert all(pages.references(page) == references[page] for page in range(1, cache.sizes.num_pages + 1))
    assert sorted([*references, *pages._free, *pages._idle]) == list(range(1, cache.sizes.num_pages + 1))
    assert {page: name for name, same in pages._pages.items() for page in same} == pages._names
    assert all(pages._pages[pages._names[page]] == [page] for page in pages._idle)
    in_snapshots = [snapshot.slot for snapshot in slots._snapshots.values()]
    assert sorted([*(blocks.slot for blocks in held), *slots._free, *in_snapshots]) == list(range(1, cache.sizes.num_slots + 1))
    assert cache._charged_bytes == sum(blocks.charged_bytes for blocks in held) <= cache.sizes.boundary_bytes
    for blocks in held:
        row = cache._table[blocks.slot]
        assert row[: len(blocks.pages)].tolist() == blocks.pages
    assert int((cache._table != 0).sum()) == sum(len(blocks.pages) for blocks in held)
    assert lab.watched.usage().bytes_used <= lab.watched.usage().bytes_total


def survive(name: str, seed: int, steps: int, compared: int) -> Chaos:
    chaos = Chaos(name, seed)
    chaos.run(steps)
    chaos.check_ends()
    chaos.check_results(compared)
    chaos.check_still_serving()
    return chaos


def test_chaos_leaves_something_held() -> None:
    """And everything that it is made of has happened."""
    runs = [survive("tiny-a", seed, 110, 6) for seed in (1, 2, 3)]
    reasons = Counter(end.finish_reason for run in runs for end in run.lab.ends.values())
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR}
    assert sum((run.refused for run in runs), Counter()).keys() >= {ErrorCode.INVALID_ARGUMENT, ErrorCode.UNAVAILABLE}
    assert sum(run.lab.counts.counters.get("preemptions_total", 0) for run in runs) > 0
    assert sum(run.lab.counts.counters.get("prefix_cache_hits_total", 0) for run in runs) > 0
    assert sum(run.cleared for run in runs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_more_chaos_leaves_something_held(seed: int) -> None:
    survive(["tiny-a", "tiny-b"][seed % 2], seed, 200, 15)
