# SPDX-License-Identifier: Apache-2.0
"""The library's Engram operations on a GPU: rows from its memory and from pinned host memory, and the gate."""

from __future__ import annotations

import pytest
import torch
from native_support import assert_close, run_native, seeded

from cedar.ops.engram import engram_gate, engram_gather
from cedar.ops.native import NativeUnsupported, load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("dim", "columns", "rows"), [(256, 24, 1), (256, 24, 300), (32, 3, 17)])
def test_rows_are_other_rows(dim: int, columns: int, rows: int, pinned: bool, dtype: torch.dtype) -> None:
    g = seeded(rows)
    table = torch.randint(0, 256, (5000, dim), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 254, (5000, dim // 32), generator=g, dtype=torch.uint8)
    ids = torch.randint(-1, 5000, (rows, columns), generator=g)
    ids[0, 0], ids[-1, -1] = 4999, -(1 << 40)
    expected = engram_gather(ids, table, scale, dtype)
    places = [part.pin_memory() if pinned else part.cuda() for part in (table, scale)]
    actual = run_native(engram_gather, ids.cuda(), *places, dtype)
    assert torch.equal(actual.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_row_behind_four_gigabytes_is_another() -> None:
    rows = (5 << 30) // 256
    table, scale = (
        torch.zeros(rows, 256, dtype=torch.uint8, device="cuda"),
        torch.full((rows, 8), 127, dtype=torch.uint8, device="cuda"),
    )
    table[rows - 1] = 0x38
    out = run_native(engram_gather, torch.tensor([[rows - 1, 0]], device="cuda"), table, scale, torch.bfloat16)
    assert out.unique().tolist() == [0.0, 1.0]
    assert out[0, :256].eq(1).all()


def test_a_table_in_memory_that_may_move_is_read() -> None:
    load()
    table, scale = torch.zeros(8, 256, dtype=torch.uint8), torch.zeros(8, 8, dtype=torch.uint8)
    with pytest.raises(NativeUnsupported, match="not pinned"):
        engram_gather._native(torch.zeros(1, 24, dtype=torch.int64, device="cuda"), table, scale, torch.bfloat16)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 5120), (50, 5120), (7, 64)])
def test_a_gate_differs_from_the_reference(rows: int, hidden: int, dtype: torch.dtype) -> None:
    g = seeded(rows)
    streams, keys = torch.randn(rows, 4, hidden, generator=g).to(dtype), torch.randn(rows, 5 * hidden, generator=g).to(dtype)
    weight = torch.rand(4, hidden, generator=g)
    streams[0, 0] = 0  # no dot product at all
    actual = run_native(engram_gate, streams.cuda(), keys.cuda(), weight.cuda(), 1e-20)
    assert_close(actual.cpu(), engram_gate(streams, keys, weight, 1e-20), 2e-6 if dtype is torch.float32 else 4e-3)
