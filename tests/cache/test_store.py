# SPDX-License-Identifier: Apache-2.0
"""The budget and what it buys: what overcommits, starves, or is charged for but not there. Leaks: `test_pages.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.prefix import TokenChain
from cedar.cache.records import CacheFormats, FloatRecords
from cedar.cache.slots import Snapshot
from cedar.cache.store import CacheSizes, KVCache, SequenceBlocks, page_bytes, slot_bytes
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.errors import CedarError

CONFIG = ModelConfig.from_dict(preset("tiny"))
FORMATS = CacheFormats(
    window=FloatRecords(CONFIG.head_dim, torch.float32),
    kv=FloatRecords(CONFIG.head_dim, torch.float32),
    index_key=FloatRecords(CONFIG.index_head_dim, torch.float32),
)
SEAM, LARGEST_SEAM = 1000, 5000
CPU = torch.device("cpu")


def packed(config: ModelConfig) -> CacheFormats:
    return CacheFormats(WindowRecords(config.head_dim), GlobalRecords(config.head_dim), IndexKeyRecords(config.index_head_dim))


def plan(
    budget_bytes: int,
    max_sequences: int = 4,
    seam_bytes: int = SEAM,
    page_tokens: int = 16,
    *,
    formats: CacheFormats = FORMATS,
    snapshots: bool = False,
) -> CacheSizes:
    return CacheSizes.plan(
        CONFIG,
        formats,
        budget_bytes=budget_bytes,
        max_sequences=max_sequences,
        page_tokens=page_tokens,
        seam_bytes=seam_bytes,
        largest_seam_bytes=max(seam_bytes, LARGEST_SEAM),
        snapshots=snapshots,
    )


def make_cache(budget_bytes: int = 4 << 20, max_sequences: int = 4, seam_bytes: int = SEAM, page_tokens: int = 16) -> KVCache:
    return KVCache(CONFIG, FORMATS, plan(budget_bytes, max_sequences, seam_bytes, page_tokens), CPU)


def least_budget(formats: CacheFormats, page_tokens: int, seam_bytes: int) -> int:
    """One sequence of one page, and the null page and null slot."""
    return 2 * (page_bytes(CONFIG, formats, page_tokens) + slot_bytes(CONFIG, formats, page_tokens)) + seam_bytes


def _spent(sizes: CacheSizes) -> int:
    return (sizes.num_pages + 1) * sizes.page_bytes + (sizes.num_slots + 1) * sizes.slot_bytes + sizes.boundary_bytes


def opened(cache: KVCache, charged_bytes: int = 0) -> SequenceBlocks:
    blocks = cache.open(charged_bytes)
    assert blocks is not None
    return blocks


@pytest.mark.parametrize("formats", [FORMATS, packed(CONFIG)], ids=["float32", "packed"])
def test_page_bytes_do_not_match_the_pools(formats: CacheFormats) -> None:
    cache = KVCache(CONFIG, formats, plan(4 << 20, formats=formats), CPU)
    allocated, sizes = cache.allocated(), cache.sizes
    paged = [pool.rows for source in CONFIG.kv_source_layer_ids for pool in (cache.kv(source), cache.index_keys(source))]
    assert sum(rows.nbytes for rows in paged) == (sizes.num_pages + 1) * sizes.page_bytes
    assert allocated["global_kv"] + allocated["index_keys"] == (sizes.num_pages + 1) * sizes.page_bytes
    private = [cache.window(layer).rows for layer in range(CONFIG.num_hidden_layers)] + [cache.tables[1].pages]
    private += [cache.open_rows(source) for source in CONFIG.kv_source_layer_ids if CONFIG.compress_ratios[source] == 2]
    assert sum(rows.nbytes for rows in private) == (sizes.num_slots + 1) * sizes.slot_bytes
    assert sum(allocated.values()) == sum(rows.nbytes for rows in paged + private)
    assert cache.kv_bytes_per_token == sizes.page_bytes / sizes.page_tokens


def test_the_release_takes_more_than_its_records() -> None:
    release = ModelConfig.from_dict(preset("release"))
    for page_tokens in (16, 64, 256):
        assert page_bytes(release, packed(release), page_tokens) == 890 * page_tokens
    rings, open_rows, table = 40 * 128 * 528, 3 * 2 * 512 * 4, 8 * 1048576 // 64
    assert rings / 2**20 == pytest.approx(2.58, abs=0.005)
    assert slot_bytes(release, packed(release), 64) == rings + open_rows + table


@settings(max_examples=150, deadline=None)
@given(
    above=st.one_of(st.integers(0, 200_000), st.integers(0, 32 << 20)),
    sequences=st.integers(1, 64),
    seam=st.integers(0, 90_000),
    page_tokens=st.sampled_from([16, 64, 1024]),
    formats=st.sampled_from([FORMATS, packed(CONFIG)]),
    snapshots=st.booleans(),
)
def test_a_part_of_the_budget_starves_or_all_exceed_it(
    above: int, sequences: int, seam: int, page_tokens: int, formats: CacheFormats, snapshots: bool
) -> None:
    budget = least_budget(formats, page_tokens, seam) + above
    sizes = plan(budget, sequences, seam, page_tokens, formats=formats, snapshots=snapshots)
    cache = KVCache(CONFIG, formats, sizes, CPU)
    spent = sum(cache.allocated().values()) + sizes.boundary_bytes
    assert budget - sizes.page_bytes < spent <= budget == sizes.budget_bytes
    assert sizes.num_pages >= 1
    without = plan(budget, sequences, seam, page_tokens, formats=formats)
    assert 1 <= without.num_slots <= sequences
    assert without.boundary_bytes == sizes.boundary_bytes >= without.num_slots * seam
    kept = sizes.num_slots - without.num_slots
    assert kept == (
        ((without.num_pages - 1) * sizes.page_bytes + budget - _spent(without)) // 2 // sizes.slot_bytes if snapshots else 0
    )
    seqs = [opened(cache, seam) for _ in range(without.num_slots)]
    assert cache.reserve(seqs[0], min(sizes.num_pages * page_tokens, CONFIG.max_position_embeddings))
    assert cache.bytes_used <= budget


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("seam", [0, 1000, 100_000])
def test_a_budget_below_one_sequence_is_accepted(seam: int, snapshots: bool) -> None:
    least = least_budget(FORMATS, 16, seam)
    cache = KVCache(CONFIG, FORMATS, plan(least, seam_bytes=seam, snapshots=snapshots), CPU)
    assert (cache.sizes.num_pages, cache.sizes.num_slots, cache.sizes.boundary_bytes) == (1, 1, seam)
    assert cache.fits(16, seam)
    assert cache.reserve(opened(cache, seam), 16)
    for budget in (least - 1, 0):
        with pytest.raises(
            CedarError, match=rf"kv_cache_bytes: is {budget}; allowed: at least {least} for this model and decoder"
        ):
            plan(budget, seam_bytes=seam, snapshots=snapshots)


def test_a_failed_reserve_keeps_pages() -> None:
    cache = make_cache(max_sequences=2)
    first, second = opened(cache), opened(cache)
    assert cache.reserve(first, (cache.sizes.num_pages - 1) * 16)
    assert cache.reserve(second, 16)
    before = cache.bytes_used, list(second.pages)
    assert not cache.reserve(second, 17)
    assert (cache.bytes_used, list(second.pages)) == before
    cache.close(first)
    assert cache.reserve(second, 17)


def test_closing_twice_frees_someone_elses_pages() -> None:
    cache = make_cache()
    blocks = opened(cache)
    cache.reserve(blocks, 40)
    cache.close(blocks)
    for action in (lambda: cache.close(blocks), lambda: cache.reserve(blocks, 8), lambda: cache.discharge(blocks)):
        with pytest.raises(RuntimeError, match="closed already"):
            action()
    assert cache.pages_used == cache.sequences == cache.bytes_used == 0


def test_boundary_rows_are_not_charged() -> None:
    cache = make_cache()
    room = cache.sizes.boundary_bytes
    assert room == 3 * SEAM + LARGEST_SEAM
    blocks = opened(cache, room)
    assert cache.open(1) is None
    cache.discharge(blocks)
    assert cache.open(1) is not None
    assert cache.fits(16, room)
    assert not cache.fits(16, room + 1)


def test_a_sequence_outgrows_the_block_table() -> None:
    cache = make_cache(64 << 20)
    blocks, most = opened(cache), CONFIG.max_position_embeddings
    assert cache.sizes.num_pages * 16 > most
    assert cache.fits(most, 0)
    assert not cache.fits(most + 1, 0)
    assert not cache.reserve(blocks, most + 1)
    assert cache.reserve(blocks, most)


# prefixes


def write(cache: KVCache, chain: TokenChain, *, exact: bool = True, shared: list[int] | None = None) -> SequenceBlocks:
    """An open sequence that has computed and published a whole chain."""
    blocks = opened(cache) if shared is None else cache.open(0, shared)
    assert blocks is not None
    assert cache.reserve(blocks, len(chain.token_ids))
    cache.publish(blocks, chain, len(chain.token_ids), exact=exact)
    return blocks


def snapshot(cache: KVCache, digest: bytes, value: float, *, all_layers: bool = True) -> Snapshot:
    """A kept snapshot whose rings hold ``value`` and the number of their layer."""
    slot = cache.snapshot_slot(digest, all_layers=all_layers)
    assert slot is not None
    made = Snapshot(slot, all_layers)
    for layer in range(CONFIG.num_hidden_layers):
        ring(cache, layer, slot).fill_(value + layer)
    cache.keep_snapshot(digest, made)
    return made


def ring(cache: KVCache, layer: int, slot: int) -> torch.Tensor:
    return cache.window(layer).rows.view(cache.sizes.num_slots + 1, -1)[slot]


def test_a_shared_prefix_takes_memory_once_per_sequence() -> None:
    cache = KVCache(CONFIG, FORMATS, plan(64 << 20, max_sequences=200, page_tokens=64), CPU)
    chain = TokenChain(list(range(4096)), "", 64)
    cache.close(write(cache, chain))
    seqs = []
    for _ in range(200):
        pages = cache.match(chain, 4096, exact=True)
        blocks = cache.open(0, pages)
        assert blocks is not None
        assert cache.reserve(blocks, 4096 + 10)
        seqs.append(blocks)
    assert cache.bytes_used == 200 * (cache.sizes.slot_bytes + cache.sizes.page_bytes) + 64 * cache.sizes.page_bytes
    for blocks in seqs:
        cache.close(blocks)
    assert (cache.bytes_used, cache.bytes_cached) == (0, 64 * cache.sizes.page_bytes)
    assert cache.clear() == 4096
    assert cache.bytes_cached == 0


def test_more_than_the_full_pages_is_published_or_matched() -> None:
    cache, chain = make_cache(), TokenChain(list(range(50)), "", 16)
    blocks = write(cache, chain)
    assert blocks.num_published == 3
    assert [cache.match(chain, tokens, exact=True) for tokens in (50, 48, 47, 15)] == [blocks.pages[:n] for n in (3, 3, 2, 0)]
    cache.close(blocks)
    with pytest.raises(RuntimeError, match="closed already"):
        cache.publish(blocks, chain, 50, exact=True)


def test_pages_after_a_clear_are_kept_that_nobody_can_find() -> None:
    cache, ids = make_cache(), list(range(32))
    chain = TokenChain(ids, "", 16)
    blocks = write(cache, chain)
    assert cache.clear() == 32
    assert cache.reserve(blocks, 64)
    ids.extend(range(32))
    cache.publish(blocks, chain, 64, exact=True)
    cache.close(blocks)
    assert cache.pages_cached == 0
    cache.close(write(cache, chain))
    assert cache.pages_cached == 4


def test_a_restored_ring_is_another_layers_or_sequences() -> None:
    cache, chain = make_cache(), TokenChain(list(range(32)), "", 16)
    cache.close(write(cache, chain))
    kept = [snapshot(cache, chain.digest(number), 100.0 * number) for number in range(2)]
    for number in (1, 0):
        pages, found = cache.match_snapshot(chain, 16 * (number + 1), all_layers=True)
        assert (len(pages), found) == (number + 1, kept[number])
        blocks = cache.open(0, pages)
        assert blocks is not None
        assert found is not None
        cache.restore(blocks, found)
        for layer in range(CONFIG.num_hidden_layers):
            assert set(ring(cache, layer, blocks.slot).tolist()) == {100.0 * number + layer}
            assert set(ring(cache, layer, 0).tolist()) == {0.0}


def test_the_slot_of_the_snapshot_that_is_restored_goes_to_another() -> None:
    cache, chain = make_cache(max_sequences=2), TokenChain(list(range(32)), "", 16)
    cache.close(write(cache, chain))
    snapshot(cache, chain.digest(0), 0.0)
    snapshot(cache, chain.digest(1), 100.0)
    pages, found = cache.match_snapshot(chain, 16, all_layers=True)  # the older of the two is used now
    blocks = cache.open(0, pages)
    assert blocks is not None
    assert found is not None
    cache.restore(blocks, found)
    assert ring(cache, 0, blocks.slot)[0] == 0.0
    assert cache.snapshots == 1
    pages, found = cache.match_snapshot(chain, 16, all_layers=True)
    last = cache.open(0, pages)  # nothing but the snapshot itself is left
    assert last is not None
    assert found is not None
    assert last.slot == found.slot
    cache.restore(last, found)
    assert ring(cache, 0, last.slot)[0] == 0.0
    assert cache.snapshots == 0
    assert cache.open() is None


def test_a_snapshot_is_kept_without_an_exact_page() -> None:
    cache, chain = make_cache(), TokenChain(list(range(16)), "", 16)
    bounded = write(cache, chain, exact=False)
    snapshot(cache, chain.digest(0), 0.0)
    assert cache.snapshots == 0
    cache.close(bounded)
    cache.close(write(cache, chain))
    snapshot(cache, chain.digest(0), 0.0)
    assert cache.match_snapshot(chain, 16, all_layers=True)[1] is not None
    assert cache.snapshot_slot(chain.digest(0), all_layers=False) is None
    everything = opened(cache)
    assert cache.reserve(everything, cache.sizes.num_pages * 16)
    assert (cache.snapshots, cache.sequences, cache.bytes_cached) == (0, 1, 0)


def test_a_bounded_page_takes_the_snapshot_of_an_exact_one_with_it() -> None:
    cache, chain = make_cache(), TokenChain(list(range(16)), "", 16)
    cache.close(write(cache, chain, exact=False))
    write(cache, chain)
    kept = snapshot(cache, chain.digest(0), 0.0)
    assert cache.pages_cached == 1
    assert cache.reserve(opened(cache), (cache.sizes.num_pages - 1) * 16)
    assert cache.pages_cached == 0
    assert cache.match_snapshot(chain, 16, all_layers=True)[1] is kept
