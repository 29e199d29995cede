# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse attention on Hopper, which takes bfloat16 keys: records are decoded to them, which is exact.

It reads neither of our records, so every key is decoded for every row that selects it: a way to compare, not to be fast.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cedar.cache.records import RecordView
from cedar.ops.attention import mega_attention
from cedar.ops.peer_packages import PeerUnsupported
from cedar.ops.rope import rotate

HEADS, DIM = 64, 512
_KEYS_MULTIPLE = 128


@mega_attention.by("flash_mla")
def _(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    sink: Tensor,
    keys: Sequence[RecordView],
    scale: float,
    max_elements: int,
) -> Tensor:
    rows, heads, dim = query.shape
    if query.dtype is not torch.bfloat16 or (heads, dim) != (HEADS, DIM):
        raise PeerUnsupported(f"a query is {heads} x {dim} of {query.dtype}; it takes {HEADS} x {DIM} of bfloat16")
    attend: Callable[..., Any] = import_module("flash_mla").flash_mla_sparse_fwd
    query = rotate(query, cos, sin)
    index = torch.cat([view.index for view in keys], dim=1)
    count = index.shape[1]
    tile = min(rows, max(1, max_elements // (count * dim)))
    places = torch.arange(tile * count, dtype=torch.int32, device=query.device).view(tile, count)
    parts = []
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        values = torch.cat([view.values(start, stop).to(query.dtype) for view in keys], dim=1)
        chosen = places[: stop - start].masked_fill(index[start:stop] == 0, -1)
        chosen = torch.nn.functional.pad(chosen, (0, -count % _KEYS_MULTIPLE), value=-1)[:, None]
        parts.append(attend(query[start:stop], values.view(-1, 1, dim), chosen, scale, dim, sink, **_hopper(attend))[0])
    return rotate(torch.cat(parts), cos, sin, inverse=True)


@functools.cache
def _hopper(attend: Callable[..., Any]) -> dict[str, bool]:
    """What else asks for Hopper's kernels: one build has them behind a flag."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(attend).parameters else {}
