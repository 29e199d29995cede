# SPDX-License-Identifier: Apache-2.0
"""Between the trained weights and the released checkpoint layout."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from perf.quality.weights import Weights
from torch import Tensor

from cedar.cache.formats import pack_fp8, unpack_fp8
from cedar.model.checkpoint import INDEX
from cedar.model.layout import TensorSpec
from cedar.model.linear import Reader
from cedar.model.quantize import dequantize_fp8_tiles, dequantize_mxfp4_rows, quantize_fp8_tiles, quantize_mxfp4_rows


@torch.no_grad()
def read_weights(weights: Weights, read: Reader) -> None:
    """Fill ``weights`` with a checkpoint of the released layout, dequantised."""
    for name, spec in weights.specs.items():
        weights.tensor(name).copy_(_dequantised(read, name, spec))


def _dequantised(read: Reader, name: str, spec: TensorSpec) -> Tensor:
    stored = read(name)
    if spec.dtypes[0] not in ("F8_E4M3", "I8"):
        return stored.float()
    scale = read(_scale(name))
    if name.endswith("engram.embed.weight"):
        return unpack_fp8(stored.view(torch.uint8), scale)
    return (dequantize_mxfp4_rows if spec.dtypes[0] == "I8" else dequantize_fp8_tiles)(stored, scale, torch.float32)


def _scale(name: str) -> str:
    return name.removesuffix("weight") + "scale"


def write_weights(weights: Weights, directory: Path, *, shard_bytes: int) -> int:
    """Quantise and write ``model-*.safetensors`` of about ``shard_bytes`` each, and their index. Returns the bytes of tensors."""
    shards: list[dict[str, tuple[str, Tensor]]] = [{}]
    size = total = 0
    for name, spec in weights.specs.items():
        stored = _stored(name, spec, weights.tensor(name).cpu())
        added = sum(tensor.nbytes for _, tensor in stored.values())
        if size and size + added > shard_bytes:
            shards.append({})
            size = 0
        shards[-1].update(stored)
        size, total = size + added, total + added
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / file, shard)
        where.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def _stored(name: str, spec: TensorSpec, value: Tensor) -> dict[str, tuple[str, Tensor]]:
    """The tensors (safetensors type, bytes' carrier) that hold one weight."""
    kind = spec.dtypes[0]
    if kind in ("BF16", "F32"):
        return {name: (kind, value.to(torch.bfloat16 if kind == "BF16" else torch.float32))}
    if name.endswith("engram.embed.weight"):
        codes, scale = pack_fp8(value)
    else:
        codes, scale = (quantize_mxfp4_rows if kind == "I8" else quantize_fp8_tiles)(value)
    return {name: (kind, codes), _scale(name): ("F8_E8M0", scale)}


def _write_shard(path: Path, tensors: dict[str, tuple[str, Tensor]]) -> None:
    """One safetensors file; wider types first, so that every tensor is aligned to its type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    order = sorted(tensors, key=lambda name: -tensors[name][1].itemsize)
    for name in order:
        kind, tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        shape = [*tensor.shape]
        assert prod(shape) * tensor.itemsize == tensor.nbytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(tensors[name][1].contiguous().view(torch.uint8).numpy().tobytes())
