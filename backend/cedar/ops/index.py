# SPDX-License-Identifier: Apache-2.0
"""Index scores and exact selection. Ties break to the lowest index, everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.cache.records import RecordPool
from cedar.cache.rows import TILE_ELEMENTS, EntryPlan, ScoreTile
from cedar.cache.store import BlockTable
from cedar.ops.native import record_code
from cedar.ops.provider import FusedOp
from cedar.ops.quant import fq4x
from cedar.ops.rope import rotate

Scorer = Callable[[Tensor, Tensor, RecordPool, BlockTable, ScoreTile], Tensor]
"""float32 scores of a tile's rows over its ``num_keys`` keys, given what `tile_scores` is; hidden columns may hold anything."""

KEY_ELEMENTS = 1 << 18
"""Elements of index keys that a CPU decodes at a time (1 MiB), so that they are in its cache when they are scored."""


class IndexSearch(NamedTuple):
    """How an index source searches. quantise: round the rotated query to MXFP4. block: positions of a candidate block.

    publish: candidate blocks that are kept for later index sources; 0: this layer is no candidate source.
    """

    top_k: int
    weight_scale: float
    quantise: bool
    block: int
    publish: int


@FusedOp
def mqa_logits_topk(
    query: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: RecordPool,
    plan: EntryPlan,
    search: IndexSearch,
    candidates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The selection of an index source: the positions of the best scores of each row, exactly.

    score[t, j] = sum_h w[t, h] relu(q[t, h] . k[j]) over the entries j < n(t) of row t's sequence, q rotated and, with
    ``quantise``, rounded, w = weight * weight_scale. query: [T, heads, d], not rotated; weight: [T, heads]; both compute dtype.
    cos, sin: float32 [T, dr/2] of the rows' positions. pool: index keys. plan: one that asks for scores (it has tiles).
    candidates: int64 [T, c] the blocks that each row may search in, ascending, then -1; None: all.

    Returns (index, slots, blocks): index int64 [T, width] ascending, then -1; slots their pool rows, then 0; blocks int64
    [T, publish], the candidate blocks of these scores, None when every row would keep all of its blocks.
    """
    query = rotate(query, cos, sin)
    query = fq4x(query) if search.quantise else query
    return select_by(tile_scores, query, weight.float() * search.weight_scale, pool, plan, search, candidates)


def select_by(
    score: Scorer,
    query: Tensor,
    weight: Tensor,
    pool: RecordPool,
    plan: EntryPlan,
    search: IndexSearch,
    candidates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`mqa_logits_topk` of a query that is rotated and rounded and of scaled weights, with all keys scored by ``score``."""
    parts: list[Tensor] = []
    published: list[Tensor | None] = []
    for tile in plan.tiles:
        rows = slice(tile.start, tile.stop)
        if candidates is None or tile.num_keys <= candidates.shape[1] * search.block:
            publish = (search.block, search.publish) if search.publish else None
            k = min(search.top_k, tile.num_keys)
            index, blocks = dense_topk(query[rows], weight[rows], pool, plan.table, tile, k, publish, score)
            published.append(blocks)
        else:
            index = _search(query[rows], weight[rows], pool, plan, tile, search, candidates[rows])
        parts.append(torch.nn.functional.pad(index, (0, plan.width - index.shape[1]), value=-1))
    index = torch.cat(parts)
    return index, plan.pool_rows(index), _joined(published, plan, search)


@mqa_logits_topk.native
def _(
    query: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: RecordPool,
    plan: EntryPlan,
    search: IndexSearch,
    candidates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    index = torch.empty(query.shape[0], plan.width, dtype=torch.int64, device=query.device)
    slots = torch.empty_like(index)
    most = max(tile.num_keys for tile in plan.tiles)
    blocks = index.new_empty(query.shape[0], search.publish) if search.publish and most > search.publish * search.block else None
    table = plan.table
    torch.ops.cedar.mqa_logits_topk.default(
        *(query, weight, cos, sin, pool.rows, table.pages, plan.base, plan.visible, candidates, index, slots, blocks),
        *(record_code(pool.record), search.top_k, most, table.per_page, search.block, search.quantise, search.weight_scale),
    )
    return index, slots, blocks


def _joined(published: list[Tensor | None], plan: EntryPlan, search: IndexSearch) -> Tensor | None:
    """Blocks of all tiles as one tensor; a tile without any keeps all blocks that its rows see."""
    if not search.publish or all(blocks is None for blocks in published):
        return None
    parts = []
    for tile, blocks in zip(plan.tiles, published, strict=True):
        newest = (plan.visible[tile.start : tile.stop, None] - 1).div(search.block, rounding_mode="floor")
        numbers = torch.arange(search.publish, device=newest.device)
        parts.append(torch.where(numbers <= newest, numbers, -1) if blocks is None else blocks)
    return torch.cat(parts)


def _search(
    query: Tensor, weight: Tensor, pool: RecordPool, plan: EntryPlan, tile: ScoreTile, search: IndexSearch, blocks: Tensor
) -> Tensor:
    """Selection inside candidate blocks, in runs of rows whose gathered keys fit the element budget."""
    visible, base = plan.visible[tile.start : tile.stop], plan.base[tile.start : tile.stop]
    step = max(1, TILE_ELEMENTS // (blocks.shape[1] * search.block * sum(query.shape[1:])))
    parts = []
    for start in range(0, query.shape[0], step):
        run = slice(start, start + step)
        arguments = (query[run], weight[run], pool, blocks[run], search.block, visible[run], plan.table, base[run], search.top_k)
        parts.append(sparse_topk(*arguments))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def mqa_logits(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """score[t, j] = sum_h weight[t, h] * relu(query[t, h] . keys[j]), accumulated in float32.

    query: [G, t, heads, d] and weight: [G, t, heads], rows of G groups; keys: float32 [G, n, d], one key set per group.
    Returns float32 [G * t, n].
    """
    groups, rows, heads, _ = query.shape
    scores = torch.bmm(query.flatten(1, 2).float(), keys.transpose(1, 2)).relu_()
    scores = scores.view(groups * rows, heads, -1)
    return torch.bmm(weight.reshape(groups * rows, 1, heads).float(), scores).squeeze(1)


def hide_beyond(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Scores [R, n] with columns at or beyond ``visible`` (int64 [R]; None: all n) set to -inf."""
    if visible is None:
        return scores
    columns = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill_(columns >= visible[:, None], -torch.inf)


def topk_lowest(scores: Tensor, k: int) -> Tensor:
    """Columns of the k highest scores of each row, ascending: int64 [R, k]. Of equal scores the lowest columns win.

    scores: float32 [R, n], n >= k. The float's bits, made monotone, and the inverted column share one int64, so keys are
    distinct and `torch.topk` has no tie to break. -0.0 counts as 0.0.
    """
    bits = (scores + 0.0).view(torch.int32)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    columns = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    keys = (monotone.to(torch.int64) << 32) | columns
    return keys.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values


def select(scores: Tensor, visible: Tensor | None, k: int) -> Tensor:
    """Positions of the k best visible scores, ascending, then -1: int64 [R, k].

    scores: float32 [R, n], already -inf at and beyond ``visible`` (int64 [R]; None: all n visible), n >= k. Hidden columns are
    behind all visible ones, so they end up last.
    """
    index = topk_lowest(scores, k)
    return index if visible is None else index.masked_fill_(index >= visible[:, None], -1)


def candidate_blocks(scores: Tensor, visible: Tensor | None, block: int, top: int) -> Tensor:
    """The ``top`` blocks of ``block`` positions with the highest maximum, ascending, then -1: int64 [R, top].

    scores: float32 [R, n] as for `select`, with more than ``top`` blocks. The block of the newest visible position is always
    kept; blocks without a visible position never are.
    """
    rows, count = scores.shape
    blocks = -(-count // block)
    padded = torch.nn.functional.pad(scores, (0, blocks * block - count), value=-torch.inf)
    best = padded.view(rows, blocks, block).amax(-1)
    if visible is None:
        best[:, -1] = torch.inf
        return topk_lowest(best, top)
    newest = (visible[:, None] - 1).div_(block, rounding_mode="floor")
    best.scatter_(1, newest.clamp_min(0), torch.inf)
    index = topk_lowest(best, top)
    return index.masked_fill_(index > newest, -1)


def _page_runs(pool: RecordPool, pages: Tensor, per_page: int) -> Iterator[Tensor]:
    """Records [G, n, width] of pages int64 [G, p], a run of pages after the other. A GPU gets them all at once."""
    run = pages.shape[1]
    if pages.device.type == "cpu":
        run = max(1, KEY_ELEMENTS // (pages.shape[0] * per_page * pool.record.dim))
    for some in torch.split(pages, run, 1):
        yield pool.load_pages(some, per_page)


def tile_scores(query: Tensor, weight: Tensor, pool: RecordPool, table: BlockTable, tile: ScoreTile) -> Tensor:
    """float32 [R, num_keys]: a tile's rows against all keys of their sequences, page by page.

    query: [R, heads, d], rotated and quantised; weight: [R, heads], scaled. table: where the tile's keys lie in ``pool``.
    """
    assert tile.slots is not None
    pages = table.pages_of(tile.slots, tile.num_keys)
    query, weight = (x.view(tile.groups, -1, *x.shape[1:]) for x in (query, weight))
    parts = [mqa_logits(query, weight, pool.record.decode(records)) for records in _page_runs(pool, pages, table.per_page)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1))[:, : tile.num_keys]


def dense_topk(
    query: Tensor,
    weight: Tensor,
    pool: RecordPool,
    table: BlockTable,
    tile: ScoreTile,
    k: int,
    publish: tuple[int, int] | None,
    score: Scorer = tile_scores,
) -> tuple[Tensor, Tensor | None]:
    """Score a tile's rows against all entries they see and select the k best.

    query, weight, pool, table: as of ``score``; what is behind a sequence's last entry is hidden. publish: (block size, blocks to
    keep) of a candidate source.
    Returns int64 [R, min(k, tile.num_keys)] as `select`, and int64 [R, blocks] as `candidate_blocks`; None when every block
    would be kept.
    """
    if tile.slots is None:
        index = torch.arange(tile.num_keys, device=query.device).repeat(query.shape[0], 1)
        return (index if tile.visible is None else index.masked_fill_(index >= tile.visible[:, None], -1)), None
    scores = hide_beyond(score(query, weight, pool, table, tile), tile.visible)
    blocks = None
    if publish is not None and tile.num_keys > publish[0] * publish[1]:
        blocks = candidate_blocks(scores, tile.visible, *publish)
    return select(scores, tile.visible, k), blocks


def sparse_topk(
    query: Tensor,
    weight: Tensor,
    pool: RecordPool,
    blocks: Tensor,
    block: int,
    visible: Tensor,
    table: BlockTable,
    base: Tensor,
    k: int,
) -> Tensor:
    """As `dense_topk`, restricted to each row's candidate blocks; only their keys are read.

    blocks: int64 [R, c], ascending, then -1. visible: int64 [R]. base: int64 [R, 1], `BlockTable.base` of the rows' slots.
    """
    rows = query.shape[0]
    positions = (blocks[:, :, None] * block + torch.arange(block, device=blocks.device)).flatten(1)
    hidden = (positions < 0) | (positions >= visible[:, None])
    pool_rows = table.rows(base, positions.masked_fill(hidden, 0)).masked_fill_(hidden, 0)
    keys = pool.record.decode(pool.load(pool_rows.flatten())).view(rows, positions.shape[1], -1)
    scores = mqa_logits(query[:, None], weight[:, None], keys).masked_fill_(hidden, -torch.inf)
    column = topk_lowest(scores, k)
    return positions.gather(1, column).masked_fill_(hidden.gather(1, column), -1)
