# SPDX-License-Identifier: Apache-2.0
"""Rows of the peers, and their operands and results in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from perf.kernels.case import Case, rotate, sets_for
from perf.kernels.cases import BF16, normal
from torch import Tensor

Inputs = tuple[Any, ...]
HEADS, HEAD, NOPE, ROPE = 64, 512, 448, 64
PAGE, RECORD = 64, 584
DISTINCT = 4096
"""Records of a cache that differ; the others are copies of them."""


class Chain(NamedTuple):
    """A peer's kernels: inputs of a seed, their launch, and the relative error of what a launch of fresh inputs returned."""

    make: Callable[[int], Inputs]
    run: Callable[[Inputs], Any]
    error: Callable[[Inputs, Any], float]


def peer(
    op: str,
    name: str,
    facts: dict[str, int | str],
    size: float,
    flops: float,
    prepare: Callable[[], Chain],
    bound: float = 1e-2,
    sets: int | None = None,
    **more: Any,
) -> Case:
    """A row of a chain.

    prepare: finds the provider, or raises `Unavailable`. size, flops: of `Case`. bound: a relative error above it makes the row
    an error, without a time, for a peer that computes something else is none.
    """
    count = sets or sets_for(size)

    def build() -> Callable[[int], None]:
        chain = prepare()
        return rotate(chain.make, count, chain.run)

    def check() -> float:
        chain = prepare()
        inputs = chain.make(99)
        error = chain.error(inputs, chain.run(inputs))
        if not error <= bound:
            raise RuntimeError(f"wrong result: a relative error of {error:.2e}, {bound:g} at most")
        return error

    return Case(op, name, facts, build, size, flops, sets=count, check=check, **more)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of it, for every shape anew."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference, in parts of what is expected."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def some_rows(rows: int) -> list[int]:
    """First, middle and last: what a check that goes row by row looks at."""
    return sorted({0, rows // 2, rows - 1})


# ---- FP8 with scales of 128 values and of 128 x 128 weights ----


def fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 and float32 powers of two of 128 values each: [..., K] -> [..., K], [..., K/128]."""
    values = x.float().view(*x.shape[:-1], -1, 128)
    scales = torch.exp2(torch.ceil(torch.log2(values.abs().amax(-1).clamp_min(1e-10) / 448)))
    return fp8(values / scales[..., None]).flatten(-2), scales


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.float().view(*scales.shape, 128) * scales[..., None]).flatten(-2)


def dequantised_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.repeat_interleave(128, -1).repeat_interleave(128, -2)


# ---- rotation, and attention over records of 584 bytes ----


def rope_table(rows: int = 8192) -> Tensor:
    """Cosines, then sines, of every position: float32 [rows, 64]."""
    frequencies = 10000.0 ** (-torch.arange(0, ROPE, 2, device="cuda").float() / ROPE)
    angles = torch.arange(rows, device="cuda").float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).contiguous()


def rotated(x: Tensor, positions: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Adjacent pairs of the last 64 of [T, heads, 512] turned by their position's angles."""
    rows = table[positions][:, None]
    cosine, sine = rows[..., : ROPE // 2], rows[..., ROPE // 2 :]
    sine = -sine if inverse else sine
    pairs = x[..., NOPE:].float().reshape(*x.shape[:-1], -1, 2)
    one, other = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([one * cosine - other * sine, one * sine + other * cosine], -1).flatten(-2)
    return torch.cat([x[..., :NOPE], turned.to(x.dtype)], -1)


def records(g: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """A cache of at least count records, pages of 64, and the values of its first `DISTINCT`, which repeat: bf16 [4096, 512].

    uint8 [pages, 64, 1, 584]; a page holds 64 x (448 E4M3 codes, 64 bf16), then 64 x 8 UE8M0 scales of 64 codes each (7 in use).
    """
    distinct, stride = DISTINCT // PAGE, (PAGE * RECORD + 575) // 576 * 576
    keys = normal(g, distinct, PAGE, HEAD)
    nope = keys[..., :NOPE].float().reshape(distinct, PAGE, 7, 64)
    scales = torch.exp2(torch.ceil(torch.log2(nope.abs().amax(-1).clamp_min(1e-10) / 448)))
    codes = fp8(nope / scales[..., None])
    pages = torch.zeros(distinct, stride, dtype=torch.uint8, device="cuda")
    data = pages[:, : PAGE * 576].view(distinct, PAGE, 576)
    data[..., :NOPE] = codes.flatten(-2).view(torch.uint8)
    data[..., NOPE:] = keys[..., NOPE:].contiguous().view(torch.uint8)
    pages[:, PAGE * 576 : PAGE * RECORD].view(distinct, PAGE, 8)[..., :7] = (torch.log2(scales) + 127).to(torch.uint8)
    values = torch.cat([(codes.float() * scales[..., None]).flatten(-2), keys[..., NOPE:].float()], -1)
    cache = pages[torch.arange((count + PAGE - 1) // PAGE, device="cuda") % distinct]
    return cache[:, : PAGE * RECORD].view(-1, PAGE, 1, RECORD), values.reshape(DISTINCT, HEAD).to(BF16)


def attended(query: Tensor, keys: Tensor, sink: Tensor) -> Tensor:
    """[heads, 512] over [keys, 512], which are the values too, with a sink per head; float32."""
    scores = query.float() @ keys.float().T * HEAD**-0.5
    most = torch.maximum(scores.amax(-1), sink)
    weights = torch.exp(scores - most[:, None])
    return (weights @ keys.float()) / (weights.sum(-1) + torch.exp(sink - most))[:, None]
