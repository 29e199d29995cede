# SPDX-License-Identifier: Apache-2.0
"""Engram: table rows, and the gated injection of what they say into the residual streams."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from cedar.cache.formats import unpack_fp8
from cedar.ops.native import NativeUnsupported, load
from cedar.ops.provider import FusedOp

_CHUNK_TOKENS = 1024
"""Of which the GPU reads the rows while the CPU gathers the next ones."""
FEWEST_PACKED, FEWEST_THREADS = 1024, 8
"""Tokens, and threads of the CPU, from which its gathering the rows of a pinned table takes less than the GPU's reading each
where it lies (`perf/results/kernels_h200_engram.json`, by 16 threads)."""


def row_width(dim: int) -> int:
    """Bytes of a row of ``dim`` codes with its scales behind them, and what makes it a multiple of 8."""
    return -(-33 * dim // 256) * 8


def joined_rows(table: Tensor, table_scale: Tensor) -> Tensor:
    """A table whose rows have their scales behind them: uint8 [R, d], [R, d/32] -> [R, row_width(d)]."""
    rows, dim = table.shape
    joined = table.new_zeros(rows, row_width(dim))
    joined[:, :dim], joined[:, dim : dim + dim // 32] = table, table_scale
    return joined


def _dim(table: Tensor, table_scale: Tensor | None) -> int:
    return table.shape[1] if table_scale is not None else table.shape[1] // 33 * 32


@FusedOp
def engram_gather(
    rows: Tensor, table: Tensor, table_scale: Tensor | None, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Dequantised table rows, concatenated per token (exact): [T, columns * d] in ``dtype``, on ``device`` or where the rows are.

    rows: int64 [T, columns]; below 0: a row of zeros. table: uint8 [R, d], E4M3 codes; table_scale: uint8 [R, d/32], UE8M0.
    Without table_scale the rows are those of `joined_rows`: one place to look at instead of two, which is most of what a lookup
    in memory that is far away costs.

    Or the result on a GPU and the table in host memory. Then the library does what is fastest:

    * a pinned table: the GPU reads the rows over the link;
    * a table that is not pinned (a mapped file), or `FEWEST_PACKED` tokens or more whose rows are on the CPU, where torch has
      `FEWEST_THREADS`: the CPU, by as many threads as torch has, gathers the packed rows, half the bytes of bfloat16, into
      pinned memory, from where the GPU reads them. Rows that are on the GPU are waited for: give them on the CPU, where they
      are computed.
    """
    flat = rows.flatten().to(table.device)
    dim = _dim(table, table_scale)
    found = table[flat.clamp_min(0)]
    scales = found[:, dim : dim + dim // 32] if table_scale is None else table_scale[flat.clamp_min(0)]
    values = unpack_fp8(found[:, :dim], scales, dtype).masked_fill_(flat[:, None] < 0, 0)
    return values.view(rows.shape[0], rows.shape[1] * dim).to(rows.device if device is None else device)


@engram_gather.native
def _(rows: Tensor, table: Tensor, table_scale: Tensor | None, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    home = rows.device if device is None else device
    if table.device.type != home.type:
        pinned = table.is_pinned() and (table_scale is None or table_scale.is_pinned())
        if table.is_cuda or (not pinned and torch.cuda.is_current_stream_capturing()):
            raise NativeUnsupported(f"engram_gather: rows for {home} from a table on {table.device} that is not pinned")
        many = len(rows) >= FEWEST_PACKED and torch.get_num_threads() >= FEWEST_THREADS and not rows.is_cuda
        if not pinned or (many and not torch.cuda.is_current_stream_capturing()):
            return staging(home).gather(rows, table, table_scale, dtype)
    out = torch.empty(*rows.shape, _dim(table, table_scale), dtype=dtype, device=home)
    torch.ops.cedar.engram_gather.default(rows.to(home), table, table_scale, out)
    return out.flatten(1)


class Staging:
    """Pinned memory for packed rows on their way to a device: grown, kept, and not written while the device reads it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._numbers = torch.empty(0, dtype=torch.int64, device=device)
        self._read: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def gather(self, rows: Tensor, table: Tensor, table_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`engram_gather` of a table in host memory. Returns before the device has read the rows; the current stream does it."""
        rows = rows.to("cpu").contiguous()
        (tokens, columns), dim = rows.shape, _dim(table, table_scale)
        out = torch.empty(tokens, columns, dim, dtype=dtype, device=self._device)
        with self._lock:
            packed = self._grow(tokens, columns, row_width(dim))
            chunks = (x.split(_CHUNK_TOKENS) for x in (rows, packed, out))  # type: ignore[no-untyped-call]
            try:
                for part, run, target in zip(*chunks, strict=True):
                    pack_rows(part, table, table_scale, run)
                    numbers = self._numbers[: part.numel()].view(part.shape)
                    torch.ops.cedar.engram_gather.default(numbers, run.flatten(0, 1), None, target)
            finally:
                if self._read is not None:
                    self._read.record(torch.cuda.current_stream(self._device))
        return out.flatten(1)

    def _grow(self, tokens: int, columns: int, width: int) -> Tensor:
        """uint8 [tokens, columns, width] that the device does not read any more; and numbers 0, 1, ... of a chunk's rows."""
        if self._read is not None:
            self._read.synchronize()
        size, count = tokens * columns * width, min(tokens, _CHUNK_TOKENS) * columns
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._read is not None)
        if self._numbers.numel() < count:
            self._numbers = torch.arange(count, device=self._device)
        return self._memory[:size].view(tokens, columns, width)


@functools.cache
def staging(device: torch.device) -> Staging:
    """The one of a device."""
    return Staging(device)


def pack_rows(rows: Tensor, table: Tensor, table_scale: Tensor | None, out: Tensor) -> None:
    """Rows of a table as stored, by as many threads as torch has; the interpreter is not held meanwhile.

    rows: int64, dense, any shape; what is no row of the table becomes zeros. table, table_scale: of `engram_gather`, in host
    memory. out: uint8 [..., at least d + d/32], dense, a row for each.
    """
    dim = _dim(table, table_scale)
    parts = [table, out] if table_scale is None else [table, out, table_scale]
    if rows.dtype != torch.int64 or any(x.dtype != torch.uint8 for x in parts):
        raise TypeError("pack_rows: rows are int64; table, table_scale and out uint8")
    if any(x.device.type != "cpu" or not x.is_contiguous() for x in (rows, *parts)):
        raise ValueError("pack_rows: all tensors are dense and in host memory")
    if out.numel() != rows.numel() * out.shape[-1] or (table_scale is not None and table_scale.shape != (len(table), dim // 32)):
        raise ValueError(
            f"pack_rows: {tuple(out.shape)} for {rows.numel()} rows, scales {parts[-1].shape} of a table {table.shape}"
        )
    scales = None if table_scale is None else table_scale.data_ptr()
    source = (table.data_ptr(), *table.shape, scales, dim)
    status = load().pack_rows(rows.data_ptr(), rows.numel(), *source, out.data_ptr(), out.shape[-1], torch.get_num_threads())
    if status:
        raise RuntimeError(load().last_error().decode())


@FusedOp
def engram_gate(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    """S_i + gate_i v for every stream i, gate_i = sigmoid(signed sqrt of the normalised dot product of S_i and key i).

    streams: [T, hc, D]. keys_value: [T, (hc + 1) D], hc keys, then the value. qk_weight: float32 [hc, D]. float32
    inside. Returns new streams.
    """
    hc, hidden = streams.shape[1:]
    parts = keys_value.float().view(-1, hc + 1, hidden)
    keys, value = parts[:, :hc], parts[:, hc:]
    query = streams.float()
    statistics = query.square().mean(-1).add_(eps).mul_(keys.square().mean(-1).add_(eps)).rsqrt_()
    dot = (query * qk_weight).mul_(keys).sum(-1).mul_(statistics).mul_(hidden**-0.5)
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min_(1e-6).sqrt_(), dot))
    return torch.addcmul(query, gate[..., None], value).to(streams.dtype)


@engram_gate.native
def _(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(streams)
    torch.ops.cedar.engram_gate.default(streams, keys_value, qk_weight, out, eps)
    return out
