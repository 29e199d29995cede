# SPDX-License-Identifier: Apache-2.0
"""Window KV: from the projection's output to records, and what the queries of the step read."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.records import RecordPool
from cedar.cache.rows import WindowPlan
from cedar.ops.native import record_code
from cedar.ops.norm import rms_norm
from cedar.ops.provider import FusedOp
from cedar.ops.rope import rotate


@FusedOp
def window_store(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, ring: RecordPool, plan: WindowPlan
) -> tuple[Tensor, Tensor]:
    """records = encode(rope(RMSNorm(kv))), the window KV entries of a step's rows, and their way into the rings.

    kv: [T, head_dim], compute dtype. weight: float32 [head_dim]. cos, sin: float32 [T, dr/2], the rows' own positions.
    The quantiser sees the whole vector, rotary dimensions included, after the rotation is rounded to the compute dtype (released
    inference code semantics). Returns (table, records): records [T, width] are the step's own; the table is what its queries look
    their keys up in (`WindowPlan`), and is read before newer records take the place of older ones in the rings.
    """
    records = ring.record.encode(rotate(rms_norm(kv, weight, eps), cos, sin))
    table = ring.rows if plan.history is None else torch.cat([ring.load(plan.history), records])
    ring.store(records if plan.store_from is None else records.index_select(0, plan.store_from), plan.store_to)
    if plan.snapshot_from is not None and plan.snapshot_to is not None:
        ring.store(table.index_select(0, plan.snapshot_from), plan.snapshot_to)
    return table, records


@window_store.native
def _(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, ring: RecordPool, plan: WindowPlan
) -> tuple[Tensor, Tensor]:
    old = 0 if plan.history is None else plan.history.shape[0]
    staged = ring.rows.new_empty(old + kv.shape[0], ring.record.width)
    indices = (plan.history, plan.store_from, plan.store_to)
    torch.ops.cedar.window_store.default(kv, weight, cos, sin, *indices, ring.rows, staged, record_code(ring.record), eps)
    table = ring.rows if plan.history is None else staged
    if plan.snapshot_from is not None and plan.snapshot_to is not None:
        ring.store(table.index_select(0, plan.snapshot_from), plan.snapshot_to)
    return table, staged[old:]
