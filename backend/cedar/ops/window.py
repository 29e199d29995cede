# SPDX-License-Identifier: Apache-2.0
"""Window KV: from the projection's output to records."""

from __future__ import annotations

from torch import Tensor

from cedar.cache.records import RecordFormat
from cedar.ops.norm import rms_norm
from cedar.ops.rope import rotate


def window_store(kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: RecordFormat) -> Tensor:
    """records = encode(rope(RMSNorm(kv))): the window KV entries of a step's rows.

    kv: [T, head_dim], compute dtype. weight: float32 [head_dim]. cos, sin: float32 [T, dr/2], the rows' own positions.
    Returns records [T, width]; the quantiser sees the whole vector, rotary dimensions included, after the rotation is
    rounded to the compute dtype (released inference code semantics). Where they are stored is the caller's matter: queries
    of this step read them before they replace older ring rows.
    """
    return record.encode(rotate(rms_norm(kv, weight, eps), cos, sin))
