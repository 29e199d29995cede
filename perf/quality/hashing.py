# SPDX-License-Identifier: Apache-2.0
"""Engram rows of a batch, on the batch's device. The same integers as `cedar.model.engram.EngramHasher`."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.model.engram import EngramHasher, TokenMap


class EngramRows:
    """Table rows by layer for token ids int64 [B, T] with documents that start at ``doc_start``."""

    def __init__(self, hasher: EngramHasher, token_map: TokenMap, device: torch.device) -> None:
        self._layers, self._ngram, self._heads = hasher.layers, hasher.ngram, hasher.heads
        self._map = torch.from_numpy(token_map.ids).to(device)
        self._pad = hasher.pad
        arrays = (hasher.multipliers, hasher.primes, hasher.offsets)
        self._multipliers, self._primes, self._offsets = (torch.from_numpy(array).to(device) for array in arrays)

    def __call__(self, tokens: Tensor, doc_start: Tensor) -> dict[int, Tensor]:
        """int64 [B * T, columns] a layer. A token before the document's first counts as PAD."""
        compressed = self._map[tokens.clamp(max=len(self._map) - 1)]
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        back = [compressed]
        for shift in range(1, self._ngram):
            earlier = torch.nn.functional.pad(compressed[:, :-shift], (shift, 0), value=self._pad)
            back.append(torch.where(columns - shift >= doc_start, earlier, self._pad))
        rows = {}
        for number, layer in enumerate(self._layers):
            grams, mixed = [], back[0] * self._multipliers[number, 0]
            for shift in range(1, self._ngram):
                mixed = mixed ^ (back[shift] * self._multipliers[number, shift])
                grams.append(mixed)
            spread = torch.stack(grams, dim=-1).flatten(0, 1).repeat_interleave(self._heads, dim=1)
            rows[layer] = spread % self._primes[number] + self._offsets[number]
        return rows
