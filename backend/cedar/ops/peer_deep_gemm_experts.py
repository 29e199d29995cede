# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's products of the router, in bfloat16, and of the experts, in FP8 and grouped; the rest is the reference.

On a Blackwell GPU the router is its one kernel for all of that.

Routed experts' codes are converted when they are first used, and what comes of it kept while they live, which takes almost twice
their memory again. A block of 128 x 128 gets one scale, a power of two, under which E4M3 holds MXFP4 exactly, unless its scales
are more than 2^14 apart. Inputs of all products are rounded to FP8 with a scale per 128, even without ``act_quant``. The shared
expert's weights are `aligned`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cedar.cache.formats import E4M3_MAX, MXFP4_AMAX_MIN, mx_scale
from cedar.ops.fp4_tiles import unpack_tiles
from cedar.ops.moe import Experts, choose_experts, mega_gate, moe_fp4, swiglu
from cedar.ops.peer_deep_gemm import GROUP, aligned, check, kernels, made_once, quantised
from cedar.ops.peer_deep_gemm_mega import route
from cedar.ops.peer_packages import PeerUnsupported, is_blackwell

Fp8 = tuple[Tensor, Tensor]
"""E4M3 codes and their float32 scales."""


@mega_gate.by("deep_gemm")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scaling: float,
    image_bias: Tensor | None = None,
    image: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if is_blackwell(x.device):
        return route(x, weight, bias, top_k, scaling, image_bias, image)
    check(x, weight, None, *weight.shape)
    logits = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    kernels().bf16_gemm_nt(x.contiguous(), weight, logits)
    return choose_experts(logits, bias, top_k, scaling, image_bias, image)


@moe_fp4.by("deep_gemm")
def _(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    (w13, w2), (shared_w13, shared_w2) = _weights(x, experts)
    source = quantised(x)
    inner = swiglu(_multiply(source, shared_w13), experts.limit).to(x.dtype)
    shared = _multiply(quantised(inner), shared_w2)
    groups = Groups.of(ids, len(w2[0]), kernels().get_mk_alignment_for_contiguous_layout())
    hidden = _multiply_groups(groups.gather(source), w13, groups)
    weight = weights.new_zeros(len(groups.token)).scatter_(0, groups.place.flatten(), weights.flatten())
    inner = swiglu(hidden, experts.limit).mul_(weight[:, None]).to(x.dtype)
    outputs = _multiply_groups(quantised(inner), w2, groups)
    return outputs[groups.place].sum(1, dtype=torch.float32).add_(shared).to(x.dtype)


class Groups(NamedTuple):
    """Rows of the grouped products: every expert's start at a multiple of ``align``.

    place: int64 [T, k] the row of each of a token's experts. token: int64 [R] the token of a row; 0: nobody's. expert: int32 [R];
    -1: nobody's row. R is the most that T k rows may need, so that the host need not know how many an expert has.
    """

    place: Tensor
    token: Tensor
    expert: Tensor

    @classmethod
    def of(cls, ids: Tensor, experts: int, align: int) -> Groups:
        """ids: int64 [T, k]."""
        flat = ids.flatten()
        most = (len(flat) + min(experts, len(flat)) * (align - 1)) // align * align
        count = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
        padded = (count + align - 1) // align * align
        order = flat.argsort(stable=True)
        expert = flat[order]
        skipped = (padded - count).cumsum(0) - (padded - count)
        rows = torch.arange(len(flat), device=flat.device) + skipped[expert]
        return cls(
            torch.empty_like(flat).scatter_(0, order, rows).view(ids.shape),
            flat.new_zeros(most).scatter_(0, rows, order // ids.shape[1]),
            torch.full((most,), -1, dtype=torch.int32, device=flat.device).scatter_(0, rows, expert.int()),
        )

    def gather(self, source: Fp8) -> Fp8:
        """The tokens' codes and scales, [T, K] and [T, K/128], as rows; a bulk copy wants a column of scales in one piece."""
        codes, scales = source
        return codes.view(torch.uint8)[self.token].view(codes.dtype), scales.t().index_select(1, self.token).t()


def _multiply(x: Fp8, weight: Fp8) -> Tensor:
    y = torch.empty(len(x[0]), len(weight[0]), dtype=torch.bfloat16, device=x[0].device)
    kernels().fp8_gemm_nt(x, weight, y)
    return y


def _multiply_groups(x: Fp8, weight: Fp8, groups: Groups) -> Tensor:
    """Nobody's rows hold anything."""
    y = torch.empty(len(x[0]), weight[0].shape[1], dtype=torch.bfloat16, device=x[0].device)
    kernels().m_grouped_fp8_gemm_nt_contiguous(x, weight, y, groups.expert)
    return y


def _weights(x: Tensor, experts: Experts) -> tuple[tuple[Fp8, Fp8], tuple[Fp8, Fp8]]:
    """Both matrices of the routed experts, E4M3 [E, N, K] and float32 [E, N/128, K/128], and of the shared one.

    Raises `PeerUnsupported`, before anything is converted.
    """
    w13, w2, w13_scale, w2_scale = experts.w13, experts.w2, experts.w13_scale, experts.w2_scale
    shared_w13, shared_w2 = experts.shared_w13, experts.shared_w2
    if w13_scale is None or w2_scale is None:
        raise PeerUnsupported(f"the routed experts are {w13.dtype}; it takes them packed in FP4")
    if experts.shared_w13_scale is None or experts.shared_w2_scale is None:
        raise PeerUnsupported(f"the shared expert is {shared_w13.dtype}; it takes it in FP8")
    packed = [(matrix.shape[1], 2 * matrix.shape[2]) for matrix in (w13, w2)]
    for outputs, inputs in (*packed, shared_w13.shape, shared_w2.shape):
        check(x, shared_w13, experts.shared_w13_scale, outputs, inputs)
    routed = made_once(w13, lambda: _expanded(w13, w13_scale, True)), made_once(w2, lambda: _expanded(w2, w2_scale, False))
    return routed, (aligned(shared_w13, experts.shared_w13_scale), aligned(shared_w2, experts.shared_w2_scale))


def _expanded(tiles: Tensor, scale: Tensor, gated: bool) -> Fp8:
    """`pack_tiles` of all experts, one after the other."""
    count, rows, pairs = tiles.shape
    shape = rows // GROUP, GROUP, 2 * pairs // GROUP, GROUP
    codes = torch.empty(count, rows, 2 * pairs, dtype=torch.float8_e4m3fn, device=tiles.device)
    scales = torch.empty(count, *shape[::2], dtype=torch.float32, device=tiles.device)
    for expert in range(count):
        values = unpack_tiles(tiles[expert], scale[expert], gated, torch.float32).view(shape)
        block = mx_scale(values.transpose(1, 2).flatten(2), E4M3_MAX, MXFP4_AMAX_MIN)
        codes[expert] = (values / block[:, None]).to(torch.float8_e4m3fn).view(rows, -1)
        scales[expert] = block.squeeze(-1)
    return codes, scales
