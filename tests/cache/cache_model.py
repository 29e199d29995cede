# SPDX-License-Identifier: Apache-2.0
"""A `KVCache` driven side by side with a naive account of it, which is compared after every step (`CacheModel.check`).

The naive account names a page by the tokens up to its end, knows the last use of everything, and searches where the
cache looks up. Tokens are written into a page here, not in a tensor; what rings hold is really written and copied.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from cedar.cache.pages import PageName
from cedar.cache.prefix import Digest, TokenChain
from cedar.cache.records import CacheFormats, FloatRecords
from cedar.cache.slots import Snapshot
from cedar.cache.store import CacheSizes, KVCache, SequenceBlocks, page_bytes, slot_bytes
from cedar.config.model import ModelConfig
from cedar.config.presets import preset

CPU = torch.device("cpu")
PAGE, MAX_PAGES, NUM_PAGES, NUM_SLOTS, BOUNDARY = 4, 9, 17, 7, 250
CONFIG = ModelConfig.from_dict(preset("tiny")).model_copy(update={"max_position_embeddings": MAX_PAGES * PAGE})
FORMATS = CacheFormats(
    window=FloatRecords(CONFIG.head_dim, torch.float32),
    kv=FloatRecords(CONFIG.head_dim, torch.float32),
    index_key=FloatRecords(CONFIG.index_head_dim, torch.float32),
)

EVENTS = (
    *("hit", "restore", "refuse", "reserve", "no room", "evict", "publish", "double", "replace", "forget"),
    *("snapshot", "keep", "evict snapshot", "forget snapshot"),
)

Text = tuple[str, tuple[int, ...]]
"""A salt and tokens from position 0 on: what a page that ends there, or a window, stands for."""
Name = tuple[Text, bool]
"""And whether it was computed exactly."""


def text(stem: int, length: int) -> list[int]:
    """The first tokens of one of a few texts: stems 0 and 1 part after two pages, 2 and 3 after one, the pairs at once."""
    parts = [PAGE, 2 * PAGE][stem < 2]
    return [10 * (stem // 2) + (stem % 2 if position >= parts else 0) for position in range(length)]


@dataclass(frozen=True)
class Wanted:
    """A sequence to open: ``length`` tokens of a text, behind a hit of at most ``limit``."""

    stem: int
    length: int
    salt: str = ""
    limit: int = MAX_PAGES * PAGE
    charge: int = 0

    @property
    def most_pages(self) -> int:
        return min(self.limit, self.length) // PAGE


@dataclass(eq=False)
class Live:
    """An open sequence. exact: nothing it writes follows a bounded replay."""

    blocks: SequenceBlocks
    chain: TokenChain
    wanted: Wanted
    exact: bool
    charge: int
    computed: int
    ids: list[int]

    def text(self, end: int) -> Text:
        return self.wanted.salt, tuple(self.ids[:end])


class CacheModel:
    """Calls on a cache, each with the outcome that the naive account expects."""

    def __init__(self) -> None:
        page, slot = page_bytes(CONFIG, FORMATS, PAGE), slot_bytes(CONFIG, FORMATS, PAGE)
        budget = (NUM_PAGES + 1) * page + (NUM_SLOTS + 1) * slot + BOUNDARY
        self.cache = KVCache(CONFIG, FORMATS, CacheSizes(budget, PAGE, page, slot, BOUNDARY, NUM_PAGES, NUM_SLOTS), CPU)
        self.live: list[Live] = []
        self.pending: list[tuple[Text, Digest, Snapshot]] = []
        self.clock = 0
        self.written: dict[int, Text] = {}
        """By page, what its entries were computed from."""
        self.names: dict[int, Name] = {}
        self.last_use: dict[int, int] = {}
        """Of idle pages."""
        self.snapshots: dict[Text, tuple[Snapshot, int]] = {}
        """With their last use."""
        self.digests: dict[Text, Digest] = {}
        self.events = dict.fromkeys(EVENTS, 0)
        """What happened how often: a run that never evicts proves nothing about eviction."""

    # steps

    def open(self, wanted: Wanted, *, bounded: bool) -> None:
        """bounded: a hit on pages of any provenance does."""
        ids = text(wanted.stem, wanted.length)
        chain = TokenChain(ids, wanted.salt, PAGE)
        pages = self.cache.match(chain, min(wanted.limit, wanted.length), exact=not bounded)
        assert pages == self._find((wanted.salt, tuple(ids)), wanted.most_pages, exact=not bounded)
        self._open(wanted, chain, ids, pages, None, exact=not (bounded and pages))

    def open_at_snapshot(self, wanted: Wanted, *, all_layers: bool) -> None:
        """The hit ends where a snapshot is."""
        ids = text(wanted.stem, wanted.length)
        chain = TokenChain(ids, wanted.salt, PAGE)
        pages, snapshot = self.cache.match_snapshot(chain, min(wanted.limit, wanted.length), all_layers=all_layers)
        expected = self._find((wanted.salt, tuple(ids)), wanted.most_pages, exact=True)
        while expected and not self._has_snapshot((wanted.salt, tuple(ids[: len(expected) * PAGE])), all_layers=all_layers):
            expected.pop()
        assert pages == expected
        assert (snapshot is None) == (not pages)
        if snapshot is not None:
            name = wanted.salt, tuple(ids[: len(pages) * PAGE])
            assert snapshot is self.snapshots[name][0]
            self.snapshots[name] = snapshot, self._now()
        self._open(wanted, chain, ids, pages, snapshot, exact=True)

    def advance(self, seq: Live, count: int) -> bool:
        """Compute ``count`` tokens more, for which the text goes on. False: there is no room."""
        end = min(seq.computed + count, MAX_PAGES * PAGE + 1)
        if not self.reserve(seq, end):
            return False
        seq.ids.extend(text(seq.wanted.stem, end)[len(seq.ids) :])
        for number in range(seq.computed // PAGE, -(-end // PAGE)):
            page = seq.blocks.pages[number]
            assert number >= seq.blocks.num_published
            assert page not in self.names, "a page that can be found is written"
            assert [other for other in self.live if page in other.blocks.pages] == [seq], "a shared page is written"
            self.written[page] = seq.text(min(end, (number + 1) * PAGE))
        seq.computed = end
        self._fill(seq.blocks.slot, seq.text(end))
        return True

    def reserve(self, seq: Live, num_tokens: int) -> bool:
        """Pages for ``num_tokens``; idle ones give way, the one unused for longest first."""
        had = len(seq.blocks.pages)
        missing = max(0, -(-num_tokens // PAGE) - had)
        idle = sorted(self.last_use, key=self.last_use.__getitem__)
        free = NUM_PAGES - len(self._in_use()) - len(idle)
        fits = missing <= free + len(idle) and had + missing <= MAX_PAGES
        assert self.cache.reserve(seq.blocks, num_tokens) == fits
        self.events["reserve" if fits else "no room"] += 1
        if not fits:
            return False
        for page in idle[: max(0, missing - free)]:
            self._forget(page)
            self.events["evict"] += 1
        for page in seq.blocks.pages[had:]:
            self.written[page] = ("", ())
        assert len(seq.blocks.pages) == had + missing
        return True

    def publish(self, seq: Live) -> None:
        """All that is computed."""
        first, publishes = seq.blocks.num_published, self._publishes(seq)
        self.cache.publish(seq.blocks, seq.chain, seq.computed, exact=seq.exact)
        for number in range(first, seq.computed // PAGE if publishes else first):
            page, name = seq.blocks.pages[number], (seq.text((number + 1) * PAGE), seq.exact)
            for other in [idle for idle in self.last_use if self.names[idle] == name]:
                del self.names[other], self.last_use[other]
                self.events["replace"] += 1
            self.events["double"] += name in self.names.values()
            self.names[page] = name
            self.digests[name[0]] = seq.chain.digest(number)
            self.events["publish"] += 1

    def take_snapshot(self, seq: Live, *, all_layers: bool) -> None:
        """Begin a snapshot of an exact sequence's last full page."""
        position = seq.computed // PAGE * PAGE
        if not position or not seq.exact:
            return
        name, digest = seq.text(position), seq.chain.digest(position // PAGE - 1)
        known = self._has_snapshot(name, all_layers=all_layers)
        evicted = None if known else self._evict_snapshot()
        slot = self.cache.snapshot_slot(digest, all_layers=all_layers)
        assert (slot is None) == (known or self._slots_taken() == NUM_SLOTS)
        if slot is not None:
            assert evicted in (None, slot)
            self._fill(slot, name)
            self.pending.append((name, digest, Snapshot(slot, all_layers)))
            self.events["snapshot"] += 1

    def end_snapshot(self, which: int, *, keep: bool) -> None:
        """Its step succeeded, or failed."""
        name, digest, snapshot = self.pending.pop(which % len(self.pending))
        if not keep:
            self.cache.drop_slot(snapshot.slot)
            return
        self.cache.keep_snapshot(digest, snapshot)
        if (name, True) in self.names.values() and not self._has_snapshot(name, all_layers=snapshot.all_layers):
            self.snapshots[name] = snapshot, self._now()
            self.events["keep"] += 1

    def discharge(self, seq: Live) -> None:
        self.cache.discharge(seq.blocks)
        seq.charge = 0

    def close(self, seq: Live, *, forget: bool = False) -> None:
        """forget: what it read or wrote is poison, and so is all that continues it."""
        lost = [self.names[page][0] for page in seq.blocks.pages if page in self.names] if forget else []
        self.cache.close(seq.blocks, forget=forget)
        self.live.remove(seq)
        for page, ((salt, ids), _) in list(self.names.items()):
            if any(salt == prefix[0] and ids[: len(prefix[1])] == prefix[1] for prefix in lost):
                self._forget(page)
                self.events["forget"] += 1
        in_use = self._in_use()
        for page in reversed(seq.blocks.pages):
            if page in in_use or page not in self.names:
                continue
            if list(self.names.values()).count(self.names[page]) > 1:
                del self.names[page]
            else:
                self.last_use[page] = self._now()

    def preempt(self, seq: Live) -> None:
        """Close, and open again behind what is still there of its own."""
        self.close(seq)
        length = max(1, seq.computed)
        again = dataclasses.replace(seq.wanted, length=length, limit=length - 1, charge=seq.charge)
        self.open(again, bounded=not seq.exact)

    def clear(self) -> None:
        assert self.cache.clear() == len(set(self.names.values())) * PAGE
        for page in list(self.names):
            self._forget(page)

    def close_all(self) -> None:
        """End everything; nothing may be left but what the next `clear` frees."""
        while self.pending:
            self.end_snapshot(0, keep=True)
        while self.live:
            self.close(self.live[0])
        self.check()
        assert self.cache.bytes_used == 0
        self.clear()
        self.check()
        assert self.cache.bytes_cached == 0
        assert self.cache._pages.num_available == NUM_PAGES

    # the naive account

    def _open(
        self, wanted: Wanted, chain: TokenChain, ids: list[int], pages: list[int], snapshot: Snapshot | None, *, exact: bool
    ) -> None:
        fits = sum(seq.charge for seq in self.live) + wanted.charge <= BOUNDARY
        if fits:
            self._evict_snapshot()
        blocks = self.cache.open(wanted.charge, pages)
        assert (blocks is not None) == (fits and self._slots_taken() < NUM_SLOTS)
        if blocks is None:
            self.events["refuse"] += 1
            return
        assert blocks.pages == pages
        for page in pages:
            self.last_use.pop(page, None)
        seq = Live(blocks, chain, wanted, exact, wanted.charge, len(pages) * PAGE, ids)
        self.live.append(seq)
        if snapshot is None:
            self._fill(blocks.slot, seq.text(seq.computed))
        else:
            self.cache.restore(blocks, snapshot)
        self.events["hit" if snapshot is None else "restore"] += bool(pages)

    def _find(self, wanted: Text, most: int, *, exact: bool) -> list[int]:
        found: list[int] = []
        for number in range(most):
            prefix = wanted[0], wanted[1][: (number + 1) * PAGE]
            same = [page for page, name in self.names.items() if name == (prefix, True)]
            if not exact:
                same += [page for page, name in self.names.items() if name == (prefix, False)]
            if not same:
                break
            found.append(same[0])
        return found

    def _has_snapshot(self, name: Text, *, all_layers: bool) -> bool:
        return name in self.snapshots and self.snapshots[name][0].all_layers >= all_layers

    def _slots_taken(self) -> int:
        return len(self.live) + len(self.pending) + len(self.snapshots)

    def _evict_snapshot(self) -> int | None:
        """A slot is about to be taken."""
        if self._slots_taken() < NUM_SLOTS or not self.snapshots:
            return None
        self.events["evict snapshot"] += 1
        oldest = min(self.snapshots, key=lambda name: self.snapshots[name][1])
        return self.snapshots.pop(oldest)[0].slot

    def _forget(self, page: int) -> None:
        prefix, exact = self.names.pop(page)
        self.last_use.pop(page, None)
        if exact and (prefix, True) not in self.names.values() and self.snapshots.pop(prefix, None) is not None:
            self.events["forget snapshot"] += 1

    def _publishes(self, seq: Live) -> bool:
        """Can what it published last be found?"""
        return not seq.blocks.num_published or seq.blocks.pages[seq.blocks.num_published - 1] in self.names

    def _in_use(self) -> set[int]:
        return {page for seq in self.live for page in seq.blocks.pages}

    def _age(self, page: int) -> float:
        """The last use of a page, later than all others while it is in use."""
        return self.last_use.get(page, inf)

    def _now(self) -> int:
        self.clock += 1
        return self.clock

    # rings

    def _ring(self, layer: int, slot: int) -> Tensor:
        return self.cache.window(layer).rows[slot * CONFIG.sliding_window : (slot + 1) * CONFIG.sliding_window]

    def _fill(self, slot: int, window: Text) -> None:
        for layer in (0, CONFIG.num_hidden_layers - 1):
            self._ring(layer, slot).fill_(hash(window) % 2**20)

    def _holds(self, slot: int, window: Text) -> bool:
        layers = (0, CONFIG.num_hidden_layers - 1)
        return all(bool((self._ring(layer, slot) == hash(window) % 2**20).all()) for layer in layers)

    # what must be true after every step

    def check(self) -> None:
        self._check_pages()
        self._check_names()
        self._check_slots()
        sizes, cache = self.cache.sizes, self.cache
        used = (len(self.live) + len(self.pending)) * sizes.slot_bytes + len(self._in_use()) * sizes.page_bytes
        assert cache.bytes_used == used + sum(seq.charge for seq in self.live)
        assert cache.bytes_cached == len(self.snapshots) * sizes.slot_bytes + len(self.last_use) * sizes.page_bytes
        assert cache.bytes_used + cache.bytes_cached <= sizes.budget_bytes - sizes.slot_bytes - sizes.page_bytes

    def _check_pages(self) -> None:
        pool, in_use = self.cache._pages, self._in_use()
        assert sorted([*pool._free, *pool._idle, *in_use]) == list(range(1, NUM_PAGES + 1)), "a page is lost or in two states"
        assert self.cache.pages_used == pool.num_in_use == len(in_use)
        assert list(pool._idle) == sorted(self.last_use, key=self.last_use.__getitem__)
        held = Counter(page for seq in self.live for page in seq.blocks.pages)
        for page in range(1, NUM_PAGES + 1):
            assert pool.references(page) == held[page]
            cleared = all(not self._publishes(seq) for seq in self.live if page in seq.blocks.pages)
            assert held[page] <= 1 or page in self.names or cleared, "a page that nobody published is shared"
        rows = self.cache.tables[1].pages.tolist()
        blocks = {seq.blocks.slot: seq.blocks.pages for seq in self.live}
        assert rows == [[*blocks.get(slot, []), *[0] * (MAX_PAGES - len(blocks.get(slot, [])))] for slot in range(NUM_SLOTS + 1)]
        for seq in self.live:
            for number in range(-(-seq.computed // PAGE)):
                end = min(seq.computed, (number + 1) * PAGE)
                assert self.written[seq.blocks.pages[number]] == seq.text(end), "somebody else wrote a page in use"

    def _check_names(self) -> None:
        pool = self.cache._pages
        expected = {page: PageName(self.digests[prefix], exact) for page, (prefix, exact) in self.names.items()}
        assert pool._names == expected
        assert {page: name for name, pages in pool._pages.items() for page in pages} == pool._names
        assert len(set(self.digests.values())) == len(self.digests)
        for page, (prefix, exact) in self.names.items():
            assert self.written[page] == prefix
            before = prefix[0], prefix[1][:-PAGE]
            if before[1]:
                age = max(self._age(other) for other, name in self.names.items() if name in ((before, True), (before, exact)))
                assert age > self._age(page) or age == inf, "the end of a prefix outlives its beginning"

    def _check_slots(self) -> None:
        slots = self.cache._slots
        held = [seq.blocks.slot for seq in self.live] + [snapshot.slot for _, _, snapshot in self.pending]
        kept = [snapshot.slot for snapshot, _ in self.snapshots.values()]
        assert sorted([*held, *kept, *slots._free]) == list(range(1, NUM_SLOTS + 1)), "a slot is lost or in two states"
        assert self.cache.sequences == slots.num_in_use == len(held)
        ordered = sorted(self.snapshots, key=lambda name: self.snapshots[name][1])
        assert list(slots._snapshots.items()) == [(self.digests[name], self.snapshots[name][0]) for name in ordered]
        for name, (snapshot, _) in self.snapshots.items():
            assert (name, True) in self.names.values(), "a snapshot outlives its page"
            assert self._holds(snapshot.slot, name)
        for seq in self.live:
            assert self._holds(seq.blocks.slot, seq.text(seq.computed))
