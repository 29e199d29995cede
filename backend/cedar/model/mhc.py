# SPDX-License-Identifier: Apache-2.0
"""The hyper-connections of a layer: coefficients' weights, and the streams between two sub-layers (`cedar.ops.mhc`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.model.linear import Reader
from cedar.ops.mhc import Mixing, Written, mega_mhc


@dataclass(frozen=True)
class Residual:
    """The residual streams between two layers.

    streams: [T, hc, D], compute dtype, without what the last sub-layer wrote: that is ``written`` until the next operation
    spreads it over them (None: nothing is left to write). pre: float32 [T, hc], what the next sub-layer collapses them with.
    """

    streams: Tensor
    pre: Tensor
    written: Written | None = None

    def settle(self) -> Residual:
        """The same with everything written to the streams."""
        if self.written is None:
            return self
        return Residual(mega_mhc(self.streams, self.written, None, None, None).streams, self.pre)


class HyperConnection(nn.Module):
    """The weights of one sub-layer's coefficients (``hc_attn`` or ``hc_ffn``)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hc = config.hc_mult
        outputs = (2 + hc) * hc
        self.eps, self.norm_eps, self.iterations = config.hc_eps, config.rms_norm_eps, config.hc_sinkhorn_iters
        self.fn = nn.Parameter(torch.empty(outputs, hc * config.hidden_size), requires_grad=False)
        self.base = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.spread = (hc, hc, hc * hc)

    @cached_property
    def mixing(self) -> Mixing:
        """For an operation."""
        return Mixing(self.fn, self.scale, self.base, self.eps, self.norm_eps, self.iterations)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>_fn``, ``_base`` and ``_scale`` [3]: one scale for pre, one for post, one for comb."""
        self.fn.copy_(read(f"{prefix}_fn"))
        self.base.copy_(read(f"{prefix}_base"))
        self.scale.copy_(read(f"{prefix}_scale").repeat_interleave(torch.tensor(self.spread)))
