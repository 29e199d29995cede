# SPDX-License-Identifier: Apache-2.0
"""Random weights of a configuration, quantised and written as shards with an index.

Tensors are made in row blocks and written to their place, so a model of any size needs little memory. Every value depends
on the seed and the tensor's name alone: the same call gives the same bytes, however they are sharded.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from cedar.cache.formats import MX_GROUP, pack_fp8
from cedar.config.model import ModelConfig
from cedar.errors import invalid
from cedar.model.checkpoint import INDEX, Progress
from cedar.model.layout import TensorSpec, expected_tensors
from cedar.model.quantize import quantize_fp8_tiles, quantize_mxfp4_rows

LOGIT_STD = 4.0
"""The best of V normal logits leads the next by about std / sqrt(2 ln V): with 4, greedy choices stand clear of rounding,
and sampling at temperature 1 still varies."""

_BLOCK_ELEMENTS = 1 << 22
_SHARD_BYTES = 8 << 30


def write_weights(
    config: ModelConfig, out: Path, seed: int, *, silent: Sequence[int], shards: int | None, progress: Progress | None
) -> None:
    """Write ``model-*.safetensors`` and the index to the directory ``out``.

    silent: token ids whose logit is always 0, below the best of the others: greedy output stays text.
    """
    specs = expected_tensors(config)
    total = sum(spec.nbytes for spec in specs.values())
    free = shutil.disk_usage(out).free
    if free < total:
        raise invalid("out", f"the disk has {free:,} bytes free", f"a disk with {total:,}")
    done = 0
    with _Shards(specs, total, out, shards or -(-total // _SHARD_BYTES)) as files:
        for name, spec in specs.items():
            if not name.endswith(".scale"):  # written with its weight
                _write_tensor(files, name, spec, config, seed, silent)
            done += spec.nbytes
            if progress is not None:
                progress(done, total, name)


class _Shards:
    """Files of the final size whose tensors are written a block of rows at a time."""

    def __init__(self, specs: dict[str, TensorSpec], total: int, out: Path, shards: int) -> None:
        parts: dict[int, list[str]] = {}
        before = 0
        for name, spec in specs.items():
            parts.setdefault(before * shards // total, []).append(name)
            before += spec.nbytes
        self._stack = ExitStack()
        self._place: dict[str, tuple[BinaryIO, int, int]] = {}
        weight_map = {}
        for number, names in enumerate(parts.values(), start=1):
            file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            self._open(out / file, names, specs)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _open(self, path: Path, names: list[str], specs: dict[str, TensorSpec]) -> None:
        """Write the header. Wider types first, so that every tensor is aligned to its type."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(names, key=lambda n: -specs[n].nbytes // prod(specs[n].shape)):
            spec = specs[name]
            begin, end = end, end + spec.nbytes
            header[name] = {"dtype": spec.dtypes[0], "shape": list(spec.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = self._stack.enter_context(path.open("wb"))
        file.write(len(text).to_bytes(8, "little") + text)
        base = file.tell()
        file.truncate(base + end)
        for name in names:
            self._place[name] = (file, base + header[name]["data_offsets"][0], specs[name].nbytes // specs[name].shape[0])

    def put(self, name: str, first_row: int, rows: Tensor) -> None:
        """rows: in the stored type (any type of that width)."""
        file, base, row_bytes = self._place[name]
        file.seek(base + first_row * row_bytes)
        file.write(rows.contiguous().view(torch.uint8).numpy().tobytes())

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _write_tensor(files: _Shards, name: str, spec: TensorSpec, config: ModelConfig, seed: int, silent: Sequence[int]) -> None:
    """Draw, quantise and write one tensor, and its scale if it has one, a block of whole tiles at a time."""
    stored_as = spec.dtypes[0]
    rows, cols = spec.shape[0], prod(spec.shape[1:]) * (2 if stored_as == "I8" else 1)
    scale_name = name.removesuffix("weight") + "scale"
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    block = max(1, _BLOCK_ELEMENTS // (cols * MX_GROUP)) * MX_GROUP
    for first in range(0, rows, block):
        values = _draw(random, name, min(block, rows - first), cols, config)
        if name == "head.weight":
            values[[token - first for token in silent if first <= token < first + len(values)]] = 0
        if stored_as == "BF16" or stored_as == "F32":
            files.put(name, first, values.to(torch.bfloat16 if stored_as == "BF16" else torch.float32))
            continue
        by_tile = stored_as == "F8_E4M3" and not name.endswith("engram.embed.weight")
        quantize = quantize_fp8_tiles if by_tile else pack_fp8 if stored_as == "F8_E4M3" else quantize_mxfp4_rows
        stored, scale = quantize(values)
        files.put(name, first, stored)
        files.put(scale_name, first // MX_GROUP if by_tile else first, scale)


def _draw(random: np.random.Generator, name: str, rows: int, cols: int, config: ModelConfig) -> Tensor:
    """Initial values, float32 [rows, cols].

    Linears keep the size of what they are given; those that write to the residual streams are small enough that all layers
    together add about as much as the embedding, so rounding grows little on its way up. Gate biases make the selection
    differ from the order of the weights. Streams start out mixed little (comb near the identity).
    """
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind.endswith("norm") or kind in ("q_weight", "k_weight", "hc_attn_scale", "hc_ffn_scale"):
        return torch.ones(rows, cols)
    if kind == "attn_sink":
        return torch.zeros(rows, cols)
    if kind in ("hc_attn_base", "hc_ffn_base"):
        hc = config.hc_mult
        return torch.cat([torch.zeros(2 * hc), 2 * torch.eye(hc).flatten()])[:, None]
    std = cols**-0.5
    if kind == "embed":
        std = 1.0
    elif name == "head.weight":
        std *= LOGIT_STD
    elif kind in ("hc_attn_fn", "hc_ffn_fn"):
        std = 0.01
    elif kind in ("bias", "bias_vl"):
        std = 0.1
    elif kind in ("wo_b", "w2"):
        std *= (2 * config.num_hidden_layers) ** -0.5
    return torch.from_numpy(random.standard_normal((rows, cols), dtype=np.float32)).mul_(std)
