# SPDX-License-Identifier: Apache-2.0
"""The budget, the free lists and the block tables: what leaks, overlaps or overcommits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cedar.cache.records import CacheFormats, FloatRecords
from cedar.cache.store import CacheSizes, KVCache, SequenceBlocks
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.errors import CedarError

CONFIG = ModelConfig.from_dict(preset("tiny"))
FORMATS = CacheFormats(
    window=FloatRecords(CONFIG.head_dim, torch.float32),
    kv=FloatRecords(CONFIG.head_dim, torch.float32),
    index_key=FloatRecords(CONFIG.index_head_dim, torch.float32),
)
RATIO_OF = {source: CONFIG.compress_ratios[source] for source in CONFIG.kv_source_layer_ids}


SEAM, LARGEST_SEAM = 1000, 5000
CPU = torch.device("cpu")


def make_cache(budget_bytes: int = 4 << 20, max_sequences: int = 4, seam_bytes: int = SEAM, page_tokens: int = 16) -> KVCache:
    sizes = CacheSizes.plan(
        CONFIG,
        FORMATS,
        budget_bytes=budget_bytes,
        max_sequences=max_sequences,
        page_tokens=page_tokens,
        seam_bytes=seam_bytes,
        largest_seam_bytes=max(seam_bytes, LARGEST_SEAM),
    )
    return KVCache(CONFIG, FORMATS, sizes, CPU)


def pool_bytes(cache: KVCache) -> tuple[int, int]:
    """Bytes of what `KVCache` allocates: the pages, and the private memory of sequences."""
    paged = [pool.rows for source in RATIO_OF for pool in (cache.kv(source), cache.index_keys(source))]
    private = [cache.window(layer).rows for layer in range(CONFIG.num_hidden_layers)]
    private += [cache.open_rows(source) for source, ratio in RATIO_OF.items() if ratio == 2] + [cache.tables[1].pages]
    return sum(rows.nbytes for rows in paged), sum(rows.nbytes for rows in private)


def opened(cache: KVCache, charged_bytes: int = 0) -> SequenceBlocks:
    blocks = cache.open(charged_bytes)
    assert blocks is not None
    return blocks


def test_page_bytes_do_not_match_the_pools() -> None:
    cache = make_cache()
    paged, private = pool_bytes(cache)
    assert paged == (cache.sizes.num_pages + 1) * cache.sizes.page_bytes
    assert private == (cache.sizes.num_slots + 1) * cache.sizes.slot_bytes


@settings(max_examples=60, deadline=None)
@given(st.integers(400_000, 32 << 20), st.integers(1, 64), st.integers(0, 90_000), st.sampled_from([16, 64, 1024]))
def test_pools_and_boundary_rows_outgrow_the_budget(budget: int, sequences: int, seam: int, page_tokens: int) -> None:
    try:
        cache = make_cache(budget, sequences, seam, page_tokens)
    except CedarError:
        assume(False)
    sizes = cache.sizes
    assert sum(pool_bytes(cache)) + sizes.boundary_bytes <= budget
    assert sizes.num_pages >= 1
    assert sizes.boundary_bytes >= sizes.num_slots * seam
    assert all(cache.open(seam) is not None for _ in range(sizes.num_slots))


@pytest.mark.parametrize("seam", [0, 1000, 100_000])
def test_a_budget_below_one_sequence_is_accepted(seam: int) -> None:
    sizes = make_cache().sizes
    least = 2 * (sizes.page_bytes + sizes.slot_bytes) + seam  # the null page and slot too
    cache = make_cache(least, seam_bytes=seam)
    assert cache.fits(16, seam)
    assert cache.reserve(opened(cache, seam), 16)
    with pytest.raises(CedarError, match=rf"kv_cache_bytes: is {least - 1}; allowed: at least {least}"):
        make_cache(least - 1, seam_bytes=seam)


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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "reserve", "close", "discharge"]), st.integers(0, 5), st.integers(0, 900)), max_size=60
    )
)
def test_any_order_of_calls_leaks_or_overlaps(calls: list[tuple[str, int, int]]) -> None:
    cache = make_cache(1 << 20, max_sequences=4)
    live: list[SequenceBlocks] = []
    for call, which, amount in calls:
        if call == "open":
            blocks = cache.open(amount * 64)
            live += [] if blocks is None else [blocks]
        elif live:
            blocks = live[which % len(live)]
            if call == "reserve":
                had = len(blocks.pages)
                assert cache.reserve(blocks, amount) == (len(blocks.pages) * 16 >= amount)
                assert len(blocks.pages) == max(had, -(-amount // 16)) or len(blocks.pages) == had
            elif call == "discharge":
                cache.discharge(blocks)
            else:
                cache.close(blocks)
                live.remove(blocks)
        pages = [page for blocks in live for page in blocks.pages]
        slots = [blocks.slot for blocks in live]
        assert len(set(pages)) == len(pages) == cache.pages_used
        assert len(set(slots)) == len(slots) == cache.sequences
        assert 0 not in pages
        assert 0 not in slots
        expected = len(slots) * cache.sizes.slot_bytes + len(pages) * cache.sizes.page_bytes
        assert cache.bytes_used == expected + sum(blocks.charged_bytes for blocks in live) <= cache.sizes.budget_bytes
        held = {blocks.slot: blocks.pages for blocks in live}
        for slot, row in enumerate(cache.tables[1].pages.tolist()):
            assert row == [*held.get(slot, []), *[0] * (len(row) - len(held.get(slot, [])))]
    for blocks in live:
        cache.close(blocks)
    assert cache.bytes_used == 0
