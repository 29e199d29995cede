# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: how a sub-layer reads from and writes to the residual streams.

Streams S are [T, hc, D]. A sub-layer reads ``collapse(S, pre)`` with the ``pre`` of the sub-layer before it, and its output
is spread by ``expand`` with its own ``post`` and ``comb``. Coefficients and mixing are float32 (released inference code).
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.ops.norm import Norm, rms_norm
from cedar.ops.provider import FusedOp


class Mixing(NamedTuple):
    """What the coefficients of a sub-layer are made with: fn float32 [(2 + hc) hc, hc D], scale and base one per output of fn."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    eps: float
    norm_eps: float
    iterations: int


class Gates(NamedTuple):
    """The coefficients of one sub-layer, float32: pre [T, hc], post [T, hc], comb [T, hc, hc] (source, destination)."""

    pre: Tensor
    post: Tensor
    comb: Tensor


class Written(NamedTuple):
    """A sub-layer's output [T, D] and how it is spread over the streams."""

    output: Tensor
    post: Tensor
    comb: Tensor


class Crossing(NamedTuple):
    """streams [T, hc, D]; gates: of the next sub-layer; normed [T, D]: its input. What was not asked for is None."""

    streams: Tensor
    gates: Gates | None
    normed: Tensor | None


@FusedOp
def mega_mhc(streams: Tensor, written: Written | None, pre: Tensor | None, mixing: Mixing | None, norm: Norm | None) -> Crossing:
    """From the end of one sub-layer to the start of the next; each of the three parts may be left out.

    written: streams <- expand(output, streams, post, comb). mixing: the new streams' `mix`. norm: RMSNorm(collapse(streams,
    pre)), where ``pre`` (float32 [T, hc]) comes from the sub-layer before. All is computed from streams as they are stored.
    """
    if written is not None:
        streams = expand(written.output, streams, written.post, written.comb)
    gates = None if mixing is None else mix(streams, mixing)
    if norm is None:
        return Crossing(streams, gates, None)
    assert pre is not None
    return Crossing(streams, gates, rms_norm(collapse(streams, pre), *norm))


@mega_mhc.native
def _(streams: Tensor, written: Written | None, pre: Tensor | None, mixing: Mixing | None, norm: Norm | None) -> Crossing:
    rows, hc, hidden = streams.shape
    output, post, comb = (None, None, None) if written is None else written
    fn, scale, base, eps, mix_eps, iterations = _NO_MIXING if mixing is None else mixing
    weight, norm_eps = norm or (None, 0.0)
    new_streams = None if written is None else torch.empty_like(streams)
    gates = None
    if mixing is not None:
        new_pre, new_post = (torch.empty(rows, hc, dtype=torch.float32, device=streams.device) for _ in range(2))
        gates = Gates(new_pre, new_post, new_pre.new_empty(rows, hc, hc))
    normed = None if norm is None else streams.new_empty(rows, hidden)
    inputs = (output, streams, post, comb, pre, fn, scale, base, weight)
    outputs = (new_streams, *(gates or (None, None, None)), normed)
    torch.ops.cedar.mega_mhc.default(*inputs, *outputs, iterations, eps, mix_eps, norm_eps)
    return Crossing(streams if new_streams is None else new_streams, gates, normed)


_NO_MIXING = (None, None, None, 0.0, 0.0, 1)


def mix(streams: Tensor, mixing: Mixing) -> Gates:
    """The coefficients of one sub-layer from its streams [T, hc, D].

    One RMS statistic over all hc D values normalises the outputs of fn.
    """
    flat = streams.flatten(1).float()
    return gates_of(torch.nn.functional.linear(flat, mixing.fn), flat.square().mean(-1, keepdim=True), mixing)


def gates_of(outputs: Tensor, mean_square: Tensor, mixing: Mixing) -> Gates:
    """The coefficients from fn's outputs, float32 [T, (2 + hc) hc], and the streams' mean squares, float32 [T, 1]."""
    hc = isqrt(outputs.shape[1])  # (2 + hc) hc = (1 + hc)^2 - 1
    raw = torch.addcmul(mixing.base, outputs * (mean_square + mixing.norm_eps).rsqrt_(), mixing.scale)
    gates = torch.sigmoid(raw[:, : 2 * hc])
    comb = sinkhorn(raw[:, 2 * hc :].view(-1, hc, hc), mixing.eps, mixing.iterations)
    return Gates(gates[:, :hc] + mixing.eps, gates[:, hc:] * 2, comb)


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Row softmax + eps, then alternately columns and rows divided by (their sum + eps), columns first and last.

    logits float32 [T, hc, hc] -> same shape. The matrix is kept as diag(u) K diag(v): dividing the rows of C by
    (sum_j C_ij + eps) is 1/u <- K v + eps/u, one `baddbmm` and a reciprocal for all rows, half of the dispatches of doing
    it on C. At single-token decode dispatches are all that this costs.
    """
    kernel = logits.softmax(-1).add_(eps)
    transposed = kernel.mT.contiguous()
    inverse_u = kernel.new_ones(*kernel.shape[:-1], 1)
    inverse_v, u, v = inverse_u.clone(), inverse_u.clone(), inverse_u.clone()
    torch.reciprocal(inverse_v.baddbmm_(transposed, u, beta=eps), out=v)
    for _ in range(iterations - 1):
        torch.reciprocal(inverse_u.baddbmm_(kernel, v, beta=eps), out=u)
        torch.reciprocal(inverse_v.baddbmm_(transposed, u, beta=eps), out=v)
    return kernel.mul_(u).mul_(v.mT)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre_i S_i in float32, cast to the streams' dtype. [T, hc, D], float32 [T, hc] -> [T, D]."""
    return torch.bmm(pre[:, None], streams.float())[:, 0].to(streams.dtype)


def expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New stream j = post_j output + sum_i comb_ij S_i in float32, cast to the streams' dtype. output [T, D] -> [T, hc, D]."""
    written = post[:, :, None] * output[:, None].float()
    return written.baddbmm_(comb.mT, streams.float()).to(streams.dtype)
