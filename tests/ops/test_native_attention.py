# SPDX-License-Identifier: Apache-2.0
"""Core attention of the library against float64, on every kind of record."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import DTYPES, assert_close, assert_nan_stays, assert_rows_alone, run_native, seeded, tolerance
from torch import Tensor

from cedar.cache.layout import GlobalRecords, WindowRecords
from cedar.cache.records import FloatRecords, RecordPool, RecordView
from cedar.ops.attention import mega_attention
from cedar.ops.rope import rotate


@dataclass(frozen=True)
class Case:
    query: Tensor
    angle: Tensor
    sink: Tensor
    pools: tuple[RecordPool, ...]
    indices: tuple[Tensor, ...]

    def rows(self, part: slice) -> Case:
        indices = tuple(index[part] for index in self.indices)
        return replace(self, query=self.query[part], angle=self.angle[part], indices=indices)

    def run(self) -> Tensor:
        views = [RecordView(pool, index) for pool, index in zip(self.pools, self.indices, strict=True)]
        scale = self.query.shape[2] ** -0.5
        return run_native(mega_attention, self.query, self.angle.cos(), self.angle.sin(), self.sink, views, scale, 1 << 20)

    def expected(self) -> Tensor:
        """The formula in float64, with the roundings of the contract."""
        cos, sin = self.angle.cos(), self.angle.sin()
        query = rotate(self.query, cos, sin).double()
        out = torch.zeros_like(query)
        for row in range(len(query)):
            keys = [
                pool.record.decode(pool.rows)[index[row][index[row] != 0]]
                for pool, index in zip(self.pools, self.indices, strict=True)
            ]
            values = torch.cat(keys).double()
            scores = query[row] @ values.T * query.shape[2] ** -0.5
            both = torch.cat([scores, self.sink[:, None].double()], 1)
            out[row] = both.softmax(1)[:, :-1] @ values
        return rotate(out.to(self.query.dtype), cos, sin, inverse=True)


def case(
    rows: int, heads: int, dim: int, pairs: int, widths: tuple[int, ...], dtype: torch.dtype, packed: bool, seed: int = 0
) -> Case:
    g = seeded(seed)
    records = (WindowRecords(dim), GlobalRecords(dim)) if packed else (FloatRecords(dim, dtype), FloatRecords(dim, dtype))
    pools = []
    for record in records[: len(widths)]:
        values = torch.randn(30, dim, generator=g).to(dtype)
        values[0] = 0
        pools.append(RecordPool(record, record.encode(values)))
        pools[-1].rows[0] = 0
    indices = tuple(torch.randint(0, 30, (rows, width), generator=g) for width in widths)
    query = torch.randn(rows, heads, dim, generator=g).to(dtype)
    return Case(query, torch.randn(rows, pairs, generator=g), torch.randn(heads, generator=g), tuple(pools), indices)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([32, 64, 96, 160]),
    st.integers(1, 16),
    st.integers(1, 20),
    st.integers(0, 40),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_the_output_differs_from_the_formula(
    rows: int, heads: int, dim: int, pairs: int, window: int, selected: int, dtype: torch.dtype, packed: bool
) -> None:
    x = case(rows, heads, dim, pairs, (window, selected) if selected else (window,), dtype, packed)
    assert_close(x.run(), x.expected(), tolerance(dtype) * 2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_its_batch_or_on_masked_columns(dtype: torch.dtype, packed: bool) -> None:
    x = case(33, 5, 64, 16, (8, 24), dtype, packed)
    assert_rows_alone(lambda part: [x.rows(part).run()], 33)
    wider = tuple(torch.nn.functional.pad(index, (0, 5)) for index in x.indices)
    assert torch.equal(replace(x, indices=wider).run(), x.run())


def test_a_row_without_keys_is_not_zero() -> None:
    x = case(3, 4, 64, 16, (8, 8), torch.float32, True)
    for index in x.indices:
        index[1] = 0
    assert (x.run()[1] == 0).all()
    assert torch.isfinite(x.run()).all()


@pytest.mark.parametrize(("sink", "zero"), [(torch.inf, True), (-torch.inf, False)])
def test_an_infinite_sink_makes_nans(sink: float, zero: bool) -> None:
    x = replace(case(4, 3, 64, 16, (8, 8), torch.float32, True), sink=torch.full((3,), sink))
    out = x.run()
    assert torch.isfinite(out).all()
    assert (out == 0).all() == zero


def test_a_nan_spreads_to_other_rows() -> None:
    x = case(9, 4, 64, 16, (8, 8), torch.float32, True)

    def poison() -> None:
        x.query[3] = torch.nan

    assert_nan_stays(lambda: [x.run()], poison, 3)


def test_records_that_nobody_sees_leak() -> None:
    x = case(4, 3, 64, 16, (8, 8), torch.float32, True)
    clean = x.run()
    for pool, index in zip(x.pools, x.indices, strict=True):
        unseen = ~torch.isin(torch.arange(30), index)
        unseen[0] = False
        pool.rows[unseen] = 0xFF
    assert torch.equal(x.run(), clean)


@pytest.mark.parametrize("value", [-1, 30, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("which", [0, 1])
def test_a_row_outside_of_a_pool_is_read(which: int, value: int) -> None:
    x = case(4, 3, 64, 16, (8, 5), torch.float32, True)
    x.indices[which][2, 4] = value
    name = ("window_index", "entry_index")[which]
    with pytest.raises(RuntimeError, match=rf"mega_attention: {name}\[2, 4\] is {value}; allowed: at least 0 and less than 30$"):
        x.run()
    x.indices[which][2, 4] = 29
    assert torch.isfinite(x.run()).all()
