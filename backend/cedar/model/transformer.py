# SPDX-License-Identifier: Apache-2.0
"""The text model: embedding, the encoder half, the decoder half, logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cedar.cache.rows import RowPlan
from cedar.cache.store import KVCache
from cedar.config.model import ModelConfig
from cedar.model.block import Block
from cedar.model.linear import Reader, load_wide
from cedar.model.mhc import Residual
from cedar.model.norm import RMSNorm
from cedar.model.rope import RopeTable
from cedar.model.state import PassState, Rotations, WindowKeys
from cedar.ops.linear import mxfp8_linear
from cedar.ops.mhc import mega_mhc


@dataclass
class LayerWork:
    """Rows run since the start. layers: through each layer. source_rows: through the cut layer's KV projection, counted apart."""

    layers: list[int]
    source_rows: int = 0

    def repeat(self, rows: int) -> None:
        """Rows that ran through everything in a recorded pass."""
        self.layers[:] = [count + rows for count in self.layers]
        self.source_rows += rows


@dataclass(frozen=True)
class Boundary:
    """What the encoder half hands to the decoder half: the cut layer's input, and its window keys.

    streams: [T, hc, D], compute dtype. pre: float32 [T, hc]. window: records of the cut layer, looked up through the plan's
    ``cut_view``; ``window.staged`` [T, width] are those of these rows.
    """

    streams: Tensor
    pre: Tensor
    window: WindowKeys


class Transformer(nn.Module):
    """A causal stack whose long-range KV from layer ``cut`` on is projected from the input of layer ``cut``.

    So layers below ``cut`` and the cut layer's KV projection must see every token (`encode`), the rest only the rows whose
    output is wanted and those that these can still see through the window (`decode`).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        act_quant: bool = False,
        fake_quant: bool = True,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype), requires_grad=False)
        self.layers = nn.ModuleList(
            Block(config, spec, dtype, act_quant=act_quant, fake_quant=fake_quant, weight_dtype=weight_dtype)
            for spec in config.layers
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        head_dtype = torch.float32 if weight_dtype is None else torch.bfloat16
        self.head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=head_dtype), requires_grad=False)
        self.work = LayerWork([0] * len(self.layers))
        self._rope = tuple(RopeTable(config, compressed, self.head.device) for compressed in (False, True))

    def streams(self, token_ids: Tensor) -> Tensor:
        """What enters layer 0: the embedding in every stream. int64 [T] -> [T, hc, D]."""
        return self.embed.index_select(0, token_ids)[:, None].expand(-1, self.config.hc_mult, -1).contiguous()

    def rotations(self, plan: RowPlan) -> Rotations:
        """cos and sin of a batch's positions."""
        return Rotations(plan, *self._rope)

    def encode(
        self, streams: Tensor, engram_rows: dict[int, Tensor], plan: RowPlan, cache: KVCache, rotations: Rotations | None = None
    ) -> Boundary:
        """Layers 0..cut-1 and the cut layer's KV projection on every row of ``plan`` (built with ``writes``).

        streams: `streams` of the rows' tokens. engram_rows: int64 [T, columns] per Engram layer.
        """
        pre = torch.zeros(plan.num_rows, self.config.hc_mult, device=streams.device)
        pre[:, 0] = 1.0
        state = PassState(plan, cache, rotations or self.rotations(plan), plan.view, engram_rows)
        residual = Residual(streams, pre)
        for layer in self.layers[: self.config.cut]:
            residual = self._launch(layer, residual, state)
        self.work.source_rows += plan.num_rows
        streams, window = self._cut_layer.write(residual, state)
        return Boundary(streams, residual.pre, window)

    def decode(self, boundary: Boundary, plan: RowPlan, cache: KVCache, rotations: Rotations | None = None) -> Tensor:
        """Layers cut..L-1 on the rows of ``plan``, whose cut layer KV `encode` wrote. Returns [n, D] after the final norm."""
        state = PassState(plan, cache, rotations or self.rotations(plan), plan.cut_view)
        residual = self._launch(self._cut_layer, Residual(boundary.streams, boundary.pre), state, boundary.window)
        state.view = plan.view
        for layer in self.layers[self.config.cut + 1 :]:
            residual = self._launch(layer, residual, state)
        _, _, hidden = mega_mhc(residual.streams, residual.written, residual.pre, None, self.norm.norm)
        assert hidden is not None
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, D] -> float32 [n, vocab]; a float32 product in every compute dtype."""
        return mxfp8_linear(hidden, self.head, wide=True)

    def _launch(self, layer: nn.Module, residual: Residual, state: PassState, window: WindowKeys | None = None) -> Residual:
        assert isinstance(layer, Block)
        self.work.layers[layer.spec.index] += residual.streams.shape[0]
        return layer(residual, state, window)  # type: ignore[no-any-return]

    @property
    def _cut_layer(self) -> Block:
        block = self.layers[self.config.cut]
        assert isinstance(block, Block)
        return block

    def load(self, read: Reader, prefix: str = "") -> None:
        """Takes the text model's tensors; names have no common prefix in the released layout."""
        self.embed.copy_(read(f"{prefix}embed.weight"))
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            layer.load(read, f"{prefix}layers.{index}")
        self.norm.load(read, f"{prefix}norm")
        self.head = load_wide(read, [f"{prefix}head.weight"], self.head)
