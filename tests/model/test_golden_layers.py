# SPDX-License-Identifier: Apache-2.0
"""Layer by layer against the full golden sets: every layer is given the golden streams of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner
from cedar.model.block import Block
from cedar.model.mhc import Residual
from golden_support import golden_arrays, load_runner, open_sequence, prefill, recorded, relative_error, stored_rows

SETS = [("tiny-a", "fp32_noquant"), ("tiny-a", "fp32"), ("tiny-a", "bf16"), ("tiny-b", "fp32_noquant")]
LIMITS = {"fp32_noquant": (1e-5, 1.0, 1e-4), "fp32": (1e-5, 0.95, 1e-3), "bf16": (1e-2, 0.9, 3e-2)}
"""Median, and the share of positions that must be within the third number (golden README)."""


@contextmanager
def golden_inputs(runner: ModelRunner, golden: dict[str, np.ndarray], seen: dict[str, list[np.ndarray]]) -> Iterator[None]:
    """Replace every layer's output by the golden one, after noting what the layer computed."""
    handles = []

    def watch(layer: int, block: Block) -> None:
        def replace(_: Any, __: Any, output: Residual) -> Residual:
            streams, premix = (torch.from_numpy(golden[kind][layer]) for kind in ("streams", "premix"))
            return Residual(streams.to(output.streams.dtype), premix)

        def note(kind: str, rows: torch.Tensor) -> None:
            seen.setdefault(f"{kind}_{layer}", []).append(rows.float().numpy().copy())

        handles.append(block.register_forward_hook(replace))
        handles.append(block.attn.wq_a.register_forward_hook(lambda _, inputs, __: note("attn_in", inputs[0])))
        handles.append(block.attn.wo_b.register_forward_hook(lambda _, __, output: note("attn_out", output)))

    for layer, block in enumerate(runner.model.layers):
        assert isinstance(block, Block)
        watch(layer, block)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(("name", "variant"), SETS)
def test_a_layer_differs_from_the_reference(name: str, variant: str) -> None:
    golden = golden_arrays(name, f"full_{variant}.npz")
    runner = load_runner(name, variant)
    config = runner.config
    ids = golden["input_ids"].tolist()
    median, share, limit = LIMITS[variant]

    def check(what: str, actual: np.ndarray, expected: np.ndarray) -> None:
        error = relative_error(actual, expected)
        assert np.median(error) <= median, f"{what}: median {np.median(error)}"
        assert np.mean(error <= limit) >= share, f"{what}: {np.mean(error <= limit)} of the positions within {limit}"

    seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
    seen: dict[str, list[np.ndarray]] = {}
    try:
        with recorded(runner) as record, golden_inputs(runner, golden, seen):
            logits = prefill(runner, seq, ids)
        entries = {source: stored_rows(runner, seq, source, len(ids)) for source in config.kv_source_layer_ids}
        stored = {
            source: [pool.record.decode(pool.load(rows)) for pool in (runner.cache.kv(source), runner.cache.index_keys(source))]
            for source, rows in entries.items()
        }
    finally:
        runner.close(seq)

    for layer in range(config.num_hidden_layers):
        check(f"streams {layer}", record.array("streams", layer), golden["streams"][layer])
        check(f"premix {layer}", record.array("premix", layer), golden["premix"][layer])
        check(f"attn_in {layer}", seen[f"attn_in_{layer}"][-1], golden["attn_in"][layer])
        check(f"attn_out {layer}", seen[f"attn_out_{layer}"][-1], golden["attn_out"][layer])
    for source, (kv, keys) in stored.items():
        check(f"compressed KV {source}", kv.numpy(), golden[f"compressed_kv_L{source}"])
        check(f"index keys {source}", keys.numpy(), golden[f"index_keys_L{source}"])
    assert logits is not None
    check("final hidden", record.array("final_hidden", 0), golden["final_hidden"])
    check("logits", logits, golden["logits"])
    if variant != "bf16":
        check_selections(config, record, golden)


def check_selections(config: Any, record: Any, golden: dict[str, np.ndarray]) -> None:
    for layer in config.index_source_layer_ids:
        expected = golden[f"topk_indices_L{layer}"]
        np.testing.assert_array_equal(record.array("topk", layer)[:, : expected.shape[1]], expected, err_msg=f"layer {layer}")
    source = config.candidate_source_layer_id
    blocks = record.array("blocks", source)
    count = len(blocks) // config.compress_ratios[source]
    mask = np.unpackbits(golden[f"candidate_mask_L{source}"], axis=-1)[:, :count].astype(bool)
    block_of = np.arange(count) // config.candidate_block_size
    candidates = (block_of[None, None] == blocks[:, :, None]).any(1)
    visible = np.arange(count) <= np.arange(len(blocks))[:, None]
    np.testing.assert_array_equal(candidates & visible, mask & visible)
