# SPDX-License-Identifier: Apache-2.0
"""Engram rows by a plain Triton kernel, and by PyTorch on the CPU with one copy. They copy rows; ours decodes them too."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from perf.kernels.case import Case, Unavailable
from perf.kernels.cases import COLUMNS, HOST_SETS, seeded
from perf.kernels.peers_data import Chain, Inputs, peer
from torch import Tensor

WORDS = 33
"""Of 8 bytes in a row: 256 codes and 8 scales."""
GPU_GIB = 16
SETS = 8


@functools.cache
def _table(place: str, gib: int) -> Tensor:
    """int64 [rows, 33], every word its own number."""
    rows = (gib << 30) // (WORDS * 8)
    host: dict[str, Any] = {"pin_memory": True} if place == "pinned host memory" else {"device": "cuda"}
    table = torch.empty(rows * WORDS, dtype=torch.int64, **host)
    return torch.arange(rows * WORDS, out=table).view(rows, WORDS)


def _same(ids: Tensor, rows: Tensor) -> float:
    return 0.0 if torch.equal(rows, ids[:, None] * WORDS + torch.arange(WORDS, device=ids.device)) else math.inf


def _kernel(rows: int, place: str, gib: int, block: int, programs: int) -> Chain:
    try:
        gather = importlib.import_module("perf.kernels.engram_triton").gather
    except ImportError as error:
        raise Unavailable(f"triton: {error}") from error
    table, words = _table(place, gib), rows * COLUMNS * WORDS

    def make(seed: int) -> Inputs:
        ids = torch.randint(0, len(table), (rows * COLUMNS,), generator=seeded(seed), device="cuda")
        return ids, torch.empty(len(ids), WORDS, dtype=torch.int64, device="cuda")

    def run(inputs: Inputs) -> Tensor:
        ids, out = inputs
        gather[(programs,)](table.data_ptr(), ids, out, words, BLOCK=block, num_warps=8 if block == 1024 else 4)
        return out  # type: ignore[no-any-return]

    return Chain(make, run, lambda inputs, out: _same(inputs[0], out))


def _on_cpu(rows: int, gib: int) -> Chain:
    table, shape = _table("pinned host memory", gib), (rows * COLUMNS, WORDS)
    staged, out = torch.empty(shape, dtype=torch.int64, pin_memory=True), torch.empty(shape, dtype=torch.int64, device="cuda")

    def make(seed: int) -> Inputs:
        return (torch.randint(0, len(table), (rows * COLUMNS,), generator=torch.Generator().manual_seed(seed)),)

    def run(inputs: Inputs) -> Tensor:
        (ids,) = inputs
        torch.index_select(table, 0, ids, out=staged)
        return out.copy_(staged, non_blocking=True)

    return Chain(make, run, lambda inputs, copied: _same(inputs[0], copied.cpu()))


def engram(rows: int, host_gib: int) -> Iterator[Case]:
    """host_gib: of the table in pinned host memory; 0: none."""
    size = rows * COLUMNS * (2.0 * WORDS * 8 + 8)
    words = rows * COLUMNS * WORDS
    for place, gib in (("GPU memory", GPU_GIB), ("pinned host memory", host_gib)):
        if gib == 0:
            continue
        facts: dict[str, int | str] = {"T": rows, "table": place}
        for block, most in ((256, 1 << 20), (1024, 1 << 20), (256, 132), (1024, 32)):
            programs = math.ceil(words / block)
            if programs < most < 1 << 20:
                continue  # the same launch as without a limit
            programs = min(programs, most)
            build: Callable[[], Chain] = functools.partial(_kernel, rows, place, gib, block, programs)
            yield peer("engram_gather", f"Triton gather, {programs} blocks of {block}", facts, size, 0.0, build, 0.0, SETS)
        if place != "GPU memory":
            name = "CPU index_select, one copy (host's clock)"
            build = functools.partial(_on_cpu, rows, gib)
            yield peer("engram_gather", name, facts, size, 0.0, build, 0.0, HOST_SETS, host_timed=True)
