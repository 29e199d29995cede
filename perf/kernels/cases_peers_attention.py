# SPDX-License-Identifier: Apache-2.0
"""Attention and index by FlashMLA, DeepGEMM and tokenspeed-kernel: the peers of cases_attention.py's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from perf.kernels.case import Case, token_counts
from perf.kernels.cases import BF16, GROUPS, normal, seeded
from perf.kernels.cases_attention import CONTEXTS, INDEX_HEAD, INDEX_HEADS, PER_PAGE, SELECTED, TOP_K, WINDOW
from perf.kernels.peers import deep_gemm, flash_mla, tokenspeed
from perf.kernels.peers_data import (
    DISTINCT,
    HEAD,
    HEADS,
    RECORD,
    Chain,
    Inputs,
    attended,
    compiled,
    dequantised,
    fp8,
    peer,
    records,
    relative,
    rope_table,
    rotated,
    some_rows,
)
from torch import Tensor

EPS = 1e-6
MOST_DECODED = 384
PREFILLED_TOO = 128
"""Fewest rows of a prefill; between it and `MOST_DECODED` rows are decoded ones."""
PREFILL_KEYS = 65536
KEY_BYTES = INDEX_HEAD + 4


def cases(tokens: list[int] | None) -> Iterator[Case]:
    for rows in token_counts(tokens, (1, 8, 48, 128, 384, 1024, 4096)):
        for selected in (SELECTED, 0):
            if rows <= MOST_DECODED:
                yield from decode(rows, selected)
            if rows == PREFILLED_TOO or rows > MOST_DECODED:
                yield from prefill(rows, WINDOW + selected)
    for rows in token_counts(tokens, (1, 16, 48)):
        for context in CONTEXTS:
            if rows * context <= 48 * CONTEXTS[-1]:
                yield from index(rows, context)


# ---- attention ----


def decode(rows: int, selected: int) -> Iterator[Case]:
    """Query RoPE, sparse attention over records of 584 bytes, inverse RoPE with a cast to FP8.

    The second way turns the query by a kernel that normalises it and stores a record besides: more work, in less time.
    """
    keys = WINDOW + selected
    facts: dict[str, int | str] = {"T": rows, "keys": keys}
    size, flops = rows * (keys * RECORD + HEADS * HEAD * 4.0), 4.0 * rows * HEADS * keys * HEAD
    for name, turn in TURNS.items():
        name = f"{name}, FlashMLA sparse decode of 584 B, {CAST}"
        chain = lambda turn=turn: _decode(rows, selected, *turn())  # noqa: E731
        yield peer("mega_attention", name, facts, size, flops, chain, bound=0.06)


Turn = tuple[Callable[[Inputs], Tensor], Callable[[Inputs], Tensor]]
"""The kernel that turns a query, and what it should be: of (query, positions, table, the rest)."""


def _turn() -> Turn:
    return lambda inputs: compiled(rotated)(*inputs[:3]), lambda inputs: rotated(inputs[0], inputs[1], inputs[2])


def _turn_and_store() -> Turn:
    store = tokenspeed("thirdparty.cuda.dsv4_attention").fused_qnorm_rope_kv_insert

    def run(inputs: Inputs) -> Tensor:
        query, positions, table, (_, new, slots, cache) = inputs
        store(query, new, cache, slots, positions, table, EPS, 64)  # in place
        return query  # type: ignore[no-any-return]

    def expected(inputs: Inputs) -> Tensor:
        query = inputs[3][0].float()
        query = query * torch.rsqrt(query.square().mean(-1, keepdim=True) + EPS)
        return rotated(query.to(BF16), inputs[1], inputs[2])

    return run, expected


TURNS = {"torch.compile RoPE": _turn, "tokenspeed norm, RoPE, insert": _turn_and_store}
CAST = "tokenspeed inverse RoPE + cast"


def _first(g: torch.Generator, rows: int) -> Inputs:
    """What a `Turn` takes: a query, positions, the table, and a record's value, number and pool for the kernel that stores it."""
    query, table, stored = normal(g, rows, HEADS, HEAD), rope_table(), records(g, rows)[0]
    positions = torch.randint(0, len(table), (rows,), generator=g, device="cuda")
    store = query.clone(), normal(g, rows, HEAD), torch.arange(rows, device="cuda"), stored.view(len(stored), -1)
    return query, positions, table, store


def _cast() -> Callable[[Tensor, Inputs], tuple[Tensor, Tensor]]:
    cast = tokenspeed("ops.attention.dsv4.triton").dsv4_fused_inv_rope_fp8_quant
    return lambda out, first: cast(out, first[1], first[2], GROUPS, HEADS // GROUPS, tma_aligned_scales=False)


def _error(first: Inputs, result: tuple[Tensor, Tensor], out: Tensor, checked: list[int]) -> float:
    """Of the checked rows' FP8, whose attention was to be `out`."""
    out = rotated(out.to(BF16), first[1][checked], first[2], inverse=True)
    return relative(dequantised(*(part[checked] for part in result)).view(len(checked), HEADS, HEAD), out)


def _decode(rows: int, selected: int, turn: Callable[[Inputs], Tensor], turned: Callable[[Inputs], Tensor]) -> Chain:
    (library, more), cast = flash_mla(), _cast()
    schedule = library.get_mla_metadata()[0]

    def make(seed: int) -> Inputs:
        g = seeded(seed)
        first, sink = _first(g, rows), normal(g, HEADS, dtype=torch.float32)
        window, values = records(g, rows * WINDOW)
        recent = torch.arange(rows * WINDOW, device="cuda", dtype=torch.int32).view(rows, 1, WINDOW)
        entries = chosen = entry_values = None
        if selected:
            count = max(rows * 4096, 1 << 17)
            entries, entry_values = records(g, count)
            chosen = torch.randint(0, count, (rows, 1, selected), generator=g, device="cuda").sort().values.int()
        return first, (window, values, recent, entries, entry_values, chosen, sink)

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        first, (window, _, recent, entries, _, chosen, sink) = inputs
        parts = (window, None, None, HEAD, schedule, None, HEAD**-0.5, False, True, recent, sink, entries, chosen)
        return cast(library.flash_mla_with_kvcache(turn(first)[:, None], *parts, **more)[0][:, 0], first)

    def error(inputs: Inputs, result: tuple[Tensor, Tensor]) -> float:
        first, (_, values, recent, _, entry_values, chosen, sink) = inputs
        checked = some_rows(rows)
        keys = [values[recent[row, 0].long() % DISTINCT] for row in checked]
        if selected:
            keys = [torch.cat([k, entry_values[chosen[r, 0].long() % DISTINCT]]) for k, r in zip(keys, checked, strict=True)]
        out = torch.stack([attended(q, k, sink) for q, k in zip(turned(first)[checked], keys, strict=True)])
        return _error(first, result, out, checked)

    return Chain(make, run, error)


def prefill(rows: int, keys: int) -> Iterator[Case]:
    """Query RoPE, sparse attention over keys in bf16, inverse RoPE with a cast to FP8; and that attention's kernel by itself.

    A pool of records would have to be decoded before, which neither does.
    """
    facts: dict[str, int | str] = {"T": rows, "keys": keys}
    size, flops = rows * HEADS * HEAD * 4.0 + PREFILL_KEYS * HEAD * 2, 4.0 * rows * HEADS * keys * HEAD
    kernel = "FlashMLA sparse prefill, bf16 keys"
    for name, turn in TURNS.items():
        chain = lambda turn=turn: _prefill(rows, keys, *turn())  # noqa: E731
        yield peer("mega_attention", f"{name}, {kernel}, {CAST}", facts, size, flops, chain, bound=0.06)
    yield peer("mega_attention", f"{kernel}, kernel alone", facts, size, flops, lambda: _prefill(rows, keys))


def _prefill(
    rows: int, keys: int, turn: Callable[[Inputs], Tensor] | None = None, turned: Callable[[Inputs], Tensor] | None = None
) -> Chain:
    library, more = flash_mla()
    cast = _cast() if turn else None

    def make(seed: int) -> Inputs:
        g = seeded(seed)
        values, sink = normal(g, PREFILL_KEYS, 1, HEAD), normal(g, HEADS, dtype=torch.float32)
        chosen = torch.randint(0, PREFILL_KEYS, (rows, 1, keys), generator=g, device="cuda", dtype=torch.int32)
        return _first(g, rows) if turn else (normal(g, rows, HEADS, HEAD),), values, chosen, sink

    def run(inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        first, values, chosen, sink = inputs
        query = turn(first) if turn else first[0]
        out: Tensor = library.flash_mla_sparse_fwd(query, values, chosen, HEAD**-0.5, HEAD, sink, **more)[0]
        return cast(out, first) if cast else out

    def error(inputs: Inputs, result: Any) -> float:
        first, values, chosen, sink = inputs
        checked = some_rows(rows)
        query = turned(first) if turned else first[0]
        out = torch.stack([attended(query[r], values[chosen[r, 0].long(), 0], sink) for r in checked])
        if turned:
            return _error(first, result, out, checked)
        return max(relative(result[r], expected) for r, expected in zip(checked, out, strict=True))

    return Chain(make, run, error)


# ---- index ----


def index(rows: int, context: int) -> Iterator[Case]:
    """Scores of all keys, then the highest: what the peers do in the place of either of the library's modes."""
    pages = rows * context // PER_PAGE
    distinct = 1024

    def prepare() -> Chain:
        library, choose = deep_gemm(), tokenspeed("thirdparty.cuda.dsv4_attention").persistent_topk

        def make(seed: int) -> Inputs:
            g = seeded(seed)
            keys = normal(g, distinct * PER_PAGE, INDEX_HEAD).float()
            scales = keys.abs().amax(1).clamp_min(1e-4) / 448
            codes = fp8(keys / scales[:, None])
            parts = [part.view(torch.uint8).view(distinct, -1) for part in (codes, scales)]
            numbers = torch.arange(pages, device="cuda") % distinct
            cache = torch.cat(parts, 1)[numbers].view(pages, PER_PAGE, 1, KEY_BYTES)
            table = torch.randperm(pages, generator=g, device="cuda").int().view(rows, -1)
            query, weight = normal(g, rows, 1, INDEX_HEADS, INDEX_HEAD), normal(g, rows, INDEX_HEADS, dtype=torch.float32)
            visible = torch.full((rows, 1), context, dtype=torch.int32, device="cuda")
            plan = library.get_paged_mqa_logits_metadata(visible, PER_PAGE, library.get_num_sms())
            chosen = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")
            space = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
            return (fp8(query), cache, weight, visible, table, plan, context), chosen, space, codes.float() * scales[:, None]

        def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
            scoring, chosen, space, _ = inputs
            scores = library.fp8_paged_mqa_logits(*scoring)[:, :context]
            choose(scores, scoring[3].view(-1), chosen, space, TOP_K, context)
            return scores, chosen

        def error(inputs: Inputs, result: tuple[Tensor, Tensor]) -> float:
            (query, _, weight, _, table, *_), _, _, values = inputs
            scores, chosen = result
            errors = []
            for row in {0, rows - 1}:
                places = (table[row].long() % distinct)[:, None] * PER_PAGE + torch.arange(PER_PAGE, device="cuda")
                expected = ((query[row, 0].float() @ values[places.flatten()].T).relu() * weight[row][:, None]).sum(0)
                best = expected.topk(TOP_K).values.sort().values
                found = expected[torch.unique(chosen[row].long().clamp(0, context - 1))].sort().values
                errors.append(relative(scores[row], expected))
                errors.append(relative(found, best) if len(found) == TOP_K else float("inf"))
            return max(errors)

        return Chain(make, run, error)

    size = float(rows * context * KEY_BYTES)
    flops = 2.0 * rows * context * INDEX_HEADS * INDEX_HEAD
    for mode in ("dense", "sparse"):
        facts: dict[str, int | str] = {"T": rows, "context": context, "mode": mode}
        name = "DeepGEMM fp8_paged_mqa_logits, tokenspeed persistent_topk"
        yield peer("mqa_logits_topk", name, facts, size, flops, prepare, peak="fp8")
