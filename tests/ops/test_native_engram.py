# SPDX-License-Identifier: Apache-2.0
"""Engram's two operations of the library against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import (
    DTYPES,
    assert_close,
    assert_nan_stays,
    assert_rows_alone,
    native_library,
    run_native,
    seeded,
    tolerance,
)

from cedar.cache.formats import pack_fp8
from cedar.ops.engram import engram_gate, engram_gather, joined_rows, pack_rows, row_width


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 5), st.sampled_from(DTYPES))
def test_a_gathered_row_differs_from_the_table(rows: int, columns: int, groups: int, dtype: torch.dtype) -> None:
    g = seeded(rows)
    table, scale = pack_fp8(torch.randn(50, 32 * groups, generator=g) * 10.0 ** torch.randint(-8, 8, (50, 1), generator=g))
    ids = torch.randint(-1, 50, (rows, columns), generator=g)
    actual = run_native(engram_gather, ids, table, scale, dtype)
    assert actual.shape == (rows, columns * 32 * groups)
    if rows:
        assert torch.equal(actual, engram_gather(ids, table, scale, dtype))
        assert (actual.view(rows, columns, -1)[ids < 0] == 0).all()
    joined = joined_rows(table, scale)
    assert torch.equal(actual, run_native(engram_gather, ids, joined, None, dtype))
    assert torch.equal(actual, engram_gather(ids, joined, None, dtype))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 700), st.integers(1, 9), st.booleans())
def test_a_packed_row_is_another(rows: int, groups: int, joined: bool) -> None:
    native_library()
    g, dim = seeded(rows), 32 * groups
    table, scale = (torch.randint(0, 256, (300, width), generator=g, dtype=torch.uint8) for width in (dim, groups))
    ids = torch.randint(-1, 301, (rows,), generator=g)
    if rows:
        ids[0] = -(1 << 40)
    packed = torch.full((rows, row_width(dim)), 7, dtype=torch.uint8)
    source = (joined_rows(table, scale), None) if joined else (table, scale)
    pack_rows(ids, source[0], source[1], packed)
    alive = (ids >= 0) & (ids < 300)
    expected = torch.cat([table, scale], 1)[ids.where(alive, 0)] * alive[:, None]
    assert torch.equal(packed[:, : dim + groups], expected)
    assert packed[:, dim + groups :].eq(7).all()


@pytest.mark.parametrize(("width", "condition"), [(265, "a.width % 8 == 0"), (256, "a.width >= a.dim [+] a.dim / 32")])
def test_rows_that_cannot_have_their_scales_are_read(width: int, condition: str) -> None:
    native_library()
    ids, table, out = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(5, width, dtype=torch.uint8), torch.zeros(1, 1, 256)
    with pytest.raises(RuntimeError, match=condition):
        torch.ops.cedar.engram_gather.default(ids, table, None, out)
    with pytest.raises(RuntimeError, match="to 256 bytes; dim is 256"):
        pack_rows(ids, torch.zeros(5, 264, dtype=torch.uint8), None, torch.empty(1, 256, dtype=torch.uint8))


def test_packing_reads_what_is_no_table() -> None:
    native_library()
    ids, table, scale = (
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(5, 64, dtype=torch.uint8),
        torch.zeros(5, 2, dtype=torch.uint8),
    )
    out = torch.zeros(3, 72, dtype=torch.uint8)
    with pytest.raises(TypeError, match="rows are int64"):
        pack_rows(ids.int(), table, scale, out)
    with pytest.raises(TypeError, match="table_scale and out uint8"):
        pack_rows(ids, table, scale.float(), out)
    with pytest.raises(ValueError, match="dense"):
        pack_rows(ids, table.t().contiguous().t(), scale, out)
    with pytest.raises(ValueError, match=r"scales .*4, 2"):
        pack_rows(ids, table, scale[:4], out)
    with pytest.raises(ValueError, match=r"2, 72.* for 3 rows"):
        pack_rows(ids, table, scale, out[:2])


def test_every_code_and_scale_is_decoded_otherwise() -> None:
    table = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    ids = torch.arange(256)[:, None]
    actual, expected = (
        run_native(engram_gather, ids, table, scale, torch.float32),
        engram_gather(ids, table, scale, torch.float32),
    )
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_a_row_behind_the_table_is_read() -> None:
    table, scale = torch.zeros(5, 32, dtype=torch.uint8), torch.zeros(5, 1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"ids\[1\] is 5, the table has 5 rows"):
        run_native(engram_gather, torch.tensor([[4, 5]]), table, scale, torch.float32)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 120), st.sampled_from(DTYPES))
def test_the_gate_differs_from_the_reference(rows: int, hc: int, hidden: int, dtype: torch.dtype) -> None:
    g = seeded(rows)
    streams, keys_value = (
        torch.randn(rows, hc, hidden, generator=g).to(dtype),
        torch.randn(rows, (hc + 1) * hidden, generator=g).to(dtype),
    )
    weight = torch.randn(hc, hidden, generator=g)
    arguments = (streams, keys_value, weight, 1e-20)
    # the signed square root makes a dot product near 0 steep
    assert_close(run_native(engram_gate, *arguments), engram_gate(*arguments), max(1e-4, tolerance(dtype)))

    assert_rows_alone(lambda part: [run_native(engram_gate, streams[part], keys_value[part], weight, 1e-20)], rows)


def test_a_nan_spreads_to_other_rows() -> None:
    streams, keys_value = torch.randn(9, 4, 64), torch.randn(9, 320)

    def poison() -> None:
        streams[3], keys_value[3] = torch.nan, torch.nan

    assert_nan_stays(lambda: [run_native(engram_gate, streams, keys_value, torch.ones(4, 64), 1e-20)], poison, 3)
    assert run_native(engram_gate, streams, keys_value, torch.ones(4, 64), 1e-20)[3].isnan().all()
