# SPDX-License-Identifier: Apache-2.0
"""An hour of short requests in minutes: memory stays flat, and nothing is left of those that are gone."""

from __future__ import annotations

import gc
import random
import time

import psutil
import pytest
from fake_runner import request
from prefix_support import MODES, facts, settings, text, tight_runner

from cedar.engine.engine import Engine
from cedar.engine.request import FinishReason
from cedar.engine.runner import ModelRunner

REQUESTS = 10_000
WARM_UP = 2_000
MOST_LIVE = 96
CANCELLED = 0.2
PAGES = 400
"""Few enough that what the warm-up leaves in the cache fills them."""
LIMIT_S = 600.0
RSS_GROWTH = 8 << 20
"""Bytes; one request that is kept with its text, chain and sampling state would be more than 2 KB of each of 8,000."""
OBJECT_GROWTH = 500
"""Python objects that the collector tracks; one for every sixteenth request."""


class Soak:
    """Endless callers of one engine: some share a beginning, some go away, in whatever state."""

    def __init__(self) -> None:
        config = settings(encoder_replay="bounded", decoder_replay="bounded", max_num_seqs=64)
        self.runner: ModelRunner = tight_runner("tiny-a", pages=PAGES, slots=64, variant="fp32", kind=ModelRunner)
        self.engine = Engine(self.runner, config, facts(config.model))
        self.draw = random.Random(1)
        self.beginnings = [text(seed, 40) for seed in range(40)]
        self.added = 0
        self.cached = 0
        self.ends = dict.fromkeys(FinishReason, 0)
        self.leaving: dict[str, int] = {}
        """Handles that will be cancelled, and in how many steps."""

    def add(self) -> None:
        draw = self.draw
        beginning = draw.choice(self.beginnings)[: draw.choice([0, 20, 40])]
        ids = beginning + [draw.randrange(3, 370) for _ in range(draw.randint(1, 12))]
        options = {}
        if draw.random() < 0.2:
            options = dict(zip(("encoder_replay", "decoder_replay"), draw.choice(MODES), strict=True))
        handle = self.engine.add(request(f"r{self.added}", ids, max_tokens=draw.randint(1, 6), ignore_eos=True, **options))
        self.added += 1
        if draw.random() < CANCELLED:
            self.leaving[handle] = draw.randrange(6)

    def until(self, total: int) -> None:
        """Until so many requests were made and all of them are gone."""
        while self.added < total or self.engine.num_live:
            while self.added < total and self.engine.num_live < MOST_LIVE:
                self.add()
            self.step()

    def step(self) -> None:
        for handle, steps in list(self.leaving.items()):
            if steps:
                self.leaving[handle] = steps - 1
            else:
                del self.leaving[handle]
                self.engine.abort(handle=handle)
        for update in self.engine.step():
            if update.ready:
                self.engine.attach(update.handle)
            if update.finish_reason is not None:
                self.ends[update.finish_reason] += 1
                self.cached += update.cached_tokens
                self.leaving.pop(update.handle, None)

    def assert_nothing_left(self) -> None:
        engine, cache = self.engine, self.runner.cache
        kept = (engine._live, engine._handles, engine._updates, engine._scheduler.open, engine._scheduler.waiting)
        assert [len(each) for each in kept] == [0] * len(kept)
        usage = self.runner.usage()
        assert (usage.bytes_used, usage.pages_used, usage.sequences) == (0, 0, 0)
        assert cache._pages.num_available == cache.sizes.num_pages
        assert len(cache._pages._names) == len(cache._pages._pages) == cache._pages.num_idle
        assert int(cache._table.count_nonzero()) == 0


def memory() -> tuple[int, int]:
    """Resident bytes, and objects that the collector knows."""
    gc.collect()
    return psutil.Process().memory_info().rss, len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_10000_requests_leave_something_behind() -> None:
    start = time.monotonic()
    soak = Soak()
    soak.until(WARM_UP)
    soak.assert_nothing_left()
    rss, objects = memory()
    soak.until(REQUESTS)
    soak.assert_nothing_left()
    rss_end, objects_end = memory()
    elapsed = time.monotonic() - start
    print(f"{elapsed:.0f} s, RSS {(rss_end - rss) / 2**20:+.1f} MiB, objects {objects_end - objects:+d}, {dict(soak.ends)}")
    assert sum(soak.ends.values()) == REQUESTS
    assert soak.ends[FinishReason.ERROR] == soak.ends[FinishReason.DEADLINE] == 0
    assert soak.ends[FinishReason.CANCELLED] == pytest.approx(CANCELLED * REQUESTS, rel=0.1)
    assert soak.cached > REQUESTS
    assert rss_end - rss < RSS_GROWTH
    assert objects_end - objects < OBJECT_GROWTH
    assert elapsed < LIMIT_S
