# SPDX-License-Identifier: Apache-2.0
"""Run by `test_native_abi` in a process of its own: operations with one instruction set, their bits and sizes printed."""

from __future__ import annotations

import hashlib

import torch

from cedar.cache.layout import GlobalRecords, WindowRecords
from cedar.cache.records import RecordPool, RecordView
from cedar.ops import native
from cedar.ops.abi import OPERATIONS
from cedar.ops.attention import mega_attention
from cedar.ops.linear import mxfp8_linear
from cedar.ops.mhc import Mixing, mega_mhc
from cedar.ops.norm import Norm
from cedar.ops.provider import Choice, using


def main(isa: str) -> None:
    library = native.load()
    assert isa in library.info
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(9, 77, generator=g), torch.randn(35, 77, generator=g)
    streams, pre = torch.randn(9, 4, 50, generator=g), torch.rand(9, 4, generator=g)
    mixing = Mixing(torch.randn(24, 200, generator=g) * 0.1, torch.ones(24), torch.randn(24, generator=g), 1e-6, 1e-20, 20)
    window, entries = WindowRecords(64), GlobalRecords(64)
    keys = [
        RecordView(RecordPool(record, record.encode(torch.randn(12, 64, generator=g))), torch.randint(0, 12, (9, 7), generator=g))
        for record in (window, entries)
    ]
    angle = torch.randn(9, 16, generator=g)
    with torch.inference_mode(), using(Choice(set(OPERATIONS), set(OPERATIONS))):
        streams, gates, normed = mega_mhc(streams, None, pre, mixing, Norm(torch.ones(50), 1e-20))
        assert gates is not None
        assert normed is not None
        attended = mega_attention(torch.randn(9, 3, 64, generator=g), angle.cos(), angle.sin(), torch.zeros(3), keys, 0.125, 1)
        results = [mxfp8_linear(x, w), *gates, normed, attended]
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.contiguous().numpy().tobytes())
    print(digest.hexdigest())
    print(*(f"{result.double().norm().item():.9g}" for result in results))
