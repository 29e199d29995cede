# SPDX-License-Identifier: Apache-2.0
"""Many sequences with one beginning: it is computed once, held once, and nobody waits for it in vain."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from fake_runner import Counts, FakeClock
from prefix_support import MODES, PAGE, Lab, WatchedRunner, assert_equal_to_cold, make_lab, settings, text, tight_runner

from cedar.config.engine import EngineConfig
from cedar.config.presets import preset
from cedar.engine.admission import ModelFacts
from cedar.engine.engine import Engine
from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason
from cedar.engine.runner import ModelRunner
from cedar.model.make import make_checkpoint

COUNT, PREFIX, OWN = 200, 4096, 10


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 16K positions: the golden ones have 4,096, prefix included."""
    model = tmp_path_factory.mktemp("tiny") / "model"
    make_checkpoint(preset("tiny"), model)
    return model


@functools.cache
def crowd_runner(model: Path, encoder: str) -> WatchedRunner:
    config = EngineConfig(
        model=str(model), device="cpu", cpu_threads=1, kv_cache_bytes=1 << 27, max_num_seqs=COUNT, encoder_replay=encoder
    )
    runner = WatchedRunner.load(config)
    assert isinstance(runner, WatchedRunner)
    return runner


def crowd(runner: ModelRunner, encoder: str) -> Lab:
    """An engine with seats for all, in packed records."""
    runner.clear_cache()
    config = EngineConfig(max_num_seqs=COUNT, max_num_batched_tokens=1024, encoder_replay=encoder)
    facts = ModelFacts.of(runner.config, runner.vocab_size)
    clock, counts = FakeClock(), Counts()
    engine = Engine(runner, config, facts, recorder=counts, clock=clock.clock())
    return Lab(engine, runner, clock, counts)  # type: ignore[arg-type]


def ids_of(number: int, length: int = PREFIX) -> list[int]:
    """The shared beginning, and ``OWN`` tokens that no other has. Above the control tokens."""
    return [20 + id_ for id_ in text(1, length) + text(1000 + number, OWN)]


@pytest.mark.parametrize(
    ("warm", "encoder"),
    [
        (False, "bounded"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in ((True, "bounded"), (False, "off"), (True, "off"))),
    ],
)
def test_200_sequences_hold_a_prefix_more_than_once(long_context: Path, warm: bool, encoder: str) -> None:
    """To the byte, also when all come at the same moment and nothing is cached: then one encodes and the others yield to it."""
    runner = crowd_runner(long_context, encoder)
    lab = crowd(runner, encoder)
    if warm:
        lab.add(ids_of(COUNT), max_tokens=1)
        lab.run()
    before = runner.model.work.source_rows
    handles = [lab.add(ids_of(number), max_tokens=3) for number in range(COUNT)]
    lab.until(lambda: len(lab.ready.intersection(handles)) == COUNT)
    usage, sizes = runner.usage(), runner.cache.sizes
    own_pages = -(-(PREFIX + OWN + 1) // sizes.page_tokens) - PREFIX // sizes.page_tokens
    seam = runner._seam.bytes(DecoderReplay.BOUNDED)
    each = own_pages * sizes.page_bytes + sizes.slot_bytes
    assert usage.sequences == COUNT
    assert usage.bytes_used == PREFIX // sizes.page_tokens * sizes.page_bytes + COUNT * (each + seam)
    again = OWN + (runner.config.sliding_window if encoder == "bounded" else 0)
    assert runner.model.work.source_rows - before == (COUNT * again if warm else PREFIX + OWN + (COUNT - 1) * again)
    for handle in handles:
        lab.engine.attach(handle)
    lab.until(lambda: all(lab.tokens[handle] for handle in handles))
    assert runner.usage().bytes_used == PREFIX // sizes.page_tokens * sizes.page_bytes + COUNT * each
    lab.run()
    assert {lab.ends[handle].finish_reason for handle in handles} == {FinishReason.LENGTH}
    assert [lab.ends[handle].cached_tokens for handle in handles[1:]] == [PREFIX] * (COUNT - 1)
    lab.assert_empty()


# those who encode a beginning, and those who yield to them


def together(lab: Lab, count: int = 4, length: int = 300, **options: object) -> list[str]:
    """Sequences of one beginning, added at once; a step later the first is encoding and the others have yielded to it."""
    handles = [lab.add(ids_of(number, length), max_tokens=2, **options) for number in range(count)]
    lab.step()
    assert [untouched(lab, handle) for handle in handles] == [False] + [True] * (count - 1)
    return handles


def untouched(lab: Lab, handle: str) -> bool:
    """Is it open with nothing encoded yet?"""
    return lab.engine._live[handle].seq.untouched


def small_lab(**changes: object) -> Lab:
    return make_lab(settings(encoder_replay="bounded", decoder_replay="off", max_num_batched_tokens=64, **changes))


def assert_served(lab: Lab, handles: list[str], known: list[list[int]]) -> None:
    """Each to its end; those that found nothing, or pages of one that found nothing, as the replay of an exact prefix."""
    exact = True
    for handle, ids in zip(handles, known, strict=True):
        assert lab.ends[handle].finish_reason is FinishReason.LENGTH
        passes = lab.watched.passes[id(ids)]
        if exact:
            assert_equal_to_cold("tiny-a", ids, passes[-1:], replayed=True)
        exact = exact and not (handle == handles[0] and passes[-1].hit)
    lab.assert_empty()


def test_a_waiting_sequence_computes_what_its_leader_computes() -> None:
    lab = small_lab()
    before = lab.watched.model.work.source_rows
    handles = together(lab)
    known = [lab.ids(handle) for handle in handles]
    lab.run()
    assert [lab.ends[handle].cached_tokens for handle in handles] == [0, 288, 288, 288]
    assert lab.watched.model.work.source_rows - before == 310 + 3 * (310 - 288 + 16) + len(handles)
    assert_served(lab, handles, known)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("loss", ["cancelled", "preempted"])
def test_a_leader_that_goes_leaves_its_followers_waiting(loss: str, steps: int) -> None:
    """The next in rank takes over, from where the pages that can be found end."""
    lab = small_lab()
    handles = together(lab)
    known = [lab.ids(handle) for handle in handles]
    for _ in range(steps):
        lab.step()
    done = lab.engine._live[handles[0]].seq.num_encoded
    if loss == "cancelled":
        assert lab.engine.abort(handle=handles[0])
    else:
        seq = lab.engine._live[handles[0]].seq
        lab.engine._scheduler.open.remove(seq)
        lab.watched.close(seq.preempt())
        lab.engine._scheduler.waiting.insert(0, seq)
    lab.step()
    left = handles if loss == "preempted" else handles[1:]
    assert [untouched(lab, handle) for handle in left] == [False] + [True] * (len(left) - 1)
    first = lab.engine._live[left[0]].seq
    found = done // PAGE * PAGE
    assert first.memory is not None
    assert first.memory.num_cached == (found if found >= 32 else 0)
    lab.run()
    assert_served(lab, left, known[-len(left) :])


def test_a_failed_step_leaves_pages_to_be_found() -> None:
    """It ends all that hold memory; whoever comes next finds nothing of theirs, and is served."""
    lab = small_lab()
    handles = together(lab)
    lab.step()
    lab.watched.fail_in = 1
    lab.step()
    assert [lab.ends[handle].finish_reason for handle in handles] == [FinishReason.ERROR] * 4
    assert lab.watched.usage().bytes_cached == 0
    again = together(lab)
    known = [lab.ids(handle) for handle in again]
    lab.run()
    assert [lab.ends[handle].cached_tokens for handle in again] == [0, 288, 288, 288]
    assert_served(lab, again, known)


def test_a_higher_priority_waits_for_a_lower_one() -> None:
    lab = small_lab()
    low = lab.add(ids_of(0, 300), max_tokens=2, priority=3)
    lab.step()
    high = lab.add(ids_of(1, 300), max_tokens=2, priority=-1)
    equal = lab.add(ids_of(2, 300), max_tokens=2, priority=3)
    known = [lab.ids(handle) for handle in (low, high, equal)]
    lab.step()
    assert [untouched(lab, handle) for handle in (low, high, equal)] == [False, False, True]
    lab.until(lambda: bool(lab.ready))
    assert high in lab.ready, "it found what the other had encoded when it came"
    for handle in lab.ready:
        lab.engine.attach(handle)
    lab.run()
    assert_served(lab, [low, high, equal], known)


def test_a_follower_waits_longer_than_for_what_both_have() -> None:
    """Leader of 1,000 tokens, 128 of them shared: one step of 64 more than these is not waited for."""
    lab = small_lab()
    shared = text(1, 128)
    leader = lab.add(shared + text(2, 900), max_tokens=1)
    follower = lab.add(shared + text(3, 40), max_tokens=1)
    for _ in range(2):
        lab.step()
        assert untouched(lab, follower)
    assert lab.engine._live[leader].seq.num_encoded == 128
    lab.step()
    assert not untouched(lab, follower)
    lab.run()
    assert lab.ends[follower].cached_tokens == 128


@pytest.mark.parametrize(
    ("leader", "follower"), [(leader, follower) for leader in MODES[::2] for follower in MODES[1::2]] + [(MODES[4], MODES[3])]
)
def test_a_sequence_waits_for_what_it_cannot_use(
    leader: tuple[EncoderReplay, DecoderReplay], follower: tuple[EncoderReplay, DecoderReplay]
) -> None:
    """Without encoder replay a hit needs a snapshot, which only such sequences take; with all layers, only OFF ones do."""
    lab = make_lab(settings(max_num_batched_tokens=64), tight_runner("tiny-a", pages=60, slots=6))
    first = lab.add(ids_of(0, 300), max_tokens=1, encoder_replay=leader[0], decoder_replay=leader[1])
    lab.step()
    prompt = ids_of(0, 300) + text(5, 60)
    second = lab.add(prompt, max_tokens=1, encoder_replay=follower[0], decoder_replay=follower[1])
    lab.step()
    waited = untouched(lab, second)
    lab.run()
    assert waited == (lab.ends[second].cached_tokens > 0)
    assert lab.ends[first].finish_reason is lab.ends[second].finish_reason is FinishReason.LENGTH


def steps_until_ready(shared: bool, *, pages: int, slots: int, others: list[tuple[int, int, int]]) -> int:
    """Steps from the arrival of a prompt of 310 tokens to its encoding; the one of 700 that came first has its beginning, or not.

    others: (tokens, priority, max_tokens) of prompts that share nothing; priority 0 ones came before, lower ones after.
    """
    lab = make_lab(
        settings(max_num_batched_tokens=64, encoder_replay="bounded"), tight_runner("tiny-a", pages=pages, slots=slots)
    )
    before = [(300 + n, length, most) for n, (length, priority, most) in enumerate(others) if priority == 0]
    after = [(400 + n, length, priority, most) for n, (length, priority, most) in enumerate(others) if priority > 0]
    for seed, length, most in before:
        lab.add(text(seed, length), max_tokens=most)
    lab.add(text(1, 300) + text(2, 400), max_tokens=2)
    lab.step()
    handle = lab.add(text(1 if shared else 5, 300) + text(3, 10), max_tokens=2)
    for seed, length, priority, most in after:
        lab.add(text(seed, length), max_tokens=most, priority=priority)
    steps = 0

    def is_ready() -> bool:
        nonlocal steps
        steps += 1
        for other in lab.ready - {handle}:
            lab.engine.attach(other)
        return handle in lab.ready

    lab.until(is_ready)
    lab.engine.abort(handle=handle)
    lab.run()
    lab.assert_empty()
    return steps


def test_a_prompt_with_a_known_beginning_starves_behind_long_ones() -> None:
    """Its leader is the last of several long prompts and gets few rows: it must not wait longer than it would have to work."""
    room = {"pages": 400, "slots": 8, "others": [(600, 0, 2)] * 3}
    assert steps_until_ready(True, **room) <= steps_until_ready(False, **room) + 1


def test_a_worse_priority_takes_the_memory_of_one_that_yields() -> None:
    room = {"pages": 68, "slots": 3, "others": [(20, 9, 100)]}
    assert steps_until_ready(True, **room) <= steps_until_ready(False, **room) + 1


# memory


def test_a_crowd_needs_memory_for_a_prefix_each() -> None:
    """Eight of 19 pages come to a pool of 45: they share as soon as they can, and nobody is preempted."""
    lab = make_lab(settings(encoder_replay="bounded", max_num_batched_tokens=64), tight_runner("tiny-a", pages=45, slots=8))
    handles = [lab.add(ids_of(number, 280), max_tokens=2) for number in range(8)]
    lab.until(lambda: len(lab.ready) == 8)
    assert lab.watched.usage().pages_used == 17 + 8 * 2
    for handle in handles:
        lab.engine.attach(handle)
    lab.run()
    assert "preemptions_total" not in lab.counts.counters
    lab.assert_empty()


def test_a_hit_needs_memory_for_what_others_hold() -> None:
    """200 of 256 shared tokens are held by one sequence: the second fits beside it into a pool of one and a quarter."""
    lab = make_lab(settings(encoder_replay="bounded"), tight_runner("tiny-a", pages=21, slots=2))
    first = lab.add(text(1, 256), max_tokens=20)
    lab.until(lambda: first in lab.ready)
    second = lab.add(text(1, 256) + text(2, 30), max_tokens=2)
    lab.until(lambda: second in lab.ready)
    assert lab.watched.usage().pages_used == 19
    assert lab.counts.counters.get("preemptions_total", 0) == 0
    lab.engine.attach(first)
    lab.engine.attach(second)
    lab.run()
    lab.assert_empty()


@pytest.mark.parametrize(("encoder", "decoder"), MODES[::2])
def test_a_pool_for_one_and_a_half_sequences_never_finishes(encoder: EncoderReplay, decoder: DecoderReplay) -> None:
    """Three sequences that cannot grow to their ends together: no livelock, the oldest is never preempted, nothing is lost."""
    config = settings(encoder_replay=encoder.value, decoder_replay=decoder.value, max_num_batched_tokens=48)
    lab = make_lab(config, tight_runner("tiny-a", pages=9, slots=3))
    handles = [lab.add(text(seed, 50), max_tokens=40) for seed in range(3)]  # 6 pages each at the end
    known = [lab.ids(handle) for handle in handles]
    lab.run(limit=400)
    assert lab.counts.counters["preemptions_total"] >= 1
    assert len(lab.watched.passes[id(known[0])]) == 1
    assert list(lab.ends) == handles
    for handle, ids in zip(handles, known, strict=True):
        assert lab.ends[handle].num_output_tokens == 40
        if encoder is EncoderReplay.OFF:
            assert_equal_to_cold("tiny-a", ids, lab.watched.passes[id(ids)])
    lab.assert_empty()


def test_snapshots_keep_the_slots_that_sequences_need() -> None:
    """They fill every slot that is left and give way, the least recently used first."""
    lab = make_lab(settings(), tight_runner("tiny-a", pages=200, slots=4))
    for seed in range(6):
        lab.ask(text(seed, 40), max_tokens=1)
    cache = lab.watched.cache
    assert cache.snapshots == 3  # the fourth was the sequence's own
    handles = [lab.add(text(20 + seed, 40), max_tokens=1) for seed in range(3)]
    lab.until(lambda: len(lab.ready) == 9)
    assert (cache.sequences, cache.snapshots) == (3, 1)
    for handle in handles:
        lab.engine.attach(handle)
    lab.run()
    assert lab.ask(text(20, 40) + text(9, 5), max_tokens=1).cached == 32
    assert lab.ask(text(5, 40) + text(9, 5), max_tokens=1).cached == 0
    lab.assert_empty()


def test_usage_forgets_what_is_cached() -> None:
    """Cached bytes are no used bytes, and clearing the cache takes them to 0 and nothing else."""
    lab = make_lab(settings())
    lab.ask(text(1, 300), max_tokens=1)
    handle = lab.add(text(1, 300) + text(2, 40), max_tokens=4)
    lab.until(lambda: handle in lab.ready)
    before = lab.watched.usage()
    assert before.bytes_cached > 0
    forgotten = lab.engine.clear_cache()
    assert forgotten % PAGE == 0 < forgotten
    after = lab.watched.usage()
    assert (after.bytes_used, after.bytes_cached) == (before.bytes_used, 0)
    ids = lab.ids(handle)
    lab.engine.attach(handle)
    lab.run()
    assert_equal_to_cold("tiny-a", ids, lab.watched.passes[id(ids)])
    assert lab.ask(text(1, 300), max_tokens=1).cached == 0
    assert np.isfinite(lab.watched.usage().kv_bytes_per_token)
    lab.assert_empty()
