# SPDX-License-Identifier: Apache-2.0
"""The library's Engram operations on a GPU: rows from its memory and from pinned host memory, and the gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_support import assert_close, run_native, seeded

from cedar.ops.engram import FEWEST_PACKED, Staging, engram_gate, engram_gather, joined_rows
from cedar.ops.native import NativeUnsupported, load

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def on_gpu(test: Any) -> Any:
    for mark in gpu:
        test = mark(test)
    return test


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_packed_way_gives_other_rows(dtype: torch.dtype) -> None:
    load()
    g, staging = seeded(3), Staging(torch.device("cpu"))
    table, scale = (torch.randint(0, 254, (900, width), generator=g, dtype=torch.uint8) for width in (64, 2))
    for tokens in (3, 2100, 7, 0):
        ids = torch.randint(-2, 900, (tokens, 5), generator=g)
        ids[:1, 0] = -(1 << 40)
        expected = engram_gather(ids, table, scale, dtype)
        for source in ((table, scale), (joined_rows(table, scale), None)):
            actual = staging.gather(ids, source[0], source[1], dtype)
            assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("dim", "columns", "rows"), [(256, 24, 1), (256, 24, 300), (256, 24, 1500), (32, 3, 17), (544, 5, 40), (544, 5, 900)]
)
def test_rows_are_other_rows(dim: int, columns: int, rows: int, joined: bool, pinned: bool, dtype: torch.dtype) -> None:
    g = seeded(rows)
    table = torch.randint(0, 256, (5000, dim), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 254, (5000, dim // 32), generator=g, dtype=torch.uint8)
    ids = torch.randint(-1, 5000, (rows, columns), generator=g)
    ids[0, 0], ids[-1, -1] = 4999, -(1 << 40)
    expected = engram_gather(ids, table, scale, dtype)
    parts = (joined_rows(table, scale), None) if joined else (table, scale)
    places = [part if part is None else part.pin_memory() if pinned else part.cuda() for part in parts]
    actual = run_native(engram_gather, ids.cuda(), *places, dtype)
    assert torch.equal(actual.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


@on_gpu
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


@on_gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_rows_from_the_host_are_other_rows(joined: bool, pinned: bool, home: str) -> None:
    g = seeded(5)
    table, scale = (torch.randint(0, 250, (5000, width), generator=g, dtype=torch.uint8) for width in (256, 8))
    parts = (joined_rows(table, scale), None) if joined else (table, scale)
    places = [part.pin_memory() if pinned and part is not None else part for part in parts]
    for tokens in (1, FEWEST_PACKED - 1, FEWEST_PACKED, 2500, 300):  # grows, and is written again at once
        ids = torch.randint(-1, 5000, (tokens, 24), generator=g)
        actual = run_native(engram_gather, ids.to(home), *places, torch.bfloat16, torch.device("cuda", 0))
        expected = engram_gather(ids, table, scale, torch.bfloat16)
        assert actual.is_cuda
        assert torch.equal(actual.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


@on_gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_a_captured_lookup_stages_what_a_replay_cannot(pinned: bool) -> None:
    table, scale = torch.full((600, 256), 0x38, dtype=torch.uint8), torch.full((600, 8), 127, dtype=torch.uint8)
    if pinned:
        table, scale = table.pin_memory(), scale.pin_memory()
    ids = torch.zeros(256, 24, dtype=torch.int64, device="cuda")
    load()
    graph = torch.cuda.CUDAGraph()
    if not pinned:
        with pytest.raises(NativeUnsupported, match="not pinned"), torch.cuda.graph(graph):
            engram_gather.bodies["native"](ids, table, scale, torch.bfloat16)
        return
    with torch.cuda.graph(graph):
        captured = engram_gather.bodies["native"](ids, table, scale, torch.bfloat16)
    ids.fill_(-1)
    ids[3] = 599
    graph.replay()
    assert captured[3].eq(1).all()
    assert captured[:3].eq(0).all()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 5120), (50, 5120), (7, 64), (230, 1032), (1100, 5120)])
def test_a_gate_differs_from_the_reference(rows: int, hidden: int, dtype: torch.dtype) -> None:
    g = seeded(rows)
    streams, keys = torch.randn(rows, 4, hidden, generator=g).to(dtype), torch.randn(rows, 5 * hidden, generator=g).to(dtype)
    weight = torch.rand(4, hidden, generator=g)
    streams[0, 0] = 0  # no dot product at all
    actual = run_native(engram_gate, streams.cuda(), keys.cuda(), weight.cuda(), 1e-20)
    assert_close(actual.cpu(), engram_gate(streams, keys, weight, 1e-20), 2e-6 if dtype is torch.float32 else 4e-3)


@on_gpu
def test_a_gate_depends_on_its_batch() -> None:
    g = seeded(9)
    rows = 300
    streams, keys = (torch.randn(rows, n * 1024, generator=g).to(torch.bfloat16).cuda() for n in (4, 5))
    weight = torch.rand(4, 1024, generator=g).cuda()

    def run(part: slice) -> torch.Tensor:
        some = streams[part].view(-1, 4, 1024).contiguous()
        out: torch.Tensor = run_native(engram_gate, some, keys[part].contiguous(), weight, 1e-20)
        return out.cpu()

    together = run(slice(0, rows))
    for part in (slice(0, 1), slice(1, 9), slice(9, rows)):
        assert torch.equal(run(part), together[part])
