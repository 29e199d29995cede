# SPDX-License-Identifier: Apache-2.0
"""The plan of single-row steps says what the general plan says, in tensors that stay where they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.decode_rows import DecodeRows
from cedar.cache.rows import RowGeometry, RowPlan, Segment
from cedar.cache.store import SequenceBlocks
from golden_support import block_tables

PAGE, TOP_K = 16, 6
GEOMETRY = RowGeometry(window=8, topk=TOP_K, index_heads=2, index_dim=32)
CPU = torch.device("cpu")


def segments_at(positions: list[int], floors: list[int], seed: int) -> list[Segment]:
    """Row ``positions[n]`` of a sequence in slot n + 1; a floor is that many positions back."""
    pages = iter((1 + torch.randperm(400, generator=torch.Generator().manual_seed(seed))).tolist())
    segments = []
    for slot, (position, back) in enumerate(zip(positions, floors, strict=True), start=1):
        blocks = SequenceBlocks(slot, pages=[next(pages) for _ in range(position // PAGE + 1)])
        floor = max(0, position - back)
        segments.append(Segment(blocks, position, 1, floor, floor))
    return segments


POSITIONS = st.lists(st.integers(0, 150), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(POSITIONS, st.data(), st.integers(0, 1000))
def test_a_row_is_planned_otherwise_than_by_the_general_plan(positions: list[int], data: st.DataObject, seed: int) -> None:
    floors = [data.draw(st.integers(0, 20)) for _ in positions]
    segments = segments_at(positions, floors, seed)
    tables = block_tables([segment.blocks for segment in segments], PAGE)
    rows = DecodeRows(len(segments), GEOMETRY, tables, most=256)
    addresses = [tensor.data_ptr() for tensor in (rows.plan.positions, rows.plan.view.index, rows.plan.window.store_to)]
    rows.fill(segments_at([30] * len(segments), [30] * len(segments), seed + 1))
    rows.fill(segments)
    plan, expected = rows.plan, RowPlan.build(segments, GEOMETRY, tables, CPU, writes=True)
    assert [tensor.data_ptr() for tensor in (plan.positions, plan.view.index, plan.window.store_to)] == addresses
    assert plan.num_rows == expected.num_rows
    assert torch.equal(plan.positions, expected.positions)
    assert torch.equal(plan.view.index, expected.view.index)
    assert torch.equal(plan.cut_view.index, expected.cut_view.index)
    assert torch.equal(plan.window.store_to, expected.window.store_to)
    assert plan.window.history is expected.window.history is None
    for ratio, entries in expected.entries.items():
        own, write, theirs = plan.entries[ratio], plan.entries[ratio].write, entries.write
        assert own.width == TOP_K
        assert torch.equal(own.visible, entries.visible)
        assert torch.equal(own.base, entries.base)
        assert write is not None
        assert theirs is not None
        ends = write.slots >= 0
        assert torch.equal(write.slots[ends], theirs.slots)
        assert torch.equal(write.positions[ends], theirs.positions)
        assert write.rows is not None
        assert torch.equal(write.rows[ends], torch.arange(len(segments)) if theirs.rows is None else theirs.rows)
        if ratio == 2:
            assert write.first is not None
            assert write.open_from is not None
            assert write.open_to is not None
            assert write.open_rows is not None
            opened = write.open_to >= 0
            # a row that ends a group, and whose group is not suppressed, reads its own slot's open row
            assert torch.equal(write.open_from[write.first], torch.arange(1, len(segments) + 1))
            assert write.open_to[opened].tolist() == ([] if theirs.open_to is None else theirs.open_to.tolist())
            assert write.open_rows[opened].tolist() == ([] if theirs.open_rows is None else theirs.open_rows.tolist())


def test_a_position_without_a_page_is_planned() -> None:
    segment = segments_at([15], [15], 0)[0]
    rows = DecodeRows(1, GEOMETRY, block_tables([segment.blocks], PAGE), most=64)
    rows.fill([segment])
    with pytest.raises(RuntimeError, match="position 16 is not reserved: it lies in page 1 of 1"):
        rows.fill([Segment(segment.blocks, 16, 1)])
