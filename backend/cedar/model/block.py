# SPDX-License-Identifier: Apache-2.0
"""One layer: Engram (where it has one), attention and mixture of experts, each read from and written to the streams."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.model import LayerSpec, ModelConfig
from cedar.model.attention import Attention
from cedar.model.engram import Engram
from cedar.model.linear import Reader
from cedar.model.mhc import HyperConnection, Residual
from cedar.model.moe import MoE
from cedar.model.norm import RMSNorm
from cedar.model.state import PassState, WindowKeys
from cedar.ops.mhc import Gates, Written, mega_mhc


class Block(nn.Module):
    """A sub-layer collapses the streams with the ``pre`` of the sub-layer before it and hands its own on."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        *,
        act_quant: bool,
        fake_quant: bool,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.engram = Engram(config, spec.index, dtype, act_quant=act_quant, weight_dtype=weight_dtype) if spec.engram else None
        self.hc_attn = HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, spec, dtype, act_quant=act_quant, fake_quant=fake_quant, weight_dtype=weight_dtype)
        self.hc_ffn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, dtype, act_quant=act_quant, weight_dtype=weight_dtype)

    def forward(self, residual: Residual, state: PassState, window: WindowKeys | None = None) -> Residual:
        """What enters the layer -> what leaves it.

        window: what `write` returned for these rows (the cut layer); None: this call writes.
        """
        if self.engram is not None:
            settled = residual.settle()
            residual = Residual(self.engram(settled.streams, state.engram_rows[self.spec.index]), settled.pre)
        streams, gates, x = self._cross(residual, self.hc_attn, self.attn_norm)
        y = self.attn(x, state) if window is None else self.attn.attend(x, window, state)
        residual = Residual(streams, gates.pre, Written(y, gates.post, gates.comb))
        streams, gates, x = self._cross(residual, self.hc_ffn, self.ffn_norm)
        return Residual(streams, gates.pre, Written(self.ffn(x), gates.post, gates.comb))

    @staticmethod
    def _cross(residual: Residual, connection: HyperConnection, norm: RMSNorm) -> tuple[Tensor, Gates, Tensor]:
        """Streams with the last output written, the coefficients and the input of the sub-layer that comes now."""
        streams, gates, x = mega_mhc(residual.streams, residual.written, residual.pre, connection.mixing, norm.norm)
        assert gates is not None
        assert x is not None
        return streams, gates, x

    def write(self, residual: Residual, state: PassState) -> tuple[Tensor, WindowKeys]:
        """Only the KV that this layer's attention writes for these rows (a layer without Engram); also the settled streams."""
        streams, _, x = mega_mhc(residual.streams, residual.written, residual.pre, None, self.attn_norm.norm)
        assert x is not None
        return streams, self.attn.write(x, state)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes the layer's ``<prefix>.*`` tensors."""
        for name in ("attn_norm", "attn", "ffn_norm", "ffn", "hc_attn", "hc_ffn"):
            getattr(self, name).load(read, f"{prefix}.{name}")
        if self.engram is not None:
            self.engram.load(read, f"{prefix}.engram")
