# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's index scores of FP8 keys in pages; the selection is the reference's.

It reads no FP4, so a tile's keys are converted at every call: a way to compare, not to be fast. A key, and a query's head, is
E4M3 under one power of two, which is exact for what is at least 2^-16 of its largest value, and so for all MXFP4 whose scales
are no more than 2^14 apart. Other than the reference's, the sums over a key are those of Hopper's FP8 units, which keep about 14
bits: of nearly equal scores others may be chosen, also for the candidate blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.formats import E4M3_MAX, MXFP4_AMAX_MIN, mx_scale
from cedar.cache.layout import IndexKeyRecords
from cedar.cache.records import RecordPool
from cedar.cache.rows import EntryPlan, ScoreTile
from cedar.cache.store import BlockTable
from cedar.ops.index import IndexSearch, mqa_logits_topk, select_by
from cedar.ops.peer_deep_gemm import kernels
from cedar.ops.peer_packages import PeerUnsupported
from cedar.ops.quant import fq4x
from cedar.ops.rope import rotate

HEADS, DIM = (32, 64), 128
_PAGE = 64
_SCALE_BYTES = 4


@mqa_logits_topk.by("deep_gemm")
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
    _, heads, dim = query.shape
    if query.dtype is not torch.bfloat16 or heads not in HEADS or dim != DIM:
        raise PeerUnsupported(f"a query is {heads} x {dim} of {query.dtype}; it takes 32 or 64 x {DIM} of bfloat16")
    if not search.quantise or not isinstance(pool.record, IndexKeyRecords):
        raise PeerUnsupported("queries or keys are not rounded to FP4, and to FP8 they would be")
    if candidates is not None and any(tile.num_keys > candidates.shape[1] * search.block for tile in plan.tiles):
        raise PeerUnsupported("the search is inside candidate blocks; it scores all keys")
    weight = weight.float() * search.weight_scale
    return select_by(_scores, fq4x(rotate(query, cos, sin)), weight, pool, plan, search, candidates)


def _scores(query: Tensor, weight: Tensor, pool: RecordPool, table: BlockTable, tile: ScoreTile) -> Tensor:
    """As `tile_scores`."""
    rows = query.shape[0]
    codes, scale = _to_fp8(query)
    cache, pages = _fp8_pages(pool, table, tile)
    visible = torch.full((rows, 1), tile.num_keys, dtype=torch.int32, device=query.device)
    if tile.visible is not None:
        visible.copy_(tile.visible[:, None]).clamp_min_(1)  # a row without a key, too, is to have work
    library = kernels()
    schedule = library.get_paged_mqa_logits_metadata(visible, _PAGE, library.get_num_sms())
    pages = pages.repeat_interleave(rows // tile.groups, 0)
    scores: Tensor = library.fp8_paged_mqa_logits(codes[:, None], cache, weight * scale, visible, pages, schedule, tile.num_keys)
    return scores[:, : tile.num_keys]


def _to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> E4M3 [..., d] and float32 powers of two [...]."""
    x = x.float()
    scale = mx_scale(x, E4M3_MAX, MXFP4_AMAX_MIN)
    return (x / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def _fp8_pages(pool: RecordPool, table: BlockTable, tile: ScoreTile) -> tuple[Tensor, Tensor]:
    """The keys of a tile's sequences in pages of 64 codes, then their 64 scales, and each sequence's pages, int32 [G, p].

    uint8 [G p, 64, 1, 132]: the kernel's shape, which is not where the bytes of a key lie.
    """
    assert tile.slots is not None
    records = pool.load_pages(table.pages_of(tile.slots, tile.num_keys), table.per_page)
    records = torch.nn.functional.pad(records, (0, 0, 0, -records.shape[1] % _PAGE))  # zero bytes are zeros
    codes, scale = _to_fp8(pool.record.decode(records))
    parts = codes.view(torch.uint8).view(-1, _PAGE * DIM), scale.view(torch.uint8).view(-1, _PAGE * _SCALE_BYTES)
    cache = torch.cat(parts, 1)
    numbers = torch.arange(len(cache), dtype=torch.int32, device=cache.device)
    return cache.view(-1, _PAGE, 1, DIM + _SCALE_BYTES), numbers.view(tile.groups, -1)
