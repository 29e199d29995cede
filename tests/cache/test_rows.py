# SPDX-License-Identifier: Apache-2.0
"""Index tensors of ragged batches against a reading of them, row by row, that knows only which position lies where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.rows import RowGeometry, RowPlan, Segment
from cedar.cache.store import SequenceBlocks

PAGE = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    segments: list[Segment]
    geometry: RowGeometry
    tile_elements: int

    def plan(self, *, writes: bool = True) -> RowPlan:
        return RowPlan.build(self.segments, self.geometry, (1, 2), CPU, writes=writes, tile_elements=self.tile_elements)

    def rows(self) -> list[tuple[Segment, int]]:
        """Segment and position of every row."""
        return [(s, position) for s in self.segments for position in range(s.start, s.start + s.count)]


@st.composite
def batches(draw: st.DrawFn) -> Case:
    window = draw(st.integers(1, 9))
    segments, next_page = [], 1
    single_only = draw(st.booleans())
    for slot in range(1, draw(st.integers(1, 5)) + 1):
        start = draw(st.integers(0, 60))
        count = 1 if single_only else draw(st.integers(1, 40))
        blocks = SequenceBlocks(slot, (1, 2))
        pages = -(-(start + count) // PAGE)
        blocks.append_pages(list(range(next_page + pages - 1, next_page - 1, -1)), PAGE)
        next_page += pages
        floor = draw(st.integers(0, start))
        segments.append(Segment(blocks, start, count, floor, draw(st.sampled_from([0, floor + window])) if floor else 0))
    topk = draw(st.integers(1, 30))
    return Case(draw(st.permutations(segments)), RowGeometry(window, topk, 2, 4), draw(st.sampled_from([1, 300, 1 << 20])))


@settings(max_examples=150, deadline=None)
@given(batches())
def test_a_row_reads_another_position_as_window_key(case: Case) -> None:
    plan, window = case.plan(), case.geometry.window
    where: dict[int, tuple[int, int]] = {}  # table row -> (slot, position)
    if plan.window.history is None:
        for segment, position in case.rows():
            for seen in range(max(segment.window_floor, position - window + 1), position + 1):
                where[segment.blocks.slot * window + seen % window] = (segment.blocks.slot, seen)
    else:
        rings = {}
        for segment in case.segments:
            for seen in range(max(segment.window_floor, segment.start - window), segment.start):
                rings[segment.blocks.slot * window + seen % window] = (segment.blocks.slot, seen)
        history = plan.window.history.tolist()
        assert history[0] == 0
        where = {row: rings[ring] for row, ring in enumerate(history) if row}
        where |= {len(history) + row: (s.blocks.slot, position) for row, (s, position) in enumerate(case.rows())}
    index, bias = plan.view.index.numpy(), plan.view.bias[:, 0].numpy()
    for row, (segment, position) in enumerate(case.rows()):
        for column, seen in enumerate(range(position - window + 1, position + 1)):
            visible = seen >= segment.window_floor
            assert bias[row, column] == (0 if visible else -np.inf)
            if visible:
                assert where[index[row, column]] == (segment.blocks.slot, seen)
            else:
                assert index[row, column] == 0


@settings(max_examples=100, deadline=None)
@given(batches())
def test_the_rings_keep_other_rows_than_the_last(case: Case) -> None:
    plan, window = case.plan(), case.geometry.window
    rows = range(plan.num_rows) if plan.window.store_from is None else plan.window.store_from.tolist()
    stored = dict(zip(plan.window.store_to.tolist(), rows, strict=True))
    expected = {}
    for row, (segment, position) in enumerate(case.rows()):
        if position >= segment.start + segment.count - window:
            expected[segment.blocks.slot * window + position % window] = row
    assert stored == expected


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from([1, 2]))
def test_groups_are_paired_or_stored_wrongly(case: Case, ratio: int) -> None:
    write = case.plan().entries[ratio].write
    assert write is not None
    expected, opens = [], []
    for row, (segment, position) in enumerate(case.rows()):
        if (position + 1) % ratio == 0 and position + 1 > segment.write_floor:
            group = position // ratio
            first = (segment.blocks.slot, "open") if ratio == 2 and position == segment.start else row + 1 - ratio
            expected.append((row, int(segment.blocks.entries(ratio)[group]), group * ratio, first))
        if ratio == 2 and position == segment.start + segment.count - 1 and position % 2 == 0:
            opens.append((row, segment.blocks.slot))
    rows = list(range(len(case.rows()))) if write.rows is None else write.rows.tolist()
    firsts: list[object] = list(rows)
    if ratio == 2:
        table = [(slot, "open") for slot in ([] if write.open_from is None else write.open_from.tolist())]
        assert write.first is not None
        table += list(range(len(case.rows())))  # type: ignore[arg-type]
        firsts = [table[at] for at in write.first.tolist()]
    assert list(zip(rows, write.slots.tolist(), write.positions.tolist(), firsts, strict=True)) == expected
    if ratio == 2:
        assert write.open_rows is None or list(zip(write.open_rows.tolist(), write.open_to.tolist(), strict=True)) == opens
        assert write.open_rows is not None or not opens


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([1, 2]))
def test_a_row_sees_entries_that_it_must_not(case: Case, ratio: int) -> None:
    plan = case.plan()
    entries, topk, window = plan.entries[ratio], case.geometry.topk, case.geometry.window
    counts = [(position + 1) // ratio for _, position in case.rows()]
    assert entries.visible.tolist() == counts
    assert entries.width == min(topk, max(counts))
    assert entries.ragged == any(count < entries.width for count in counts)
    joint = plan.view.joint_bias[ratio][:, 0]
    assert torch.equal(joint[:, :window], plan.view.bias[:, 0])
    assert torch.isfinite(joint[:, window:]).sum(1).tolist() == [min(count, entries.width) for count in counts]
    table, base = entries.entries, entries.base[:, 0].tolist()
    assert table[0] == 0
    for row, (segment, _) in enumerate(case.rows()):
        assert table[base[row] : base[row] + counts[row]].tolist() == segment.blocks.entries(ratio)[: counts[row]].tolist()
    if max(counts) <= topk:
        assert entries.index is not None
        assert entries.slots is not None
        for row, (segment, _) in enumerate(case.rows()):
            none = [-1] * (entries.width - counts[row])
            assert entries.index[row].tolist() == [*range(counts[row]), *none]
            assert entries.slots[row].tolist() == [*segment.blocks.entries(ratio)[: counts[row]], *[0] * len(none)]
        return
    assert entries.index is None
    covered = []
    for tile in entries.tiles:
        covered += range(tile.start, tile.stop)
        seen = counts[tile.start : tile.stop]
        assert tile.num_keys == max(seen)
        assert (tile.visible is None) == all(count == tile.num_keys for count in seen)
        assert (tile.keys is None) == (tile.num_keys <= topk)
        per_group = (tile.stop - tile.start) // tile.groups
        for row in range(tile.start, tile.stop) if tile.keys is not None else ():
            keys = tile.keys[(row - tile.start) // per_group][: counts[row]].tolist()  # type: ignore[index]
            assert keys == case.rows()[row][0].blocks.entries(ratio)[: counts[row]].tolist()
    assert covered == list(range(plan.num_rows))


def test_tiles_ignore_the_element_budget() -> None:
    blocks = SequenceBlocks(1, (1, 2))
    blocks.append_pages(list(range(1, 41)), PAGE)
    geometry = RowGeometry(window=4, topk=8, index_heads=2, index_dim=4)
    plan = RowPlan.build([Segment(blocks, 100, 400)], geometry, (1,), CPU, writes=False, tile_elements=10_000)
    sizes = [(tile.stop - tile.start) * tile.num_keys * 2 for tile in plan.entries[1].tiles]
    assert len(sizes) > 10
    assert max(sizes) <= 10_000


def test_unreserved_positions_are_planned() -> None:
    blocks = SequenceBlocks(1, (1, 2))
    blocks.append_pages([1], PAGE)
    with pytest.raises(RuntimeError, match="not reserved"):
        RowPlan.build([Segment(blocks, 10, 7)], RowGeometry(4, 8, 2, 4), (1,), CPU, writes=True)
