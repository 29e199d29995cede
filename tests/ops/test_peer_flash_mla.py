# SPDX-License-Identifier: Apache-2.0
"""FlashMLA as a provider: what it is given, when it is not asked, and, on a Hopper GPU that has it, its results."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from typing import Any

import pytest
import torch
from native_support import assert_close
from torch import Tensor

import cedar.ops.peer_flash_mla
from cedar.cache.layout import GlobalRecords, WindowRecords
from cedar.cache.records import FloatRecords, RecordFormat, RecordPool, RecordView
from cedar.ops.attention import mega_attention
from cedar.ops.provider import Choice, choose, using

assert cedar.ops.peer_flash_mla  # importing it adds the body

BF16 = torch.bfloat16
HEADS, DIM, TURNED = 64, 512, 64
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_package = pytest.mark.skipif(
    not HOPPER or importlib.util.find_spec("flash_mla") is None, reason="no Hopper GPU with flash_mla"
)
BOUND = 5e-3
ENOUGH = 1 << 30


class Kernels(types.ModuleType):
    """FlashMLA's contract in PyTorch."""

    def __init__(self) -> None:
        super().__init__("flash_mla")
        self.rows: list[int] = []

    def flash_mla_sparse_fwd(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: Tensor | None = None,
        topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.rows.append(q.shape[0])
        assert q.dtype == kv.dtype == BF16
        assert indices.dtype == torch.int32
        assert q.is_contiguous()
        assert kv.is_contiguous()
        assert indices.shape[:2] == (q.shape[0], 1)
        assert indices.shape[2] % 128 == 0
        assert attn_sink is not None
        outs, highest, sums = [], [], []
        for query, chosen in zip(q.float(), indices[:, 0].long(), strict=True):
            keys = kv[chosen[(chosen >= 0) & (chosen < len(kv))], 0].float()
            scores = query @ keys.T * sm_scale
            lse = torch.logsumexp(scores, -1)
            outs.append((scores - torch.logaddexp(lse, attn_sink)[:, None]).exp() @ keys[:, :d_v])
            highest.append(scores.amax(-1) if len(keys) else lse)
            sums.append(lse)
        return torch.stack(outs).to(BF16), torch.stack(highest), torch.stack(sums)


class BehindAFlag(Kernels):
    """The build that wants to be asked for its Hopper kernels."""

    def flash_mla_sparse_fwd(self, *arguments: Any, use_legacy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        assert use_legacy
        return super().flash_mla_sparse_fwd(*arguments)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setitem(sys.modules, "flash_mla", kernels)
    return kernels


def flash_mla() -> Choice:
    return Choice(set(), set(), peers={"mega_attention": "flash_mla"})


def run(choice: Choice, arguments: tuple[Any, ...], max_elements: int = ENOUGH) -> Tensor:
    """The package's result: falling back is an error."""
    with torch.inference_mode(), using(choice):
        out = mega_attention(*arguments, max_elements)
    assert choice._told == set()
    return out


def records(g: torch.Generator, record: RecordFormat, rows: int, dtype: torch.dtype = BF16) -> RecordPool:
    """A pool whose last row, which nobody reads, is of NaNs."""
    pool = RecordPool.allocate(record, rows + 1, g.device)
    values = torch.randn(rows - 1, record.dim, generator=g, device=g.device).to(dtype)
    pool.store(record.encode(values), torch.arange(1, rows, device=g.device))
    pool.rows[rows] = 255 if record.dtype == torch.uint8 else torch.nan
    return pool


def inputs(
    g: torch.Generator,
    rows: int,
    window: int,
    selected: int,
    formats: tuple[RecordFormat, RecordFormat] = (WindowRecords(DIM), GlobalRecords(DIM)),
    heads: int = HEADS,
    dtype: torch.dtype = BF16,
) -> tuple[Any, ...]:
    """Arguments before ``max_elements``: about a quarter of the keys are masked, and all of the last row if there are more."""
    dim = formats[0].dim
    query = torch.randn(rows, heads, dim, generator=g, device=g.device).to(dtype)
    angles = torch.rand(rows, TURNED // 2, generator=g, device=g.device) * 6
    sink = torch.randn(heads, generator=g, device=g.device)
    views = []
    for record, count in zip(formats, (window, selected), strict=True):
        if count:
            index = torch.randint(1, 300, (rows, count), generator=g, device=g.device)
            index[torch.rand(rows, count, generator=g, device=g.device) < 0.25] = 0
            index[1:][-1:] = 0
            views.append(RecordView(records(g, record, 300, dtype), index))
    return query, angles.cos(), angles.sin(), sink, views, dim**-0.5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("rows", "window", "selected"), [(1, 128, 0), (2, 128, 512), (5, 100, 37), (3, 8, 0)])
def test_attention_differs_from_the_reference(kernels: Kernels, rows: int, window: int, selected: int) -> None:
    arguments = inputs(seeded(rows), rows, window, selected)
    out = run(flash_mla(), arguments)
    assert out.dtype == BF16
    assert_close(out, mega_attention(*arguments, ENOUGH), BOUND)
    assert rows == 1 or out[-1].eq(0).all()
    assert kernels.rows == [rows]


def test_a_tile_of_rows_reads_anothers_keys(kernels: Kernels) -> None:
    arguments = inputs(seeded(1), 5, 16, 24)
    whole = run(flash_mla(), arguments)
    assert torch.equal(run(flash_mla(), arguments, 2 * 40 * DIM + 1), whole)
    assert torch.equal(run(flash_mla(), arguments, 1), whole)
    assert kernels.rows == [5, 2, 2, 1, *[1] * 5]


def test_records_that_are_bfloat16_are_not_read(kernels: Kernels) -> None:
    plain = FloatRecords(DIM, BF16)
    arguments = inputs(seeded(2), 3, 16, 16, (plain, plain))
    assert_close(run(flash_mla(), arguments), mega_attention(*arguments, ENOUGH), BOUND)


def test_a_build_with_a_flag_is_called_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", BehindAFlag())
    arguments = inputs(seeded(3), 2, 16, 0)
    assert_close(run(flash_mla(), arguments), mega_attention(*arguments, ENOUGH), BOUND)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(8, DIM, BF16), (HEADS, 128, BF16), (HEADS, DIM, torch.float32)], ids=["heads", "dim", "dtype"]
)
def test_a_query_that_it_does_not_take_fails(
    kernels: Kernels, caplog: pytest.LogCaptureFixture, heads: int, dim: int, dtype: torch.dtype
) -> None:
    arguments = inputs(seeded(4), 2, 8, 0, (WindowRecords(dim), GlobalRecords(dim)), heads, dtype)
    with using(flash_mla()), caplog.at_level(logging.WARNING):
        out = mega_attention(*arguments, ENOUGH)
    assert torch.equal(out, mega_attention(*arguments, ENOUGH))
    assert kernels.rows == []
    assert [record.getMessage() for record in caplog.records] == [
        f"mega_attention runs without flash_mla where that cannot: a query is {heads} x {dim} of {dtype}; "
        "it takes 64 x 512 of bfloat16"
    ]


@pytest.mark.parametrize(("window", "selected"), [(128, 512), (128, 0), (100, 37), (8, 0)])
@pytest.mark.parametrize("rows", [2, 48, 129])
@pytest.mark.gpu
@needs_package
def test_the_package_attends_otherwise(rows: int, window: int, selected: int) -> None:
    arguments = inputs(torch.Generator("cuda").manual_seed(rows), rows, window, selected)
    choice = choose("reference", torch.device("cuda"), {"CEDAR_OP_MEGA_ATTENTION": "flash_mla"})
    for tile in (ENOUGH, 1 << 23):
        out = run(choice, arguments, tile)
        assert_close(out, mega_attention(*arguments, 1 << 23), BOUND)
        assert out[-1].eq(0).all()
