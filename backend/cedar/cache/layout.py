# SPDX-License-Identifier: Apache-2.0
"""The bytes of the caches, version 1. Kernels, snapshots and anything else that outlives a process read them as written here.

Below, d is the dimension of the vector (head_dim, or index_head_dim for index keys), a multiple of 32; sizes in brackets are
the release's (d = 512, index d = 128). A code's or a scale's own bits are those of the OCP formats: E4M3 (no infinity, 0x7f and
0xff are NaN), E2M1 (0 .5 1 1.5 2 3 4 6, bit 3 is the sign), UE8M0 (byte b is 2^(b - 127), 255 is NaN). A value is code times
scale, which bfloat16 holds exactly. Which codes and scales a vector gets: `cedar.cache.formats`.

Window record: 33 d/32 bytes [528]. One position's key of one layer, rotary dimensions included::

    [0, d)               d E4M3 codes; byte i is dimension i                  [0, 512)
    [d, d + d/32)        d/32 UE8M0 scales; scale g is of dimensions 32g..    [512, 528)

Global record: 9 d/16 bytes [288]. One compressed entry, rotary dimensions included; there is no tensor-wide scale::

    [0, d/2)             d/2 E2M1 pairs; byte i is dimension 2i (low nibble) and 2i + 1    [0, 256)
    [d/2, d/2 + d/16)    d/16 E4M3 scales; scale g is of dimensions 16g..                  [256, 288)

Index key record: 17 d/32 bytes [68]. Like a global record, with UE8M0 scales of 32 dimensions::

    [0, d/2)             d/2 E2M1 pairs                                       [0, 64)
    [d/2, d/2 + d/32)    d/32 UE8M0 scales; scale g is of dimensions 32g..    [64, 68)

Compressor row: 2 head_dim float32 [4,096 bytes], not quantised: ``kv | gate`` of the first token of the open group. One row per
sequence slot and ratio-2 source.

Where records lie. A pool is one array of rows, C order, byte stride of a row = bytes of a record. Row numbers are the addresses:

* Window rings, one pool per layer: position p of the sequence in slot s is row ``s * W + p % W``.
* Global entries, one pool per KV source of ratio r: a page of P tokens is E = P / r consecutive rows, entry j of a sequence is
  row ``page * E + j % E``, where ``page`` is number ``j // E`` of the sequence's block table. All sources share the table.
* Index keys: addressed like the global entries, but planar. Rows 8b .. 8b + 7 are block b, 17 d/4 bytes [544] that start at byte
  b * 17 d/4. Row r is lane l = r % 8 of block r // 8; in its block::

      l * d/2                     its d/2 E2M1 pairs     [64 l]
      4 d + l * d/32              its d/32 scales        [512 + 4 l]

  P is a multiple of 16, so E is a multiple of 8: no block straddles pages, and 8 consecutive aligned entries are one block.

Row 0 of page 0 or slot 0 is zeros and is never written: what is masked reads it, and zero bytes decode to zeros. Page 0 and slot
0 belong to nobody. Bytes of rows that nobody has written, or whose owner is gone, mean nothing: any NaN or infinity may be there.

Alignment: a pool starts at a multiple of 16 bytes, so window records [528], global records [288] and index blocks [544] do too if
head_dim is a multiple of 512, 256 and index_head_dim of 64. Smaller dimensions keep only what their sizes give.

Without the release's cache quantisers (``--fake-quant off``) the pools hold vectors in the compute dtype (`FloatRecords`), never
planar, in the same rows; that form is not part of the version.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.cache.formats import (
    MX_GROUP,
    NVFP4_GROUP,
    pack_fp8,
    pack_mxfp4,
    pack_nvfp4,
    unpack_fp8,
    unpack_mxfp4,
    unpack_nvfp4,
)

LAYOUT_VERSION = 1
"""Changes with any byte that this page promises."""


@dataclass(frozen=True)
class WindowRecords:
    """Window KV: fp8. ``dim`` is head_dim."""

    dim: int
    dtype = torch.uint8

    @property
    def width(self) -> int:
        return self.dim + self.dim // MX_GROUP

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.width,)

    def encode(self, values: Tensor) -> Tensor:
        return torch.cat(pack_fp8(values), -1)

    def decode(self, records: Tensor) -> Tensor:
        codes, scales = records.split_with_sizes((self.dim, self.dim // MX_GROUP), -1)
        return unpack_fp8(codes, scales)


@dataclass(frozen=True)
class GlobalRecords:
    """Compressed KV: nvfp4. ``dim`` is head_dim."""

    dim: int
    dtype = torch.uint8

    @property
    def width(self) -> int:
        return self.dim // 2 + self.dim // NVFP4_GROUP

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.width,)

    def encode(self, values: Tensor) -> Tensor:
        return torch.cat(pack_nvfp4(values), -1)

    def decode(self, records: Tensor) -> Tensor:
        pairs, scales = records.split_with_sizes((self.dim // 2, self.dim // NVFP4_GROUP), -1)
        return unpack_nvfp4(pairs, scales)


@dataclass(frozen=True)
class IndexKeyRecords:
    """Index keys: mxfp4, planar in a pool. ``dim`` is index_head_dim."""

    dim: int
    dtype = torch.uint8

    @property
    def width(self) -> int:
        return sum(self.planes)

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.dim // 2, self.dim // MX_GROUP)

    def encode(self, values: Tensor) -> Tensor:
        return torch.cat(pack_mxfp4(values), -1)

    def decode(self, records: Tensor) -> Tensor:
        pairs, scales = records.split_with_sizes(self.planes, -1)
        return unpack_mxfp4(pairs, scales)
