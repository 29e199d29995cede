# SPDX-License-Identifier: Apache-2.0
"""How many rows are run through how many layers, counted where layers are launched: what bounded replay saves is really saved.

On the release's schedule of 40 layers (cut = 20, W = 128) at tiny width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from fake_runner import FakeClock
from prefix_support import ask, text

from cedar.config.engine import EngineConfig
from cedar.config.presets import preset
from cedar.engine.admission import ModelFacts
from cedar.engine.engine import Engine
from cedar.engine.request import DecoderReplay, FinishReason
from cedar.engine.runner import ModelRunner
from cedar.engine.updates import SequenceUpdate
from cedar.engine.work import PrefillWork, SequenceMemory, StepWork
from cedar.model.make import make_checkpoint
from golden_support import decode, open_sequence, tail

LAYERS, CUT, W, HALO = 40, 20, 128, 128 + 18 * 127
BUDGET = 512


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model = tmp_path_factory.mktemp("tiny40") / "model"
    make_checkpoint(preset("tiny40"), model)
    return load(model)


def load(model: Path) -> ModelRunner:
    return ModelRunner.load(
        EngineConfig(
            model=str(model),
            device="cpu",
            dtype="float32",
            fake_quant=False,
            cpu_threads=1,
            kv_cache_bytes=1 << 28,
            max_num_seqs=4,
        )
    )


@dataclass
class Work:
    """Rows of one request until its first token: per layer, and through the cut layer's KV projection alone."""

    layers: np.ndarray
    source_rows: int
    end: SequenceUpdate

    @property
    def share(self) -> float:
        """Of all tokens through all layers, per cent."""
        return 100 * self.layers.sum() / (LAYERS * self.end.num_input_tokens)


def work_of(runner: ModelRunner, ids: list[int], **options: object) -> Work:
    """Run one request to its first token through an engine."""
    config = EngineConfig(max_num_batched_tokens=BUDGET, max_num_seqs=4)
    facts = replace(ModelFacts.of(runner.config, runner.vocab_size), image_token_id=None)
    engine = Engine(runner, config, facts, clock=FakeClock().clock())
    layers, source_rows = np.array(runner.model.work.layers), runner.model.work.source_rows
    handle = engine.add(ask("r", ids, max_tokens=1, **options))
    engine.attach(handle)
    ends = []
    while engine.num_live or engine.has_work():
        ends += [update for update in engine.step() if update.finish_reason is not None]
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH]
    done = runner.model.work
    return Work(np.array(done.layers) - layers, done.source_rows - source_rows, ends[0])


def expected_share(length: int, kept: int) -> float:
    return 100 * (CUT + (LAYERS - CUT) * min(kept, length) / length) / LAYERS


@pytest.mark.parametrize("length", [1, 128, 129, 700, *(pytest.param(length, marks=pytest.mark.slow) for length in (2048, 8192))])
def test_a_cold_prompt_runs_other_rows_than_needed(runner: ModelRunner, length: int) -> None:
    runner.clear_cache()
    work = work_of(runner, text(1, length))
    assert work.source_rows == length
    assert set(work.layers[:CUT]) == {length}
    assert set(work.layers[CUT:]) == {min(W, length)}
    assert work.share == pytest.approx(expected_share(length, W), abs=0.5)
    if length == 8192:
        assert round(work.share, 1) == 50.8


@pytest.mark.parametrize(("decoder", "kept"), [("exact", HALO), ("off", 700)])
def test_another_mode_runs_other_rows_than_needed(runner: ModelRunner, decoder: str, kept: int) -> None:
    runner.clear_cache()
    work = work_of(runner, text(1, 700), decoder_replay=decoder)
    assert work.share == 100
    assert set(work.layers) == {min(kept, 700)}
    assert work.source_rows == 700


@pytest.mark.parametrize(("first", "new"), [(1024, 1), (1030, 500), pytest.param(2048, 200, marks=pytest.mark.slow)])
def test_a_hit_runs_more_rows_than_the_window_and_the_new_tokens(runner: ModelRunner, first: int, new: int) -> None:
    runner.clear_cache()
    work_of(runner, text(1, first))
    work = work_of(runner, text(1, first) + text(2, new))
    hit = first // runner.page_tokens * runner.page_tokens
    assert (work.end.cached_tokens, work.end.replayed_tokens) == (hit, W)
    assert set(work.layers[:CUT]) == {W + first + new - hit}
    assert set(work.layers[CUT:]) == {W}
    assert work.source_rows == W + first + new - hit


def test_a_snapshot_is_followed_by_rows_that_are_not_new(runner: ModelRunner) -> None:
    """Encoder replay off: the hit costs nothing."""
    runner.clear_cache()
    modes = {"encoder_replay": "off", "decoder_replay": "bounded"}
    work_of(runner, text(1, 1030), **modes)
    work = work_of(runner, text(1, 1030) + text(2, 150), **modes)
    assert (work.end.cached_tokens, work.end.replayed_tokens) == (1024, 0)
    assert set(work.layers[:CUT]) == {156}
    assert set(work.layers[CUT:]) == {W}


@pytest.mark.slow
@pytest.mark.parametrize("length", [2415, 4096, 8192])
def test_exact_differs_from_off_on_the_releases_schedule(runner: ModelRunner, length: int) -> None:
    """19 layers follow the cut layer, so the halo is 128 + 18 * 127 = 2,414 rows."""
    ids, new_ids = text(1, length), text(2, 3)
    outcome = []
    for mode in (DecoderReplay.OFF, DecoderReplay.EXACT):
        seq = open_sequence(runner, mode, length + len(new_ids))
        prefill_in_chunks(runner, seq, ids)
        outcome.append(np.stack([tail(runner, seq), *[decode(runner, seq, token) for token in new_ids]]))
        runner.close(seq)
    np.testing.assert_allclose(outcome[1], outcome[0], atol=1e-3)


def prefill_in_chunks(runner: ModelRunner, seq: SequenceMemory, ids: list[int]) -> None:
    """Without the logits of every row, which 8,192 rows would be much of."""
    for start in range(0, len(ids), BUDGET):
        chunk = ids[start : start + BUDGET]
        runner.step(StepWork(prefills=[PrefillWork(seq, start, chunk, start + len(chunk) == len(ids))]))
