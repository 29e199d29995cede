# SPDX-License-Identifier: Apache-2.0
"""The library's attention and index at the release's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from perf.kernels.case import OURS, Case, rotate, sets_for, token_counts
from perf.kernels.cases import difference, native, normal, seeded, uniform
from torch import Tensor

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import RecordPool, RecordView
from cedar.ops.attention import mega_attention

HEADS, HEAD, PAIRS, WINDOW, SELECTED = 64, 512, 32, 128, 512
INDEX_HEADS, INDEX_HEAD, TOP_K, BLOCK, CANDIDATES, PER_PAGE, MXFP4 = 32, 128, 512, 8, 2048, 64, 4
KEY_BYTES = 17 * INDEX_HEAD / 32
CONTEXTS = (8192, 65536, 524288)
MOST_KEYS = 1 << 23
"""Index keys of a set (570 MB); rows share pages where they would have more."""


def cases(tokens: list[int] | None) -> Iterator[Case]:
    yield from attention_cases(tokens)
    yield from index_cases(tokens)


# ---- attention ----


def _pool(record: WindowRecords | GlobalRecords, count: int, g: torch.Generator) -> RecordPool:
    pool = RecordPool.allocate(record, count + 1, torch.device("cuda"))
    some = record.encode(normal(g, 4096, record.dim))
    for first in range(1, count + 1, 4096):
        pool.rows[first : first + 4096] = some[: min(4096, count + 1 - first)]
    return pool


def _attention_inputs(rows: int, selected: int) -> Callable[[int], tuple[Any, ...]]:
    def make(seed: int) -> tuple[Any, ...]:
        g = seeded(seed)
        views = [
            RecordView(
                _pool(WindowRecords(HEAD), rows * WINDOW, g), 1 + torch.arange(rows * WINDOW, device="cuda").view(rows, -1)
            )
        ]
        if selected:
            count = max(rows * 4096, 1 << 17)
            index = torch.randint(1, count + 1, (rows, selected), generator=g, device="cuda").sort().values
            views.append(RecordView(_pool(GlobalRecords(HEAD), count, g), index))
        angle, query = uniform(g, rows, PAIRS), normal(g, rows, HEADS, HEAD)
        return query, angle.cos(), angle.sin(), normal(g, HEADS, dtype=torch.float32), views, HEAD**-0.5, 1 << 24

    return make


def attention_cases(tokens: list[int] | None) -> Iterator[Case]:
    for rows in token_counts(tokens, (1, 8, 48, 128, 384, 1024, 4096)):
        for selected in (SELECTED, 0):
            keys = WINDOW + selected
            floor = rows * (WINDOW * 528 + selected * 288 + 2 * HEADS * HEAD * 2 + keys * 8)
            make, sets = _attention_inputs(rows, selected), sets_for(floor)

            def check(make: Callable[[int], tuple[Any, ...]] = make) -> float:
                inputs = make(0)
                with torch.inference_mode():
                    return difference(native(mega_attention)(*inputs), mega_attention.reference(*inputs))

            yield Case(
                op="mega_attention",
                name=OURS,
                facts={"T": rows, "keys": keys},
                build=lambda make=make, sets=sets: rotate(make, sets, lambda inputs: native(mega_attention)(*inputs)),  # type: ignore[misc]
                floor_bytes=floor,
                floor_flops=4.0 * rows * HEADS * keys * HEAD,
                sets=sets,
                check=check if rows <= 384 else None,
            )


# ---- index ----


class Search(NamedTuple):
    """Arguments of the operation, results included."""

    tensors: tuple[Tensor | None, ...]
    scalars: tuple[float, ...]

    def run(self) -> None:
        torch.ops.cedar.mqa_logits_topk.default(*self.tensors, *self.scalars)


def _search_inputs(rows: int, context: int, mode: str) -> Callable[[int], Search]:
    pages = context // PER_PAGE
    all_pages = min(rows * pages, max(pages, MOST_KEYS // PER_PAGE))

    def make(seed: int) -> Search:
        g = seeded(seed)
        pool = RecordPool.allocate(IndexKeyRecords(INDEX_HEAD), (all_pages + 1) * PER_PAGE, torch.device("cuda"))
        some = pool.record.encode(normal(g, 1 << 16, INDEX_HEAD))
        count = pool.rows.shape[0]
        for first in range(PER_PAGE, count, 1 << 16):
            places = torch.arange(first, min(first + (1 << 16), count), device="cuda")
            # other keys everywhere: no two entries of a row have equal scores
            pool.store(some[torch.randint(0, len(some), (len(places),), generator=g, device="cuda")], places)
        table = 1 + torch.arange(rows * pages, device="cuda") % all_pages
        table = table[torch.randperm(len(table), generator=g, device="cuda")]
        base = torch.arange(rows, device="cuda") * pages
        angle = uniform(g, rows, PAIRS)
        index = torch.empty(rows, TOP_K, dtype=torch.int64, device="cuda")
        candidates = published = None
        if mode == "sparse":
            blocks = context // BLOCK
            order = torch.rand(rows, blocks, generator=g, device="cuda").argsort(1)[:, :CANDIDATES].sort(1).values
            candidates = torch.nn.functional.pad(order, (0, CANDIDATES - order.shape[1]), value=-1)
        if mode == "publish":
            published = torch.empty(rows, CANDIDATES, dtype=torch.int64, device="cuda")
        visible = torch.full((rows,), context, device="cuda")
        query, weight = normal(g, rows, INDEX_HEADS, INDEX_HEAD), normal(g, rows, INDEX_HEADS)
        inputs = (query, weight, angle.cos(), angle.sin(), pool.rows, table, base, visible)
        scalars = (MXFP4, TOP_K, context, PER_PAGE, BLOCK, 1, (INDEX_HEAD * INDEX_HEADS) ** -0.5)
        return Search((*inputs, candidates, index, torch.empty_like(index), published), scalars)

    return make


def index_cases(tokens: list[int] | None) -> Iterator[Case]:
    for rows in token_counts(tokens, (1, 16, 48)):
        for context in CONTEXTS:
            for mode in ("dense", "sparse", "publish"):
                if rows * context > 48 * CONTEXTS[-1]:
                    continue
                scored = min(context, CANDIDATES * BLOCK) if mode == "sparse" else context
                floor = rows * (scored * KEY_BYTES + INDEX_HEADS * INDEX_HEAD * 2 + TOP_K * 16)
                make, sets = _search_inputs(rows, context, mode), sets_for(min(rows * context, MOST_KEYS) * KEY_BYTES)
                yield Case(
                    op="mqa_logits_topk",
                    name=OURS,
                    facts={"T": rows, "context": context, "mode": mode},
                    build=lambda make=make, sets=sets: rotate(make, sets, Search.run),  # type: ignore[misc]
                    floor_bytes=floor,
                    floor_flops=2.0 * rows * scored * INDEX_HEADS * INDEX_HEAD,
                    sets=sets,
                )
