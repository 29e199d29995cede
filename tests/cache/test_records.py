# SPDX-License-Identifier: Apache-2.0
"""Pools: what lands in another row, what a planar block mixes up, what a reader sees of rows that are not its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import FloatRecords, PlanarPool, RecordFormat, RecordPool, RecordView, record_bytes

CPU = torch.device("cpu")
ROWS = 96
FORMATS = [
    WindowRecords(64),
    GlobalRecords(64),
    IndexKeyRecords(32),
    IndexKeyRecords(64),
    IndexKeyRecords(128),
    FloatRecords(6, torch.float32),
]


def random_records(record: RecordFormat, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if record.dtype == torch.uint8:
        return torch.randint(0, 256, (count, record.width), dtype=torch.uint8, generator=generator)
    return torch.randn(count, record.width, generator=generator)


def by_address(pool: RecordPool, row: int) -> Tensor:
    """The record of a row, byte by byte from where `cedar.cache.layout` puts it."""
    if len(pool.record.planes) == 1:
        return pool.rows[row]
    codes, scales = pool.record.planes
    memory, block, lane = pool.rows.flatten(), row // 8 * 8 * pool.record.width, row % 8
    value, scale = block + lane * codes, block + 8 * codes + lane * scales
    return torch.cat([memory[value : value + codes], memory[scale : scale + scales]])


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.lists(st.integers(1, ROWS - 1), max_size=12, unique=True), max_size=8),
    st.sampled_from([8, 16, 24, 48]),
    st.integers(0, 2**31),
)
def test_records_end_up_in_other_rows(record: RecordFormat, writes: list[list[int]], per_page: int, seed: int) -> None:
    pool = RecordPool.allocate(record, ROWS, CPU)
    expected = torch.zeros(ROWS, record.width, dtype=record.dtype)
    for number, rows in enumerate(writes):
        records = random_records(record, len(rows), seed + number)
        pool.store(records, torch.tensor(rows, dtype=torch.int64))
        expected[rows] = records
    assert torch.equal(torch.stack([by_address(pool, row) for row in range(ROWS)]), expected)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(pool.load(order), expected[order])
    assert pool.load(order[:0]).shape == (0, record.width)
    pages = torch.randint(0, ROWS // per_page, (3, 4), generator=torch.Generator().manual_seed(seed))
    by_page = expected.view(-1, per_page, record.width)[pages]
    assert torch.equal(pool.load_pages(pages, per_page), by_page.flatten(1, 2))


@pytest.mark.parametrize("record", FORMATS)
def test_pages_are_copied_as_something_else_than_their_rows(record: RecordFormat) -> None:
    """Whoever moves a page moves ``rows``, without a look at the format."""
    pool, other = RecordPool.allocate(record, 48, CPU), RecordPool.allocate(record, 48, CPU)
    pool.store(random_records(record, 16, 1), torch.arange(16, 32))
    other.rows[32:48] = pool.rows[16:32]
    assert torch.equal(other.load(torch.arange(32, 48)), random_records(record, 16, 1))
    assert pool.nbytes == 48 * record_bytes(record)


def test_an_index_key_pool_is_not_planar() -> None:
    assert isinstance(RecordPool.allocate(IndexKeyRecords(64), 16, CPU), PlanarPool)
    assert not isinstance(RecordPool.allocate(GlobalRecords(64), 16, CPU), PlanarPool)
    with pytest.raises(ValueError, match="blocks of 8"):
        RecordPool.allocate(IndexKeyRecords(64), 12, CPU)


@pytest.mark.parametrize("record", FORMATS)
def test_bytes_of_other_rows_leak(record: RecordFormat) -> None:
    """Foreign rows hold NaN scales and codes, or plain NaN; a reader's own rows decode as if they were alone."""
    pool = RecordPool.allocate(record, 1024, CPU)
    pool.rows[8:] = 0xFF if record.dtype == torch.uint8 else torch.nan
    own = torch.tensor([8, 9, 15, 16, 40, 1023])
    values = torch.randn(6, record.dim, generator=torch.Generator().manual_seed(2))
    records = record.encode(values)
    pool.store(records, own)
    index = torch.tensor([[8, 9, 0], [1023, 0, 40], [16, 15, 8]])
    expected = torch.stack(
        [torch.zeros(record.dim) if row == 0 else record.decode(records)[own == row][0] for row in index.flatten()]
    )
    assert expected.isfinite().all()
    for rows in (index, index.repeat(200, 1)):  # fewer and more look-ups than the pool has rows
        view = RecordView(pool, rows) if not isinstance(pool, PlanarPool) else None
        keys = record.decode(pool.load(rows.flatten())) if view is None else view.values(0, len(rows)).flatten(0, 1)
        assert torch.equal(keys, expected.repeat(len(rows) // 3, 1))
    pool.store(records[:4].repeat(4, 1), torch.arange(32, 48))
    assert record.decode(pool.load_pages(torch.tensor([[2]]), 16)).isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMATS[:2] + FORMATS[-1:]), st.integers(1, 40), st.integers(0, 9), st.integers(1, 60), st.integers(0, 2**31)
)
def test_decoding_a_table_first_changes_its_values(record: RecordFormat, rows: int, width: int, table: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = RecordPool(record, record.encode(torch.randn(table, record.dim, generator=generator)))
    index = torch.randint(0, table, (rows, width), generator=generator)
    view, cut = RecordView(pool, index), rows // 2
    keys = torch.cat([view.values(0, cut), view.values(cut, rows)])
    assert keys.shape == (rows, width, record.dim)
    assert torch.equal(keys, record.decode(pool.rows)[index])
