# SPDX-License-Identifier: Apache-2.0
"""Engram: a hashed n-gram memory that is looked up by token ids alone and injected into the residual streams.

The host side (`TokenMap`, `EngramHasher`) needs only numpy; rows can be known before the network starts (V4.1 report).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.errors import invalid
from cedar.model.linear import Linear, Reader
from cedar.ops.engram import engram_gate, engram_gather, joined_rows

Int64 = npt.NDArray[np.int64]

# A string that is one space would be stripped away; a private-use character carries it past Strip.
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \\t\\r\\n]+"), " "),
        normalizers.Replace(Regex("^ $"), "\ue000"),
        normalizers.Strip(),
        normalizers.Replace("\ue000", " "),
    ]
)


class TokenMap:
    """Token ids to compressed ids: tokens whose normalised texts agree share one (released Engram code).

    ids: int64 [len(tokenizer)]; size: the number of distinct compressed ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        keys: dict[str, int] = {}
        length = tokenizer.get_vocab_size(with_added_tokens=True)
        self.ids = np.fromiter((keys.setdefault(_key(tokenizer, token), len(keys)) for token in range(length)), np.int64, length)
        self.size = len(keys)


def _key(tokenizer: Tokenizer, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:  # part of a character: no text of its own
        raw: str | None = tokenizer.id_to_token(token)
        return text if raw is None else raw
    return _NORMALIZER.normalize_str(text) or text


class EngramHasher:
    """Rows of each Engram layer's table for the tokens of a step (host, int64).

    Per layer: odd multipliers from a generator seeded by the layer number, one prime bucket count per column (n-gram size
    major, head minor) and the columns' offsets. Raises `CedarError` when the tokenizer does not give
    ``engram_compressed_vocab_size`` ids (every multiplier depends on it), or has no token ``engram_pad_token_id``.
    """

    def __init__(self, config: ModelConfig, token_map: TokenMap) -> None:
        if config.engram_layer_ids and token_map.size != config.engram_compressed_vocab_size:
            allowed = f"{token_map.size}, the number of compressed ids of this tokenizer"
            raise invalid("engram_compressed_vocab_size", f"is {config.engram_compressed_vocab_size}", allowed)
        if config.engram_layer_ids and config.engram_pad_token_id >= len(token_map.ids):
            allowed = f"0 to {len(token_map.ids) - 1}, a token of this tokenizer"
            raise invalid("engram_pad_token_id", f"is {config.engram_pad_token_id}", allowed)
        self.layers = config.engram_layer_ids
        self.ngram = config.engram_max_ngram_size
        self.heads = config.engram_n_heads
        self._map = token_map.ids
        self.pad = int(self._map[config.engram_pad_token_id]) if self.layers else 0
        bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
        seeds = (np.random.default_rng(10007 * layer) for layer in self.layers)
        draws = [seed.integers(0, bound, size=self.ngram, dtype=np.int64) for seed in seeds]
        shape = (len(self.layers), config.engram_columns)
        self.multipliers: Int64 = 2 * np.array(draws, np.int64).reshape(len(self.layers), self.ngram) + 1
        self.primes: Int64 = np.array(config.engram_primes, np.int64).reshape(shape)
        self.offsets: Int64 = np.cumsum(self.primes, axis=1) - self.primes

    def compress(self, window: Int64) -> Int64:
        """Token ids [T, n], column s = the token s places back, -1 = none -> compressed ids int64 [T, n].

        A missing token, and everything further back than it, is PAD; so is an id that the tokenizer does not have.
        """
        alive = np.logical_and.accumulate(window >= 0, axis=1) & (window < len(self._map))
        return np.where(alive, self._map[np.where(alive, window, 0)], self.pad)

    def hash(self, compressed: Int64) -> dict[int, Int64]:
        """Compressed ids [T, n] -> table rows int64 [T, columns] of each Engram layer.

        The XOR of the first m products is the m-gram's hash; each of its heads takes it modulo an own prime.
        """
        rows = {}
        for layer, multipliers, primes, offsets in zip(self.layers, self.multipliers, self.primes, self.offsets, strict=True):
            grams = np.bitwise_xor.accumulate(compressed * multipliers, axis=1)[:, 1:]
            rows[layer] = np.repeat(grams, self.heads, axis=1) % primes + offsets
        return rows

    def rows(self, window: Int64) -> dict[int, Int64]:
        """`hash` of `compress`: token ids [T, n], column s = the token at p - s, -1 = before the start or dead."""
        return self.hash(self.compress(window))


GPU_TABLE_BYTES = 1 << 30


class Engram(nn.Module):
    """One layer's table, its projection to per-stream keys and a shared value, and the gated injection.

    The table (FP8 rows, UE8M0 scale per 32) stays in the checkpoint's bytes, where the reader put it (memory-mapped): it
    is the largest tensor of the model and a step reads a few rows. They are dequantised in the gather. Only beside weights on a
    GPU a table of at most `GPU_TABLE_BYTES` lies with them, each row's scales behind its codes (`joined_rows`).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        *,
        act_quant: bool = False,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hc, hidden = config.hc_mult, config.hidden_size
        self.norm_eps = config.rms_norm_eps
        self.dtype = dtype
        self.rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        columns = config.engram_columns * config.engram_head_dim
        self.wkv = Linear(columns, (hc + 1) * hidden, dtype, fp8=True, act_quant=act_quant, weight_dtype=weight_dtype)
        self.qk_weight = nn.Parameter(torch.empty(hc, hidden), requires_grad=False)
        self.table: Tensor
        self.table_scale: Tensor | None

    def forward(self, streams: Tensor, rows: Tensor) -> Tensor:
        """streams [T, hc, D]; rows int64 [T, columns] (`EngramHasher.rows` of this layer) -> new streams, see `engram_gate`."""
        keys_value = self.wkv(self.gather(rows, streams.device))
        return engram_gate(streams, keys_value, self.qk_weight, self.norm_eps)

    def gather(self, rows: Tensor, device: torch.device | None = None) -> Tensor:
        """Dequantised table rows, concatenated per token: int64 [T, columns] -> ``dtype`` [T, columns * head_dim] (exact)."""
        return engram_gather(rows, self.table, self.table_scale, self.dtype, device)

    def load(self, read: Reader, prefix: str) -> None:
        """Takes ``<prefix>.embed`` (kept as the reader gives it), ``.wkv``, ``.q_weight`` and ``.k_weight``."""
        self.table = read(f"{prefix}.embed.weight").view(torch.uint8)
        self.table_scale = scale = read(f"{prefix}.embed.scale")
        if self.qk_weight.is_cuda and self.table.nbytes <= GPU_TABLE_BYTES:
            home = self.qk_weight.device
            self.table, self.table_scale = joined_rows(self.table.to(home), scale.to(home)), None
        self.wkv.load(read, f"{prefix}.wkv")
        self.qk_weight.copy_(read(f"{prefix}.q_weight").float() * read(f"{prefix}.k_weight").float())
