# SPDX-License-Identifier: Apache-2.0
"""Who runs when: budget, fairness, delay, memory, preemption."""

from __future__ import annotations

import pytest
from fake_runner import EOS, Bench, expected_tokens, make_bench, request

from cedar.engine.request import DecoderReplay, FinishReason
from cedar.engine.scheduler import ATTACH_GRACE_NS

SHORT, LONG = 5, 400


def chunks_of(bench: Bench, ids: tuple[int, ...]) -> list[int]:
    """Chunk length per step of the prompt ``ids``."""
    out = []
    for work in bench.runner.steps:
        items = [item for item in work.prefills if tuple(item.token_ids) == ids[item.start : item.start + len(item.token_ids)]]
        out.append(sum(len(item.token_ids) for item in items))
    return out


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 33, 64])
@pytest.mark.parametrize("mode", list(DecoderReplay))
def test_no_step_exceeds_the_budget_but_by_one_tail(budget: int, mode: DecoderReplay) -> None:
    bench = make_bench(max_num_batched_tokens=budget, max_num_seqs=6, decoder_replay=mode.value)
    prompts = {f"r{i}": n for i, n in enumerate([1, 3, 40, 9, 100, 2, 17, 8, 31, 5])}
    handles = {bench.engine.add(request(key, n, max_tokens=6)): key for key, n in prompts.items()}
    bench.run()
    for work, rows in zip(bench.runner.steps, bench.runner.rows, strict=True):
        assert rows <= budget or (len(work.tails) == 1 and not work.prefills and len(work.decodes) < budget)
    assert {bench.ends[h].finish_reason for h in handles} == {FinishReason.LENGTH}
    for handle, key in handles.items():
        assert bench.tokens[handle] == expected_tokens(request(key, prompts[key]).input_ids, 6)


def test_tails_are_charged_with_the_rows_they_keep() -> None:
    bench = make_bench(max_num_batched_tokens=16, decoder_replay="bounded")  # window 8: two tails fill a step
    for i in range(4):
        bench.engine.add(request(f"r{i}", 12))
    bench.until(lambda: len(bench.ready) == 4)
    for handle in bench.ready:
        bench.engine.attach(handle)
    first = len(bench.runner.steps)
    bench.run()
    assert [len(work.tails) for work in bench.runner.steps[first : first + 3]] == [2, 1, 1]
    assert bench.runner.rows[first : first + 3] == [16, 2 + 8, 3 + 8]


def test_decodes_beyond_the_budget_take_turns_and_prompts_still_advance() -> None:
    bench = make_bench(max_num_batched_tokens=4, max_num_seqs=7, decoder_replay="off")
    for i in range(6):
        bench.engine.add(request(f"d{i}", 2, max_tokens=30))
    bench.until(lambda: [bench.engine.attach(h) for h in bench.ready] and len(bench.tokens) == 6 and all(bench.tokens.values()))
    late = request("late", 20, max_tokens=1)
    handle = bench.engine.add(late)
    first = len(bench.runner.steps)
    before = {h: len(t) for h, t in bench.tokens.items()}
    bench.until(lambda: handle in bench.ready)
    steps = bench.runner.steps[first:]
    assert all(len(work.decodes) == 3 for work in steps)
    assert all(sum(len(p.token_ids) for p in work.prefills) == 1 for work in steps)
    gained = [len(bench.tokens[h]) - n for h, n in before.items()]
    assert max(gained) - min(gained) <= 1
    bench.engine.attach(handle)
    bench.run()


def test_short_request_waits_for_no_chunk_of_a_long_prompt_but_the_running_one() -> None:
    """From arrival to first token not one token of the long prompt is encoded: its running chunk is all it waits for."""
    bench = make_bench(max_num_batched_tokens=32)
    bench.engine.add(request("long", LONG))
    for _ in range(3):
        bench.step()
    short = bench.engine.add(request("short", SHORT))
    first = len(bench.runner.steps)
    bench.until(lambda: short in bench.ready)
    bench.clock.pass_ms(1)  # the attach travels
    bench.engine.attach(short)
    bench.until(lambda: bool(bench.tokens[short]))
    assert bench.runner.rows[first:] == [SHORT, SHORT]  # its prompt, its tail
    bench.run()


def test_bulk_waits_for_an_attach_that_is_on_its_way_but_not_longer() -> None:
    bench = make_bench(max_num_batched_tokens=800)
    long = request("long", 3000)
    bench.engine.add(long)
    bench.step()  # a chunk of 81 ms
    short = bench.engine.add(request("short", SHORT))
    bench.until(lambda: short in bench.ready)
    assert bench.step() == []
    assert not bench.engine.has_work()
    ready_at = bench.clock.now
    assert bench.engine.next_deadline() == ready_at + ATTACH_GRACE_NS
    bench.clock.now += ATTACH_GRACE_NS - 1
    assert not bench.engine.has_work()
    bench.clock.now += 1
    assert bench.engine.has_work()
    before = sum(chunks_of(bench, long.input_ids))
    bench.step()
    assert sum(chunks_of(bench, long.input_ids)) == before + 800
    bench.engine.abort(handle=short)
    bench.run()


def test_an_attach_ends_the_hold_at_once() -> None:
    bench = make_bench(max_num_batched_tokens=400)
    bench.engine.add(request("long", 2000))
    bench.step()
    short = bench.engine.add(request("short", SHORT))
    bench.until(lambda: short in bench.ready)
    bench.step()
    assert not bench.engine.has_work()
    bench.engine.attach(short)
    assert bench.engine.has_work()
    bench.step()
    assert len(bench.tokens[short]) == 1
    bench.run()


@pytest.mark.parametrize("live", [4, 30])
def test_endless_short_requests_leave_a_quarter_of_the_time_to_the_long_prompt(live: int) -> None:
    """Also when they alone could fill every step."""
    alone = make_bench(max_num_batched_tokens=32)
    alone.engine.add(request("long", LONG))
    alone.until(lambda: bool(alone.ready))
    bench = make_bench(max_num_batched_tokens=32, max_num_seqs=64)
    long = bench.engine.add(request("long", LONG))
    start, serial = bench.clock.now, 0
    while long not in bench.ready:
        while bench.engine.num_live < live:
            serial += 1
            bench.engine.add(request(f"s{serial}", SHORT, max_tokens=1))
        for update in bench.step():
            if update.ready:
                bench.engine.attach(update.handle)
    assert bench.clock.now - start <= 4 * (alone.clock.now - start) + 2 * max(bench.runner.rows) * 100_000
    assert serial > 20
    bench.run()


def test_a_middle_sized_prompt_does_not_wait_for_a_longer_one() -> None:
    """Half of the room goes to whoever is nearest to the end."""
    bench = make_bench(max_num_batched_tokens=32)
    long, middle = request("long", LONG), request("middle", 60)
    bench.engine.add(long)
    bench.step()
    handle = bench.engine.add(middle)
    first = len(bench.runner.steps)
    bench.until(lambda: handle in bench.ready)
    assert chunks_of(bench, middle.input_ids)[first:] == [16, 16, 16, 12]
    assert chunks_of(bench, long.input_ids)[first:] == [16, 16, 16, 20]
    bench.run()


def test_the_oldest_long_prompt_keeps_half_of_the_room_whatever_comes() -> None:
    bench = make_bench(max_num_batched_tokens=32, max_num_seqs=16)
    long = bench.engine.add(request("long", LONG))
    steps, serial = 0, 0
    while long not in bench.ready:
        while bench.engine.num_live < 12:
            serial += 1
            bench.engine.add(request(f"m{serial}", 40, max_tokens=1))
        for update in bench.step():
            if update.ready:
                bench.engine.abort(handle=update.handle) if update.handle != long else bench.engine.attach(long)
        steps += 1
    assert steps <= 2 * -(-LONG // 32) + 1
    bench.run()


def test_tails_of_short_prompts_are_charged_with_the_rows_that_there_are() -> None:
    """And not with a whole window each: they fit into one step."""
    bench = make_bench(max_num_batched_tokens=16, decoder_replay="bounded")
    handles = [bench.engine.add(request(f"r{i}", 2)) for i in range(6)]
    bench.until(lambda: len(bench.ready) == 6)
    for handle in handles:
        bench.engine.attach(handle)
    bench.step()
    assert len(bench.runner.steps[-1].tails) == 6
    bench.run()


def test_priority_goes_before_arrival_in_the_queue_and_in_the_chunks() -> None:
    bench = make_bench(max_num_batched_tokens=32, max_num_seqs=1)
    handles = [bench.engine.add(request(f"r{i}", 10, priority=p)) for i, p in enumerate([5, 0, -3, 0])]
    order = []
    while len(bench.ends) < 4:
        for update in bench.step():
            if update.ready:
                order.append(handles.index(update.handle))
                bench.engine.attach(update.handle)
    assert order == [2, 1, 3, 0]


def test_equal_prompts_finish_in_order_of_arrival() -> None:
    bench = make_bench(max_num_batched_tokens=32)
    handles = [bench.engine.add(request(f"r{i}", 100)) for i in range(5)]
    order = []
    for _ in range(100):
        order += [handles.index(update.handle) for update in bench.step() if update.ready]
        if len(order) == 5:
            break
    assert order == [0, 1, 2, 3, 4]


def test_open_sequences_never_exceed_max_num_seqs() -> None:
    bench = make_bench(max_num_seqs=3)
    for i in range(10):
        bench.engine.add(request(f"r{i}", 6, max_tokens=5))
    most = 0
    for _ in range(200):
        for update in bench.step():
            if update.ready:
                bench.engine.attach(update.handle)
        most = max(most, len(bench.runner.memories))
        if not bench.engine.num_live:
            break
    assert most == 3
    assert len(bench.ends) == 10


def test_nobody_overtakes_a_head_that_waits_for_memory() -> None:
    bench = make_bench(pages=30)
    first = bench.engine.add(request("first", 60, max_tokens=20))
    bench.until(lambda: first in bench.ready)
    big = bench.engine.add(request("big", 80, max_tokens=1))
    small = bench.engine.add(request("small", 2, max_tokens=1))
    for _ in range(5):
        bench.step()
    assert len(bench.runner.memories) == 1
    assert not bench.engine.has_work()  # waits for an attach or a lease, without spinning
    bench.engine.attach(first)
    bench.run()
    assert list(bench.ends) == [first, *[h for h in bench.ends if h in (big, small)]]


def test_a_pool_for_one_and_a_half_sequences_finishes_both_exactly() -> None:
    """No livelock: two sequences that cannot both grow to their end take turns and lose nothing."""
    prompts = [request("a", 20, max_tokens=40), request("b", 20, max_tokens=40)]
    bench = make_bench(pages=1 + 15 + 8, decoder_replay="off")  # each needs 1 + 15 pages at its end
    handles = [bench.engine.add(prompt) for prompt in prompts]
    bench.run(limit=500)
    assert bench.counts.counters["preemptions_total"] >= 1
    for handle, prompt in zip(handles, prompts, strict=True):
        assert bench.ends[handle].finish_reason is FinishReason.LENGTH
        assert bench.tokens[handle] == expected_tokens(prompt.input_ids, 40)
    assert bench.runner.pages_used == 0


def test_a_thrashing_pool_of_many_sequences_finishes_exactly() -> None:
    bench = make_bench(pages=40, max_num_seqs=8, decoder_replay="bounded")
    prompts = [request(f"r{i}", 3 + 5 * i, max_tokens=25, priority=i % 2) for i in range(12)]
    handles = [bench.engine.add(prompt) for prompt in prompts]
    bench.run(limit=2000)
    assert bench.counts.counters["preemptions_total"] >= 3
    for handle, prompt in zip(handles, prompts, strict=True):
        assert bench.tokens[handle] == expected_tokens(prompt.input_ids, 25)
    assert bench.runner.pages_used == 0


def test_preemption_takes_the_last_in_rank_first() -> None:
    bench = make_bench(pages=23, decoder_replay="off")
    low = bench.engine.add(request("low", 12, max_tokens=30, priority=1))
    high_old = bench.engine.add(request("old", 12, max_tokens=30))
    high_new = bench.engine.add(request("new", 12, max_tokens=30))
    preempted = []
    while not bench.engine.stats().num_waiting or len(bench.ready) < 3:
        for update in bench.step():
            if update.ready:
                bench.engine.attach(update.handle)
    preempted = [h for h in (low, high_old, high_new) if bench.engine._live[h].seq.memory is None]
    assert preempted == [low]
    bench.run()
    assert list(bench.ends)[-1] == low


def test_a_runner_that_breaks_its_word_about_memory_ends_the_request_not_the_engine() -> None:
    bench = make_bench(pages=10)
    bench.runner.fits = lambda num_tokens, mode: True
    never_opens = bench.engine.add(request("big", 100, max_tokens=1))
    never_grows = bench.engine.add(request("grows", 20, max_tokens=100))
    good = bench.engine.add(request("good", 5, max_tokens=3))
    bench.run(limit=300)
    for handle in (never_opens, never_grows):
        assert bench.ends[handle].finish_reason is FinishReason.ERROR
        assert "request_key" in bench.ends[handle].error.message
        assert "kv budget" in bench.ends[handle].error.message
    assert bench.ends[good].finish_reason is FinishReason.LENGTH
    assert EOS not in bench.tokens[good]
    assert bench.runner.pages_used == 0


def test_memory_that_fits_to_the_last_page_is_used() -> None:
    """A prompt that fills the pool and wants one token needs no room for a second one."""
    bench = make_bench(pages=6)
    handle = bench.engine.add(request("full", 20, max_tokens=1))
    bench.run()
    assert bench.ends[handle].finish_reason is FinishReason.LENGTH


def test_memory_freed_by_a_preemption_that_leaves_nothing_to_run_goes_to_the_head_of_the_queue() -> None:
    bench = make_bench(pages=20, decoder_replay="off")
    bench.engine.add(request("unattached", 16, priority=-2))
    grows = bench.engine.add(request("grows", 20, max_tokens=40, priority=1))
    bench.until(lambda: len(bench.ready) == 2)
    bench.engine.attach(grows)
    head = bench.engine.add(request("head", 24))
    bench.until(lambda: "preemptions_total" in bench.counts.counters)
    assert bench.engine.has_work()
    bench.step()
    assert head in bench.ready
    bench.run()


@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_prompt_chunks_never_exceed_the_budget_and_give_the_same_tokens(chunk: int) -> None:
    bench = make_bench(max_num_batched_tokens=chunk, decoder_replay="exact")
    prompt = request("p", 130, max_tokens=8)
    handle = bench.engine.add(prompt)
    bench.run()
    assert max(chunks_of(bench, prompt.input_ids)) == min(chunk, 130)
    assert bench.tokens[handle] == expected_tokens(prompt.input_ids, 8)
    assert bench.encoded[handle] == sorted(set(bench.encoded[handle]))
    assert bench.encoded[handle][-1] == 130
