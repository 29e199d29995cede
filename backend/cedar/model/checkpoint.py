# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint of the released layout: memory-mapped, strict, and without a second copy of the weights."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.errors import CedarError, ErrorCode
from cedar.model.layout import ITEM_BYTES, VISION_PREFIXES, TensorSpec, expected_tensors
from cedar.model.linear import Reader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHOWN = 20
"""Lines per kind of problem in an error; the rest is counted."""
_RESIDENT_BYTES = 16 << 20
"""Mapped bytes handed out before the pages are given back: loading holds the weights once, not twice."""

# UE8M0 and packed FP4 are bytes to us: a numeric conversion of either would be a silent error
_TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}

Progress = Callable[[int, int, str], None]
"""progress(done_bytes, total_bytes, tensor name), bytes of the checkpoint."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as a shard's header describes it. begin, end: file offsets in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Shard:
    """One safetensors file. The header is read at once, the data is mapped at the first tensor."""

    def __init__(self, path: Path) -> None:
        """Raises `ValueError` saying what is wrong with the file."""
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= size - 8:
                raise ValueError("not a safetensors file (its header does not fit the file)")
            try:
                header: dict[str, Any] = json.loads(file.read(length))
                header.pop("__metadata__", None)
                self.entries = {name: _entry(item, 8 + length) for name, item in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError("not a safetensors file (its header cannot be read)") from None
        end = max((entry.end for entry in self.entries.values()), default=8 + length)
        if end > size:
            raise ValueError(f"is truncated: {size} bytes, its header needs {end}")
        for name, entry in self.entries.items():
            item = ITEM_BYTES.get(entry.dtype)
            if entry.begin < 8 + length or (item is not None and entry.nbytes != prod(entry.shape) * item):
                raise ValueError(f"{name} has {entry.nbytes} bytes, which is not {entry.dtype} {list(entry.shape)}")
        self._map: mmap.mmap | None = None

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file (a copy where the file does not align it). Never write to it."""
        entry = self.entries[name]
        dtype = _TORCH[entry.dtype]
        if self._map is None:
            with self.path.open("rb") as file:
                # copy-on-write only because torch wants a writable buffer; nothing writes
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if entry.begin % dtype.itemsize:
            return torch.frombuffer(bytearray(self._map[entry.begin : entry.end]), dtype=dtype).view(entry.shape)
        count = entry.nbytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)

    def release(self) -> None:
        """Give the mapped pages back to the page cache. Views stay valid: their pages are read again when touched."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def _entry(item: dict[str, Any], base: int) -> TensorEntry:
    begin, end = item["data_offsets"]
    shape = tuple(item["shape"])
    if not (isinstance(item["dtype"], str) and all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and begin <= end):
        raise ValueError
    return TensorEntry(item["dtype"], shape, base + begin, base + end)


@dataclass
class Problems:
    """What is wrong with a checkpoint, by kind."""

    by_kind: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, lines: Iterable[str]) -> None:
        if found := list(lines):
            self.by_kind.setdefault(kind, []).extend(found)

    def raise_if_any(self, directory: Path) -> None:
        """One `CedarError` that lists them all, at most 20 a kind and the number of the others."""
        if not self.by_kind:
            return
        lines = [f"{directory}: this is not a complete checkpoint of its config.json"]
        for kind, found in self.by_kind.items():
            lines.append(f"{len(found)} {kind}:")
            lines += [f"  {line}" for line in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  … and {len(found) - _SHOWN} more")
        raise CedarError(ErrorCode.INVALID_ARGUMENT, "\n".join(lines))


@dataclass(frozen=True)
class Verification:
    """A good checkpoint: what the text model takes from it and what it skips (tensors, bytes by part)."""

    text_tensors: int
    text_bytes: int
    drafter_tensors: int
    skipped: dict[str, tuple[int, int]]


class CheckpointReader:
    """A checkpoint directory: ``config.json`` and one ``model.safetensors`` or shards with an index.

    Making one reads the configuration and the headers. What is wrong with the weights is told by `verify`.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.config = ModelConfig.load(self.directory)
        self.shards: dict[str, Shard] = {}
        self._where: dict[str, Shard] = {}
        self._file_problems = Problems()
        index = self._read_index()
        for name in [SINGLE] if index is None else sorted(set(index.values())):
            self._open(name)
        self._index = index or {}
        if self._index:
            self._compare_index()

    def _read_index(self) -> dict[str, str] | None:
        file = self.directory / INDEX
        if not file.exists():
            return None
        try:
            weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            for name, shard in weight_map.items():
                if not isinstance(shard, str) or Path(shard).name != shard:
                    raise ValueError(f"{name} is in {shard!r}, which is no file name")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._file_problems.add("unreadable files", [f"{INDEX}: needs an object weight_map of tensor to shard ({error})"])
            return {}
        return dict(weight_map)

    def _open(self, name: str) -> None:
        try:
            shard = self.shards[name] = Shard(self.directory / name)
        except FileNotFoundError:
            self._file_problems.add("absent shards", [name])
            return
        except (OSError, ValueError) as error:
            self._file_problems.add("unreadable shards", [f"{name}: {error}"])
            return
        twice = [f"{t}: {self._where[t].path.name}, {name}" for t in shard.entries if t in self._where]
        self._file_problems.add("tensors in two shards", twice)
        self._where.update(dict.fromkeys(shard.entries, shard))

    def _compare_index(self) -> None:
        listed = {name: shard for name, shard in self._index.items() if shard in self.shards}
        moved = [f"{name}: not in {shard}" for name, shard in listed.items() if name not in self.shards[shard].entries]
        self._file_problems.add("tensors that the index places wrongly", moved)
        self._file_problems.add("tensors that the index does not list", [name for name in self._where if name not in self._index])

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor's header entry."""
        return {name: shard.entries[name] for name, shard in self._where.items()}

    def verify(self) -> Verification:
        """Every text tensor present with the right type and shape; of the others only known names, right where known.

        Drafter tensors may be absent; vision tensors are known by prefix. Raises one `CedarError` listing every problem.
        """
        text, entries = expected_tensors(self.config, drafter=False), self.entries
        everything = expected_tensors(self.config)
        problems = Problems({kind: list(found) for kind, found in self._file_problems.by_kind.items()})
        if self._index or not problems.by_kind:  # an unreadable file without an index could hold any of them
            lost = {name for name, shard in self._index.items() if shard not in self.shards}
            problems.add("missing tensors", [name for name in text if name not in entries and name not in lost])
        unknown = [name for name in entries if name not in everything and not name.startswith(VISION_PREFIXES)]
        problems.add("unexpected tensors", unknown)
        for name, entry in entries.items():
            if name in everything:
                _check(name, entry, everything[name], problems)
        problems.raise_if_any(self.directory)
        skipped = {}
        for part, prefixes in (("drafter", ("mtp.",)), ("vision", VISION_PREFIXES)):
            sizes = [entry.nbytes for name, entry in entries.items() if name.startswith(prefixes)]
            if sizes:
                skipped[part] = (len(sizes), sum(sizes))
        return Verification(len(text), sum(entries[name].nbytes for name in text), len(everything) - len(text), skipped)

    def read(self, name: str) -> Tensor:
        """The stored tensor (see `cedar.model.linear.Reader`), a view of the mapped file."""
        if name not in self._where:
            raise CedarError(ErrorCode.INTERNAL, f"{name} was asked for, but {self.directory} does not hold it")
        return self._where[name].tensor(name)

    def release(self) -> None:
        """Give the pages read so far back; see `Shard.release`."""
        for shard in self.shards.values():
            shard.release()


def _check(name: str, entry: TensorEntry, spec: TensorSpec, problems: Problems) -> None:
    if entry.dtype not in spec.dtypes:
        problems.add("tensors of a wrong type", [f"{name}: is {entry.dtype}; allowed: {' or '.join(spec.dtypes)}"])
    if entry.shape != spec.shape:
        problems.add("tensors of a wrong shape", [f"{name}: is {list(entry.shape)}; allowed: {list(spec.shape)}"])


class Loadable(Protocol):
    """Every module of `cedar.model`: takes its tensors by released name."""

    def load(self, read: Reader, prefix: str) -> None: ...


def load_weights(module: Loadable, directory: Path | str, progress: Progress | None = None) -> Verification:
    """Verify the checkpoint, then fill the text model. Returns what was verified and skipped.

    Tensors are dequantised from the mapped file straight into the module's parameters, and the file's pages are given
    back on the way, so the peak is the loaded size plus one tensor's working space. A text tensor that the module does
    not take is an INTERNAL error: it would mean a mechanism that runs without its weights.
    """
    reader = CheckpointReader(directory)
    verification = reader.verify()
    text = expected_tensors(reader.config, drafter=False)
    entries = reader.entries
    taken: set[str] = set()
    done = resident = 0

    def read(name: str) -> Tensor:
        nonlocal done, resident
        if resident > _RESIDENT_BYTES:
            reader.release()
            resident = 0
        tensor = reader.read(name)
        if name not in taken:
            taken.add(name)
            done += entries[name].nbytes
        resident += entries[name].nbytes
        if progress is not None:
            progress(done, verification.text_bytes, name)
        return tensor

    with torch.inference_mode():
        module.load(read, "")
    reader.release()
    if left := [name for name in text if name not in taken]:
        raise CedarError(ErrorCode.INTERNAL, f"{len(left)} tensors were not loaded, the first is {left[0]}")
    return verification
