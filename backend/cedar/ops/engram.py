# SPDX-License-Identifier: Apache-2.0
"""Engram: table rows, and the gated injection of what they say into the residual streams."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from cedar.cache.formats import unpack_fp8
from cedar.ops.native import NativeUnsupported
from cedar.ops.provider import FusedOp

_CHUNK_TOKENS = 1024
"""Of one copy; the CPU gathers the next ones meanwhile."""
_TASK_TOKENS = 64
"""Of a thread's task at least: what it gathers then takes many times as long as to hand it over."""


@FusedOp
def engram_gather(
    rows: Tensor, table: Tensor, table_scale: Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Dequantised table rows, concatenated per token (exact): [T, columns * d] in ``dtype``, on ``device`` or where the rows are.

    rows: int64 [T, columns]; below 0: a row of zeros. table: uint8 [R, d], E4M3 codes; table_scale: uint8 [R, d/32], UE8M0.
    Or the result on a GPU and the table in host memory. Then the library does what is fastest:

    * a pinned table: the GPU reads the rows over the link (of any number of tokens that took less than the other way);
    * a table that is not pinned (a mapped file): the CPU, by as many threads as torch has, gathers the packed rows, half the
      bytes of bfloat16, into pinned memory; they are copied without blocking, and the GPU dequantises them. Rows that are on the
      GPU are waited for: give them on the CPU, where they are computed.
    """
    flat = rows.flatten().to(table.device)
    safe = flat.clamp_min(0)
    values = unpack_fp8(table[safe], table_scale[safe], dtype).masked_fill_(flat[:, None] < 0, 0)
    return values.view(rows.shape[0], -1).to(rows.device if device is None else device)


@engram_gather.native
def _(rows: Tensor, table: Tensor, table_scale: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    home = rows.device if device is None else device
    if table.device.type != home.type:
        pinned = table.is_pinned() and table_scale.is_pinned()
        if table.is_cuda or (not pinned and torch.cuda.is_current_stream_capturing()):
            raise NativeUnsupported(f"engram_gather: rows for {home} from a table on {table.device} that is not pinned")
        if not pinned:
            return staging(home).gather(rows, table, table_scale, dtype)
    out = torch.empty(*rows.shape, table.shape[1], dtype=dtype, device=home)
    torch.ops.cedar.engram_gather.default(rows.to(home), table, table_scale, out)
    return out.flatten(1)


class Staging:
    """Pinned memory for packed rows on their way to a device: grown, kept, and not written while a copy reads it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._numbers = torch.empty(0, dtype=torch.int64, device=device)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def gather(self, rows: Tensor, table: Tensor, table_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """`engram_gather` of a table in host memory. Returns before the copies have ended; the current stream waits for them."""
        rows = rows.to("cpu")
        (tokens, columns), dim = rows.shape, table.shape[1]
        out = torch.empty(tokens, columns, dim, dtype=dtype, device=self._device)
        width = columns * (dim + table_scale.shape[1])
        with self._lock:
            self._grow(tokens * width, min(tokens, _CHUNK_TOKENS) * columns)
            chunks = range(0, tokens, _CHUNK_TOKENS)
            parts = [rows[start : start + _CHUNK_TOKENS] for start in chunks]
            packed = [self._memory[start * width :][: part.shape[0] * width] for start, part in zip(chunks, parts, strict=True)]
            size = max(_TASK_TOKENS, -(-tokens // (2 * torch.get_num_threads())))
            tasks = [_start(part, table, table_scale, run, size) for part, run in zip(parts, packed, strict=True)]
            for start, part, run, waiting in zip(chunks, parts, packed, tasks, strict=True):
                for task in waiting:
                    task.result()
                codes, scales = _split(run.to(self._device, non_blocking=True), part.numel())
                numbers = self._numbers[: part.numel()].view(part.shape)
                torch.ops.cedar.engram_gather.default(numbers, codes, scales, out[start : start + _CHUNK_TOKENS])
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self._device))
        return out.flatten(1)

    def _grow(self, num_bytes: int, count: int) -> None:
        """At least so many bytes that no copy reads any more, and numbers 0, 1, ..."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._copied is not None)
        if self._numbers.numel() < count:
            self._numbers = torch.arange(count, device=self._device)


@functools.cache
def staging(device: torch.device) -> Staging:
    """The one of a device."""
    return Staging(device)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "engram")


def _start(rows: Tensor, table: Tensor, table_scale: Tensor, packed: Tensor, tokens: int) -> list[Future[None]]:
    """`pack_rows` of all rows [T, columns], of so many tokens to a task."""
    codes, scales = _split(packed, rows.numel())
    size = tokens * rows.shape[1]
    pieces = zip(*(x.split(size) for x in (rows.flatten(), codes, scales)), strict=True)  # type: ignore[no-untyped-call]
    return [_threads().submit(pack_rows, some, table, table_scale, *targets) for some, *targets in pieces]


def _split(packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """All codes [count, d], then all scales [count, d/32]."""
    end = len(packed) // 33 * 32
    return packed[:end].view(count, -1), packed[end:].view(count, -1)


def pack_rows(rows: Tensor, table: Tensor, table_scale: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Rows as stored, by this thread, which does not hold the interpreter meanwhile. rows: int64 [n], dead ones outside of the
    table. codes: uint8 [n, d], scales: uint8 [n, d/32], both written.
    """
    numbers = rows.numpy()
    for source, target in ((table, codes), (table_scale, scales)):
        np.take(source.numpy(), numbers, axis=0, out=target.numpy(), mode="clip")  # the one mode that writes to ``out`` directly
    dead = numbers.view(np.uint64) >= len(table)
    if dead.any():
        codes.numpy()[dead], scales.numpy()[dead] = 0, 127


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
