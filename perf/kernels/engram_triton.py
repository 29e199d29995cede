# SPDX-License-Identifier: Apache-2.0
"""The plain gather of Engram rows in Triton, codes and scales of a row side by side, as they are."""

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gather(table, ids, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows ids of a table of 33 words of 8 bytes each. table: its address. n: words of all rows."""
    base = table.to(tl.pointer_type(tl.int64))
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        word = start + tl.arange(0, BLOCK)
        mask = word < n
        row = word // 33
        place = tl.load(ids + row, mask=mask, other=0).to(tl.int64) * 33 + word - row * 33
        tl.store(out + word, tl.load(base + place, mask=mask, other=0), mask=mask)
