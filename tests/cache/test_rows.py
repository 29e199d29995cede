# SPDX-License-Identifier: Apache-2.0
"""Index tensors of ragged batches against a reading of them, row by row, that knows only which position lies where."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.rows import RowGeometry, RowPlan, Segment
from cedar.cache.store import BlockTable, SequenceBlocks
from golden_support import block_tables, entry_rows

PAGE = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    segments: list[Segment]
    geometry: RowGeometry
    tile_elements: int

    def plan(self, *, writes: bool = True) -> RowPlan:
        tables = block_tables([segment.blocks for segment in self.segments], PAGE)
        return RowPlan.build(self.segments, self.geometry, tables, CPU, writes=writes, tile_elements=self.tile_elements)

    def rows(self) -> list[tuple[Segment, int]]:
        """Segment and position of every row."""
        return [(s, position) for s in self.segments for position in range(s.start, s.start + s.count)]


def entries_of(segment: Segment, ratio: int) -> list[int]:
    """Pool rows of all entries that have a page."""
    per_page = PAGE // ratio
    return entry_rows(segment.blocks, per_page, len(segment.blocks.pages) * per_page).tolist()  # type: ignore[no-any-return]


@st.composite
def batches(draw: st.DrawFn) -> Case:
    window = draw(st.integers(1, 9))
    segments, next_page = [], 1
    single_only = draw(st.booleans())
    for slot in range(1, draw(st.integers(1, 5)) + 1):
        start = draw(st.integers(0, 60))
        count = 1 if single_only else draw(st.integers(1, 40))
        pages = -(-(start + count) // PAGE)
        blocks = SequenceBlocks(slot, pages=list(range(next_page + pages - 1, next_page - 1, -1)))
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
    index = plan.view.index.numpy()
    for row, (segment, position) in enumerate(case.rows()):
        for column, seen in enumerate(range(position - window + 1, position + 1)):
            if seen >= segment.window_floor:
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
            expected.append((row, entries_of(segment, ratio)[group], group * ratio, first))
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
    entries, topk = plan.entries[ratio], case.geometry.topk
    counts = [(position + 1) // ratio for _, position in case.rows()]
    assert entries.visible.tolist() == counts
    assert entries.width == min(topk, max(counts))
    assert entries.ragged == any(count < entries.width for count in counts)
    everything = torch.arange(max(counts)).expand(len(counts), -1)
    rows = entries.table.rows(entries.base, everything.where(everything < entries.visible[:, None], 0))
    for row, (segment, _) in enumerate(case.rows()):
        assert rows[row, : counts[row]].tolist() == entries_of(segment, ratio)[: counts[row]]
    if max(counts) <= topk:
        assert entries.index is not None
        assert entries.slots is not None
        for row, (segment, _) in enumerate(case.rows()):
            none = [-1] * (entries.width - counts[row])
            assert entries.index[row].tolist() == [*range(counts[row]), *none]
            assert entries.slots[row].tolist() == [*entries_of(segment, ratio)[: counts[row]], *[0] * len(none)]
        return
    assert entries.index is None
    covered = []
    for tile in entries.tiles:
        covered += range(tile.start, tile.stop)
        seen = counts[tile.start : tile.stop]
        assert tile.num_keys == max(seen)
        assert (tile.visible is None) == all(count == tile.num_keys for count in seen)
        assert (tile.slots is None) == (tile.num_keys <= topk)
        per_group = (tile.stop - tile.start) // tile.groups
        if tile.slots is not None:
            pages = entries.table.pages_of(tile.slots, tile.num_keys)
            for row in range(tile.start, tile.stop):
                held = case.rows()[row][0].blocks.pages[: -(-counts[row] // entries.table.per_page)]
                assert pages[(row - tile.start) // per_group, : len(held)].tolist() == held
    assert covered == list(range(plan.num_rows))


def test_tiles_ignore_the_element_budget() -> None:
    blocks = SequenceBlocks(1, pages=list(range(1, 41)))
    geometry = RowGeometry(window=4, topk=8, index_heads=2, index_dim=4)
    tables = block_tables([blocks], PAGE)
    plan = RowPlan.build([Segment(blocks, 100, 400)], geometry, tables, CPU, writes=False, tile_elements=10_000)
    sizes = [(tile.stop - tile.start) * tile.num_keys * 2 for tile in plan.entries[1].tiles]
    assert len(sizes) > 10
    assert max(sizes) <= 10_000


def test_unreserved_positions_are_planned() -> None:
    blocks = SequenceBlocks(1, pages=[1])
    with pytest.raises(RuntimeError, match="not reserved"):
        RowPlan.build([Segment(blocks, 10, 7)], RowGeometry(4, 8, 2, 4), block_tables([blocks], PAGE), CPU, writes=True)


def elements(value: object, seen: set[int]) -> int:
    """Elements of all arrays that a plan holds, but those of the block table."""
    if id(value) in seen or isinstance(value, BlockTable):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, dict | tuple):
        return sum(elements(item, seen) for item in (value.values() if isinstance(value, dict) else value))
    return sum(elements(item, seen) for item in vars(value).values()) if is_dataclass(value) else 0


@pytest.mark.parametrize("rows", [1, 40])
def test_a_step_costs_the_context(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host computes and copies, and what it looks up: the same at 4000 and at 400000 tokens."""
    geometry = RowGeometry(window=8, topk=32, index_heads=2, index_dim=4)
    found = []
    for start in (4_000, 400_000):
        pages = list(range(1, 2 + (start + rows) // PAGE))
        sequences = [SequenceBlocks(slot, pages=pages) for slot in (1, 2, 3)]
        tables, copied = block_tables(sequences, PAGE), [0]

        def counted(array: np.ndarray, copied: list[int] = copied) -> torch.Tensor:
            copied[0] += array.size
            return torch.as_tensor(array)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "from_numpy", counted)
            segments = [Segment(blocks, start, rows) for blocks in sequences]
            plan = RowPlan.build(segments, geometry, tables, CPU, writes=True, tile_elements=1 << 40)
        assert plan.entries[1].tiles
        found.append((elements(plan, set()), copied[0]))
    assert found[0] == found[1]
