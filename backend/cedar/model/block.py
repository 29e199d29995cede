# SPDX-License-Identifier: Apache-2.0
"""One layer: Engram (where it has one), attention and mixture of experts, each read from and written to the streams."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cedar.config.model import LayerSpec, ModelConfig
from cedar.model.attention import Attention
from cedar.model.engram import Engram
from cedar.model.linear import Reader
from cedar.model.mhc import HyperConnection, collapse, expand
from cedar.model.moe import MoE
from cedar.model.norm import RMSNorm
from cedar.model.state import PassState, WindowKeys


class Block(nn.Module):
    """A sub-layer collapses the streams with the ``pre`` of the sub-layer before it and hands its own on."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        *,
        act_quant: bool,
        quantise_index: Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.engram = Engram(config, spec.index, dtype, act_quant=act_quant) if spec.engram else None
        self.hc_attn = HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, spec, dtype, act_quant=act_quant, quantise_index=quantise_index)
        self.hc_ffn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, dtype, act_quant=act_quant)

    def forward(self, streams: Tensor, pre: Tensor, state: PassState, window: WindowKeys | None = None) -> tuple[Tensor, Tensor]:
        """streams [T, hc, D], pre float32 [T, hc] -> the same for the next layer.

        window: what `write` returned for these rows (the cut layer); None: this call writes.
        """
        if self.engram is not None:
            streams = self.engram(streams, state.engram_rows[self.spec.index])
        attn_pre, post, comb = self.hc_attn(streams)
        x = self.attn_norm(collapse(streams, pre))
        y = self.attn(x, state) if window is None else self.attn.attend(x, window, state)
        streams = expand(y, streams, post, comb)
        ffn_pre, post, comb = self.hc_ffn(streams)
        y = self.ffn(self.ffn_norm(collapse(streams, attn_pre)))
        return expand(y, streams, post, comb), ffn_pre

    def write(self, streams: Tensor, pre: Tensor, state: PassState) -> WindowKeys:
        """Only the KV that this layer's attention writes for these rows (a layer without Engram)."""
        return self.attn.write(self.attn_norm(collapse(streams, pre)), state)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes the layer's ``<prefix>.*`` tensors."""
        for name in ("attn_norm", "attn", "ffn_norm", "ffn", "hc_attn", "hc_ffn"):
            getattr(self, name).load(read, f"{prefix}.{name}")
        if self.engram is not None:
            self.engram.load(read, f"{prefix}.engram")
