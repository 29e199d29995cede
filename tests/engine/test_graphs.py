# SPDX-License-Identifier: Apache-2.0
"""`cedar.engine.graphs`: a recorded pass repeats everything that a step computes, or is not recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cedar.config.engine import EngineConfig
from cedar.engine import graphs
from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.work import DecodeWork, StepWork
from cedar.ops import native
from cedar.ops.engram import engram_gate
from cedar.ops.provider import choose
from golden_support import decode, open_sequence, prefill, tail

SETTINGS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "act_quant": True},
    {"dtype": "float32", "fake_quant": False},
    {"dtype": "float32", "global_kv": "fp8"},
]
# what makes tensors, looks at them in another shape, or fills in a constant
HARMLESS = {"empty", "empty_like", "new_empty", "zeros", "view", "flatten", "slice", "select", "lift_fresh", "fill_"}


@pytest.fixture(autouse=True)
def library() -> None:
    try:
        native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


def runner_of(model: Path, **settings: Any) -> ModelRunner:
    return ModelRunner.load(EngineConfig(model=str(model), device="cpu", cpu_threads=1, kv_cache_bytes=64 << 20, **settings))


def decoded(runner: ModelRunner, new: int) -> np.ndarray:
    """Logits of ``new`` decodes after a short prompt."""
    ids = np.random.default_rng(6).integers(5, runner.vocab_size, 20 + new).tolist()
    seq = open_sequence(runner, DecoderReplay.OFF, len(ids))
    try:
        prefill(runner, seq, ids[:20])
        tail(runner, seq)
        return np.stack([decode(runner, seq, token) for token in ids[20:]])
    finally:
        runner.close(seq)


class Seen(TorchDispatchMode):
    """Names of PyTorch's own operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__.split(".")[0]
        converts_nothing = name == "to" and result.data_ptr() == args[0].data_ptr()
        if func.namespace != "cedar" and not converts_nothing:
            self.names.add(name)
        return result


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_pass_computes_with_what_is_not_recorded(tiny: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch computes in a pass would stay as it was in all repetitions."""
    seen, record = Seen(), native.recording

    @contextmanager
    def watched() -> Iterator[native.Recording]:
        with record() as recorded, seen:
            yield recorded

    monkeypatch.setattr(graphs, "recording", watched)
    runner = runner_of(tiny, ops="native", **settings)
    # the angles are made on the way, and kept up to date by `Rotations.refresh`
    runner.model.rotations = lambda plan, make=runner.model.rotations: _made(make(plan), plan)  # type: ignore[method-assign]
    decoded(runner, 2)
    assert seen.names <= HARMLESS


def _made(rotations: Any, plan: Any) -> Any:
    for compressed in (False, True):
        rotations.rows(compressed)
    for ratio, entries in plan.entries.items():
        rotations.groups(ratio, entries.write.positions)
    return rotations


def test_a_refused_operation_keeps_its_first_result(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that the library refuses runs as its reference, which no recording repeats."""

    def refuse(*_: Any) -> torch.Tensor:
        raise native.NativeUnsupported("engram_gate: not today")

    monkeypatch.setitem(engram_gate.bodies, "native", refuse)
    whole = runner_of(tiny, ops="auto")
    alone = runner_of(tiny, ops="auto")
    alone._ops = choose("auto", torch.device("cpu"), {"CEDAR_OP_ENGRAM_GATE": "reference"})
    alone._graphs = None
    assert np.array_equal(decoded(whole, 6), decoded(alone, 6))


def test_recordings_of_every_batch_size_are_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their activations are in no budget: they are dropped by their bytes, and the results stay the same."""
    runner = runner_of(tiny, ops="native")
    expected = decoded(runner, 4)
    assert runner._graphs is not None
    (graph,) = runner._graphs._graphs.values()
    monkeypatch.setattr(graphs, "MOST_BYTES", graph.num_bytes * 3 // 2)
    seqs = [open_sequence(runner, DecoderReplay.OFF, 30) for _ in range(3)]
    for seq in seqs:
        prefill(runner, seq, [7] * 20)
        tail(runner, seq)
    for rows in (1, 2, 3):
        runner.step(StepWork(decodes=[DecodeWork(seq, seq.num_computed, 9) for seq in seqs[:rows]]))
        assert list(runner._graphs._graphs)[-1][0] == rows
    assert len(runner._graphs._graphs) == 1
    for seq in seqs:
        runner.close(seq)
    assert np.array_equal(decoded(runner, 4), expected)
