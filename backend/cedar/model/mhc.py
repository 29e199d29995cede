# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: how a sub-layer reads from and writes to the residual streams.

Streams S are [T, hc, D]. A sub-layer reads ``collapse(S, pre)`` with the ``pre`` of the sub-layer before it, and its output
is spread by ``expand`` with its own ``post`` and ``comb``. Coefficients and mixing are float32 (released inference code).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.model.linear import Reader


def mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, eps: float, norm_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients of one sub-layer, float32: pre [T, hc], post [T, hc], comb [T, hc, hc] (source, destination).

    streams [T, hc, D]; fn float32 [(2 + hc) hc, hc D]; scale and base float32 [(2 + hc) hc], one per output of fn.
    One RMS statistic over all hc D values normalises the outputs of fn.
    """
    hc = streams.shape[1]
    flat = streams.flatten(1).float()
    mixed = nn.functional.linear(flat, fn).mul_(flat.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_())
    raw = torch.addcmul(base, mixed, scale)
    gates = torch.sigmoid(raw[:, : 2 * hc])
    comb = sinkhorn(raw[:, 2 * hc :].view(-1, hc, hc), eps, iterations)
    return gates[:, :hc] + eps, gates[:, hc:] * 2, comb


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


class HyperConnection(nn.Module):
    """The coefficients of one sub-layer (``hc_attn`` or ``hc_ffn``) as a function of the streams."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hc = config.hc_mult
        outputs = (2 + hc) * hc
        self.eps, self.norm_eps, self.iterations = config.hc_eps, config.rms_norm_eps, config.hc_sinkhorn_iters
        self.fn = nn.Parameter(torch.empty(outputs, hc * config.hidden_size), requires_grad=False)
        self.base = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.spread = (hc, hc, hc * hc)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, hc, D] -> (pre, post, comb), see `mix`."""
        return mix(streams, self.fn, self.scale, self.base, eps=self.eps, norm_eps=self.norm_eps, iterations=self.iterations)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>_fn``, ``_base`` and ``_scale`` [3]: one scale for pre, one for post, one for comb."""
        self.fn.copy_(read(f"{prefix}_fn"))
        self.base.copy_(read(f"{prefix}_base"))
        self.scale.copy_(read(f"{prefix}_scale").repeat_interleave(torch.tensor(self.spread)))
