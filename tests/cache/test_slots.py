# SPDX-License-Identifier: Apache-2.0
"""Slots, and snapshots in those that nobody needs: what is used twice, forgotten too early, or found with too few layers."""

from __future__ import annotations

import pytest

from cedar.cache.slots import SlotPool, Snapshot


def taken(pool: SlotPool) -> int:
    slot = pool.take()
    assert slot is not None
    return slot


def kept(pool: SlotPool, digest: bytes, *, all_layers: bool = False) -> Snapshot:
    snapshot = Snapshot(taken(pool), all_layers)
    pool.keep(digest, snapshot)
    return snapshot


def test_the_null_slot_is_given_out() -> None:
    pool = SlotPool(3)
    assert sorted(taken(pool) for _ in range(3)) == [1, 2, 3]
    assert pool.take() is None
    assert (pool.num_in_use, pool.num_snapshots) == (3, 0)


def test_a_snapshot_keeps_a_sequence_out() -> None:
    pool = SlotPool(2)
    old, new = kept(pool, b"old"), kept(pool, b"new")
    assert (pool.num_in_use, pool.num_snapshots) == (0, 2)
    assert taken(pool) == old.slot
    assert taken(pool) == new.slot
    assert pool.take() is None
    assert pool.find(b"new", all_layers=False) is None


def test_a_snapshot_gives_way_while_a_slot_is_free() -> None:
    pool = SlotPool(2)
    snapshot = kept(pool, b"a")
    assert taken(pool) != snapshot.slot
    assert pool.find(b"a", all_layers=False) is snapshot


def test_a_snapshot_of_recent_use_is_forgotten_first() -> None:
    pool = SlotPool(2)
    first, second = kept(pool, b"first"), kept(pool, b"second")
    assert pool.has(b"second", all_layers=False)  # no use of it
    assert pool.find(b"first", all_layers=False) is first
    assert taken(pool) == second.slot


def test_a_snapshot_of_the_encoder_half_serves_a_full_run() -> None:
    pool = SlotPool(3)
    half = kept(pool, b"a")
    assert pool.find(b"a", all_layers=False) is half
    assert pool.find(b"a", all_layers=True) is None
    assert not pool.has(b"a", all_layers=True)
    full = kept(pool, b"a", all_layers=True)
    for all_layers in (False, True):
        assert pool.find(b"a", all_layers=all_layers) is full
        assert pool.has(b"a", all_layers=all_layers)
    assert (pool.num_in_use, pool.num_snapshots) == (0, 1)


@pytest.mark.parametrize("all_layers", [False, True])
def test_a_snapshot_that_knows_less_or_the_same_replaces_one(all_layers: bool) -> None:
    pool = SlotPool(3)
    full = kept(pool, b"a", all_layers=True)
    kept(pool, b"a", all_layers=all_layers)
    assert pool.find(b"a", all_layers=True) is full
    assert (pool.num_in_use, pool.num_snapshots) == (0, 1)
    assert full.slot not in {taken(pool), taken(pool)}


def test_the_failed_use_of_a_snapshot_counts() -> None:
    pool = SlotPool(2)
    half = kept(pool, b"half")
    kept(pool, b"other")
    assert pool.find(b"half", all_layers=True) is None
    assert taken(pool) == half.slot


def test_forget_leaks_a_slot() -> None:
    pool = SlotPool(3)
    kept(pool, b"a"), kept(pool, b"b")
    pool.forget(b"a")
    pool.forget(b"unknown")
    assert not pool.has(b"a", all_layers=False)
    assert pool.num_snapshots == 1
    pool.forget(b"b")
    assert (pool.num_in_use, pool.num_snapshots) == (0, 0)
    assert sorted(taken(pool) for _ in range(3)) == [1, 2, 3]


def test_misuse_gives_a_slot_to_two() -> None:
    pool = SlotPool(2)
    slot = taken(pool)
    pool.give_back(slot)
    with pytest.raises(RuntimeError, match=f"slot {slot} is not taken"):
        pool.give_back(slot)
    with pytest.raises(RuntimeError, match=f"slot {slot} is not taken"):
        pool.keep(b"a", Snapshot(slot, True))
    snapshot = kept(pool, b"a")
    with pytest.raises(RuntimeError, match=f"slot {snapshot.slot} is not taken"):
        pool.give_back(snapshot.slot)
    assert (pool.num_in_use, pool.num_snapshots) == (0, 1)
