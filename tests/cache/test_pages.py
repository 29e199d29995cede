# SPDX-License-Identifier: Apache-2.0
"""The pools under constant pressure: pages and slots that leak, are used twice, or are forgotten in the wrong order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from cache_model import BOUNDARY, MAX_PAGES, NUM_SLOTS, PAGE, CacheModel, Live, Wanted
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cedar.cache.pages import PageName, PagePool
from cedar.cache.prefix import TokenChain

LENGTHS = st.integers(1, MAX_PAGES * PAGE)
WANTED = st.builds(Wanted, st.integers(0, 3), LENGTHS, st.sampled_from(["", "", "", "b"]), LENGTHS, st.integers(0, BOUNDARY // 3))
WHICH = st.integers(0, NUM_SLOTS - 1)


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls that the runner may make."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CacheModel()

    def seq(self, which: int) -> Live:
        return self.model.live[which % len(self.model.live)]

    @rule(wanted=WANTED, bounded=st.booleans())
    def open(self, wanted: Wanted, bounded: bool) -> None:
        self.model.open(wanted, bounded=bounded)

    @rule(wanted=WANTED, all_layers=st.booleans())
    def open_at_snapshot(self, wanted: Wanted, all_layers: bool) -> None:
        self.model.open_at_snapshot(wanted, all_layers=all_layers)

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH, num_tokens=st.integers(0, MAX_PAGES * PAGE + 1))
    def reserve(self, which: int, num_tokens: int) -> None:
        self.model.reserve(self.seq(which), num_tokens)

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH, count=st.integers(1, 3 * PAGE), publish=st.booleans())
    def advance(self, which: int, count: int, publish: bool) -> None:
        if self.model.advance(self.seq(which), count) and publish:
            self.model.publish(self.seq(which))

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH, all_layers=st.booleans())
    def take_snapshot(self, which: int, all_layers: bool) -> None:
        self.model.take_snapshot(self.seq(which), all_layers=all_layers)

    @precondition(lambda self: self.model.pending)
    @rule(which=WHICH, keep=st.booleans())
    def end_snapshot(self, which: int, keep: bool) -> None:
        self.model.end_snapshot(which, keep=keep)

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH, action=st.sampled_from([CacheModel.close, CacheModel.preempt, CacheModel.discharge]))
    def other(self, which: int, action: Callable[[CacheModel, Live], None]) -> None:
        action(self.model, self.seq(which))

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH)
    def close_poisoned(self, which: int) -> None:
        self.model.close(self.seq(which), forget=True)

    @rule()
    def clear(self) -> None:
        self.model.clear()

    @invariant()
    def agrees(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.close_all()


def test_any_order_of_calls_leaks_or_shares_too_much() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None))


@pytest.mark.slow
def test_any_long_order_of_calls_leaks_or_shares_too_much() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=1000, stateful_step_count=80, deadline=None))


def random_step(model: CacheModel, choice: random.Random) -> None:
    """One call, weighted as a busy server makes them: much computing, rarely a clear."""
    seq = choice.choice(model.live) if model.live else None
    wanted = Wanted(
        stem=choice.randrange(4),
        length=MAX_PAGES * PAGE,
        salt=choice.choice(["", "", "", "b"]),
        limit=choice.randint(1, MAX_PAGES * PAGE),
        charge=choice.randrange(BOUNDARY // 3),
    )
    action = choice.choices(
        ["open", "at snapshot", "advance", "publish", "snapshot", "end", "discharge", "close", "preempt", "clear"],
        [10, 10, 30, 15, 15, 15, 2, 14, 3, 0.5],
    )[0]
    flag = choice.random() < 0.5
    if action == "open":
        model.open(wanted, bounded=flag)
    elif action == "at snapshot":
        model.open_at_snapshot(wanted, all_layers=flag)
    elif action == "end" and model.pending:
        model.end_snapshot(0, keep=choice.random() < 0.8)
    elif action == "clear":
        model.clear()
    elif seq is None:
        return
    elif action == "advance":
        model.advance(seq, choice.randint(1, 3 * PAGE))
    elif action == "publish":
        model.publish(seq)
    elif action == "snapshot":
        model.take_snapshot(seq, all_layers=flag)
    elif action == "discharge":
        model.discharge(seq)
    elif action == "close":
        model.close(seq, forget=choice.random() < 0.05)
    elif action == "preempt":
        model.preempt(seq)


def test_ten_thousand_random_steps_leak() -> None:
    model, choice = CacheModel(), random.Random(20)
    for _ in range(10_000):
        random_step(model, choice)
        model.check()
    assert min(model.events.values()) >= 20, model.events
    model.close_all()


# one pool alone


def chain_of(*parts: int, salt: str = "") -> TokenChain:
    """One page per part."""
    return TokenChain([part for part in parts for _ in range(2)], salt, 2)


def name_of(chain: TokenChain, number: int, *, exact: bool = True) -> PageName:
    return PageName(chain.digest(number), exact, chain.digest(number - 1) if number else b"")


def publish(pool: PagePool, chain: TokenChain, pages: list[int], *, exact: bool = True, first: int = 0) -> None:
    for number, page in enumerate(pages, first):
        pool.publish(page, name_of(chain, number, exact=exact))


def taken(pool: PagePool, count: int) -> list[int]:
    pages = pool.take(count)
    assert pages is not None
    return pages


def test_the_null_page_is_given_out() -> None:
    pool = PagePool(3)
    assert sorted(taken(pool, 3)) == [1, 2, 3]
    assert pool.take(1) is None


def test_a_take_that_fails_forgets_pages() -> None:
    pool = PagePool(3)
    chain, pages = chain_of(1, 2), taken(pool, 2)
    publish(pool, chain, pages)
    pool.give_back(reversed(pages))
    assert pool.take(4) is None
    assert pool.find(chain, 2, exact=True) == pages


def test_the_beginning_of_a_prefix_is_forgotten_first() -> None:
    pool = PagePool(4)
    chain, pages = chain_of(1, 2, 3, 4), taken(pool, 4)
    publish(pool, chain, pages)
    pool.give_back(reversed(pages))
    for left in (3, 2, 1, 0):
        taken(pool, 1)
        assert pool.find(chain, 4, exact=True) == pages[:left]


def test_a_page_of_recent_use_is_forgotten_first() -> None:
    pool = PagePool(2)
    old, new = chain_of(1), chain_of(2)
    for chain in (old, new):
        pages = taken(pool, 1)
        publish(pool, chain, pages)
        pool.give_back(pages)
    hit = pool.find(old, 1, exact=True)
    pool.share(hit)
    pool.give_back(hit)
    taken(pool, 1)
    assert pool.find(old, 1, exact=True) == hit
    assert pool.find(new, 1, exact=True) == []


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_a_beginning_that_two_computed_ages_from_when_the_first_ended(first_ends_first: bool) -> None:
    pool = PagePool(6)
    chain = chain_of(1, 2, 3)
    short, long = taken(pool, 2), taken(pool, 3)
    publish(pool, chain, short)
    publish(pool, chain, long)
    assert pool.find(chain, 3, exact=True) == [*short, long[2]]
    pool.give_back(reversed(short if first_ends_first else long))
    pool.give_back(reversed(long if first_ends_first else short))
    assert pool.num_idle == 3
    taken(pool, 4)  # the three that are free, and one more
    found = pool.find(chain, 3, exact=True)
    assert found == (long[:2] if first_ends_first else short)


def test_an_idle_page_outlives_one_in_use_that_replaces_it() -> None:
    forgotten: list[PageName] = []
    pool = PagePool(4, forgotten.append)
    chain, first = chain_of(1), taken(pool, 1)
    publish(pool, chain, first)
    pool.give_back(first)
    second = taken(pool, 1)
    publish(pool, chain, second)
    assert pool.find(chain, 1, exact=True) == second
    assert (pool.num_idle, pool.num_in_use, pool.num_available) == (0, 1, 3)
    assert forgotten == []


def test_an_exact_request_finds_a_bounded_page() -> None:
    pool = PagePool(5)
    chain, bounded = chain_of(1, 2, 3), taken(pool, 3)
    publish(pool, chain, bounded, exact=False)
    assert pool.find(chain, 3, exact=False) == bounded
    assert pool.find(chain, 3, exact=True) == []
    exact = taken(pool, 1)
    publish(pool, chain, exact)
    assert pool.find(chain, 3, exact=False) == [*exact, *bounded[1:]]
    assert pool.find(chain, 3, exact=True) == exact


def test_a_longer_run_than_asked_for_is_found() -> None:
    pool = PagePool(3)
    chain, pages = chain_of(1, 2, 3), taken(pool, 3)
    publish(pool, chain, pages)
    assert [pool.find(chain, most, exact=True) for most in range(5)] == [pages[:most] for most in (0, 1, 2, 3, 3)]


def test_a_name_that_another_page_keeps_is_reported_forgotten() -> None:
    forgotten: list[PageName] = []
    pool = PagePool(2, forgotten.append)
    chain, first, second = chain_of(1), taken(pool, 1), taken(pool, 1)
    publish(pool, chain, first)
    publish(pool, chain, second)
    pool.give_back(first)
    assert forgotten == []
    assert pool.is_known(PageName(chain.digest(0), True))
    assert not pool.is_published(first[0])
    pool.give_back(second)
    taken(pool, 2)
    assert forgotten == [PageName(chain.digest(0), True)]


def test_clear_takes_pages_from_sequences_or_keeps_names() -> None:
    forgotten: list[PageName] = []
    pool = PagePool(4, forgotten.append)
    chain, pages, other = chain_of(1, 2), taken(pool, 2), taken(pool, 1)
    publish(pool, chain, pages)
    publish(pool, chain, other)
    pool.give_back(pages[1:])
    assert pool.clear() == 2
    assert set(forgotten) == {name_of(chain, 0), name_of(chain, 1)}
    assert len(forgotten) == 2
    assert (pool.num_idle, pool.num_in_use) == (0, 2)
    assert pool.find(chain, 2, exact=False) == []
    pool.give_back([*pages[:1], *other])
    assert (pool.num_idle, pool.num_available) == (0, 4)


def test_what_was_computed_from_a_poisoned_page_is_found() -> None:
    """Page 2 of A is poisoned. B went on behind it, C has computed it alone, D parted before it."""
    pool = PagePool(12)
    chains = {name: chain_of(*parts) for name, parts in {"A": (1, 2, 3), "B": (1, 2, 4, 5), "D": (1, 6)}.items()}
    a = taken(pool, 3)
    publish(pool, chains["A"], a)
    pool.share(a[:2])
    b = taken(pool, 2)
    publish(pool, chains["B"], b, exact=False, first=2)
    pool.share(a[:1])
    d = taken(pool, 1)
    publish(pool, chains["D"], d, first=1)
    c = taken(pool, 2)
    publish(pool, chains["A"], c)
    for pages in ([*a[:2], *b], [*a[:1], *d], c):
        pool.give_back(reversed(pages))
    assert pool.find(chains["B"], 4, exact=False) == [*a[:2], *b]
    pool.forget(a[1:])
    assert pool.find(chains["A"], 3, exact=False) == pool.find(chains["B"], 4, exact=False) == a[:1]
    assert pool.find(chains["D"], 2, exact=True) == [*a[:1], *d]
    pool.give_back(reversed(a))
    assert (pool.num_in_use, pool.num_idle) == (0, 2)
    again = taken(pool, 1)
    publish(pool, chains["A"], again, first=1)
    assert pool.find(chains["B"], 4, exact=False) == [*a[:1], *again]


def test_misuse_corrupts_the_pool() -> None:
    pool = PagePool(3)
    page, name = taken(pool, 1), PageName(chain_of(1).digest(0), True)
    with pytest.raises(RuntimeError, match=r"page 1 is shared but nobody published it"):
        pool.share(page)
    pool.publish(page[0], name)
    with pytest.raises(RuntimeError, match=r"page 1 is published but has a name"):
        pool.publish(page[0], name)
    pool.give_back(page)
    with pytest.raises(RuntimeError, match=r"page 1 was given back more often than it was taken"):
        pool.give_back(page)
    with pytest.raises(RuntimeError, match=r"page 2 is published but nobody uses it"):
        pool.publish(2, name)
    assert (pool.num_idle, pool.num_available) == (1, 3)
