# SPDX-License-Identifier: Apache-2.0
"""Running prompts of the golden sets through the real runner, and seeing what its layers compute on the way."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from cedar.cache.store import BlockTable, SequenceBlocks
from cedar.config.engine import EngineConfig
from cedar.engine.memory import ModelSequence
from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.work import DecodeWork, PrefillWork, StepWork, TailWork
from cedar.model.block import Block
from cedar.model.indexer import Indexer
from cedar.model.mhc import Residual
from cedar.model.moe import Gate
from cedar.model.state import Selection

GOLDEN = Path(__file__).parent / "data" / "golden"
VARIANTS = ("fp32_noquant", "fp32", "bf16")


def block_tables(sequences: Sequence[SequenceBlocks], page_tokens: int) -> dict[int, BlockTable]:
    """The tables, by ratio, that a cache with these sequences has."""
    pages = torch.zeros(1 + max(blocks.slot for blocks in sequences), max(len(blocks.pages) for blocks in sequences)).long()
    for blocks in sequences:
        pages[blocks.slot, : len(blocks.pages)] = torch.tensor(blocks.pages)
    return {ratio: BlockTable(pages, page_tokens // ratio) for ratio in (1, 2)}


def entry_rows(blocks: SequenceBlocks, per_page: int, count: int) -> torch.Tensor:
    """Pool rows of a sequence's first ``count`` entries, by the pages it holds."""
    return torch.tensor([page * per_page + row for page in blocks.pages for row in range(per_page)][:count], dtype=torch.int64)


def stored_rows(runner: ModelRunner, seq: ModelSequence, source: int, num_tokens: int) -> torch.Tensor:
    """Pool rows of the entries of a KV source that ``num_tokens`` tokens have filled."""
    ratio = runner.config.compress_ratios[source]
    return entry_rows(seq.blocks, runner.cache.page_tokens // ratio, num_tokens // ratio)


@functools.cache
def load_runner(name: str, variant: str, page_tokens: int = 16, device: str = "cpu", ops: str = "reference") -> ModelRunner:
    """The runner of ``tiny-a`` or ``tiny-b`` in a variant's arithmetic; shared, so leave it without open sequences."""
    return ModelRunner.load(
        EngineConfig(
            model=str(GOLDEN / name / "checkpoint"),
            device=device,
            dtype="bfloat16" if variant == "bf16" else "float32",
            fake_quant=variant != "fp32_noquant",
            ops=ops,
            cpu_threads=1,
            kv_cache_bytes=96 << 20,
            page_tokens=page_tokens,
        )
    )


@functools.cache
def golden_arrays(name: str, file: str) -> dict[str, np.ndarray]:
    """All arrays of one ``.npz``; those stored as bfloat16 bits as float32, without the suffix."""
    with np.load(GOLDEN / name / file) as data:
        return {key.removesuffix("_bf16bits"): _values(key, data[key]) for key in data.files}


def _values(key: str, array: np.ndarray) -> np.ndarray:
    return (array.astype(np.uint32) << 16).view(np.float32) if key.endswith("_bf16bits") else array


def case_arrays(name: str, file: str, case: str) -> dict[str, np.ndarray]:
    """The arrays below ``case/``."""
    return {key.removeprefix(f"{case}/"): value for key, value in golden_arrays(name, file).items() if key.startswith(f"{case}/")}


def cases(name: str, file: str) -> list[str]:
    """The first path parts of a file's keys."""
    return sorted({key.split("/")[0] for key in golden_arrays(name, file)})


def cut_into(length: int, sizes: int | Sequence[int] | None) -> list[int]:
    """Chunk lengths that sum to ``length``: one, equal ones, or the given ones over and over."""
    if sizes is None:
        return [length]
    cycle = [sizes] if isinstance(sizes, int) else list(sizes)
    chunks: list[int] = []
    while length:
        chunks.append(min(cycle[len(chunks) % len(cycle)], length))
        length -= chunks[-1]
    return chunks


def open_sequence(runner: ModelRunner, mode: DecoderReplay, num_tokens: int) -> ModelSequence:
    """An open sequence with pages for ``num_tokens``."""
    seq = runner.open_alone(mode, num_tokens)
    assert seq is not None
    return seq


def prefill(
    runner: ModelRunner, seq: ModelSequence, ids: Sequence[int], sizes: int | Sequence[int] | None = None, *, last: bool = True
) -> np.ndarray | None:
    """Run ids[seq.num_computed:] in chunks. OFF: float32 logits of all those rows."""
    rows = []
    start = seq.num_computed
    for count in cut_into(len(ids) - start, sizes):
        ends = start + count == len(ids)
        off = seq.mode is DecoderReplay.OFF
        work = PrefillWork(seq, start, ids[start : start + count], last and ends, all_logits=off)
        result = runner.step(StepWork(prefills=[work]))
        rows.extend(result.prompt_logits.values())
        start += count
    return torch.cat(rows).cpu().numpy() if rows else None


def tail(runner: ModelRunner, seq: ModelSequence) -> np.ndarray:
    """The first decoder pass: float32 [vocab] of the last row."""
    logits = runner.step(StepWork(tails=[TailWork(seq)])).logits
    assert logits is not None
    return logits[0].cpu().numpy()


def decode(runner: ModelRunner, seq: ModelSequence, token: int) -> np.ndarray:
    """One token through all layers: its float32 [vocab]."""
    assert runner.reserve(seq, seq.num_computed + 1)
    logits = runner.step(StepWork(decodes=[DecodeWork(seq, seq.num_computed, token)])).logits
    assert logits is not None
    return logits[0].cpu().numpy()


@dataclass
class Record:
    """What the layers computed, row after row of the steps run (one sequence, all rows through all layers)."""

    kinds: dict[str, dict[int, list[torch.Tensor]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def array(self, kind: str, layer: int) -> np.ndarray:
        """All rows of ``kind`` in a layer: float32, or int64 for indices."""
        rows = torch.cat(self.kinds[kind][layer])
        return (rows.float() if rows.is_floating_point() else rows).numpy()


def relative_error(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the difference over the norm, per row of the first axis."""
    flat = expected.reshape(len(expected), -1)
    return np.linalg.norm(actual.reshape(len(expected), -1) - flat, axis=1) / np.linalg.norm(flat, axis=1)


def all_blocks(visible: torch.Tensor, block: int, width: int) -> torch.Tensor:
    """The candidate blocks of rows that keep every visible block, ascending, then -1."""
    blocks = torch.arange(width)
    return torch.where(blocks <= (visible[:, None] - 1).div(block, rounding_mode="floor"), blocks, -1)


@contextmanager
def recorded(runner: ModelRunner) -> Iterator[Record]:
    """Record what the layers of ``runner`` compute inside the context."""
    record = Record()
    handles = []
    config = runner.config

    def keep(kind: str, layer: int, rows: torch.Tensor) -> None:
        record.kinds[kind][layer].append(rows.clone())

    def watch(layer: int, block: Block) -> None:
        def on_block(_: Any, __: Any, output: Residual) -> None:
            keep("streams", layer, output.settle().streams)
            keep("premix", layer, output.pre)

        def on_gate(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            ids, order = output[0].sort(-1)
            keep("experts", layer, ids)
            keep("expert_weights", layer, output[1].gather(1, order))

        def on_index(_: Any, inputs: tuple[Any, ...], selection: Selection) -> None:
            pad = (0, config.index_topk - selection.index.shape[1])
            keep("topk", layer, torch.nn.functional.pad(selection.index, pad, value=-1))
            if not block.spec.candidate_source:
                return
            plan = inputs[2].plan.entries[block.spec.ratio]
            everything = all_blocks(plan.visible, config.candidate_block_size, config.candidate_topk_blocks)
            keep("blocks", layer, everything if selection.blocks is None else selection.blocks)

        handles.append(block.register_forward_hook(on_block))
        for module in block.modules():
            if isinstance(module, Gate):
                handles.append(module.register_forward_hook(on_gate))
            if isinstance(module, Indexer):
                handles.append(module.register_forward_hook(on_index))

    for layer, block in enumerate(runner.model.layers):
        assert isinstance(block, Block)
        watch(layer, block)
    decode = runner.model.decode

    def keep_hidden(*args: Any) -> torch.Tensor:
        hidden = decode(*args)
        keep("final_hidden", 0, hidden)
        return hidden

    try:
        with patch.object(runner.model, "decode", keep_hidden):
            yield record
    finally:
        for handle in handles:
            handle.remove()
