# SPDX-License-Identifier: Apache-2.0
"""`cedar score`: the file it writes, which positions are NaN, and what it says about bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from cedar.cli.score import command
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.engine.score import score
from cedar.errors import CedarError
from golden_support import GOLDEN, case_arrays, load_runner

CASE = "S200_H150"
W = 16
"""tiny-a's window."""


def run(tmp_path: Path, ids: object, *options: str) -> np.ndarray:
    """The command's logits. Raises what it raises."""
    app = typer.Typer()
    app.command()(command)
    source, target = tmp_path / "ids.json", tmp_path / "out.npz"
    source.write_text(ids if isinstance(ids, str) else json.dumps(ids))
    checkpoint = str(GOLDEN / "tiny-a" / "checkpoint")
    arguments = ["--model", checkpoint, "--input-ids", str(source), "--output", str(target), *options]
    CliRunner(env={"CEDAR_KV_CACHE_BYTES": str(16 << 20)}).invoke(app, arguments, catch_exceptions=False)
    with np.load(target) as data:
        assert list(data) == ["logits"]
        return data["logits"]


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["--decoder-replay", "off"], "exact"),
        (["--decoder-replay", "off", "--prefix-hit", "150", "--chunk-size", "33"], "enc"),
        (["--decoder-replay", "bounded", "--chunk-size", "64"], "dec_after_source"),
        (["--prefix-hit", "150"], "enc_dec_after_source"),
    ],
)
def test_the_file_differs_from_the_reference(tmp_path: Path, options: list[str], form: str) -> None:
    golden = case_arrays("tiny-a", "replay_fp32_noquant.npz", CASE)
    ids = golden["input_ids"].tolist()
    logits = run(tmp_path, ids, "--dtype", "float32", "--fake-quant", "off", *options)
    assert logits.dtype == np.float32
    assert logits.shape == (200, 512)
    positions = golden.get(f"{form}/positions", np.arange(200))
    computed = np.isfinite(logits).all(1)
    np.testing.assert_array_equal(np.flatnonzero(computed), positions)
    assert np.isnan(logits[~computed]).all()
    np.testing.assert_array_equal(logits[positions].argmax(-1), golden[f"{form}/argmax"])
    np.testing.assert_allclose(logits[-2:], golden[f"{form}/logits_last2"], atol=2e-3)


def computed(**options: object) -> tuple[np.ndarray, np.ndarray]:
    """Logits of 100 tokens by the function behind the command, and the positions it computed."""
    ids = case_arrays("tiny-a", "replay_fp32_noquant.npz", CASE)["input_ids"].tolist()[:100]
    logits = score(load_runner("tiny-a", "fp32_noquant"), ids, **{"chunk_size": 40, **options})  # type: ignore[arg-type]
    return logits, np.flatnonzero(np.isfinite(logits).all(1))


def test_exact_rows_that_are_not_exact_are_written() -> None:
    """Of the halo only the last row is computed from complete windows; a prompt within the halo is complete."""
    full, _ = computed(decoder_replay=DecoderReplay.OFF)
    logits, positions = computed(decoder_replay=DecoderReplay.EXACT)
    assert positions.tolist() == [99]
    np.testing.assert_allclose(logits[99], full[99], atol=2e-5)
    ids = case_arrays("tiny-a", "replay_fp32_noquant.npz", CASE)["input_ids"].tolist()[:46]
    short = score(load_runner("tiny-a", "fp32_noquant"), ids, chunk_size=40, decoder_replay=DecoderReplay.EXACT)
    np.testing.assert_allclose(short, full[:46], atol=2e-5)


@pytest.mark.parametrize("hit", [1, W])
def test_a_hit_within_the_window_loses_positions(hit: int) -> None:
    _, positions = computed(decoder_replay=DecoderReplay.OFF, prefix_hit=hit)
    assert positions.tolist() == list(range(100))


@pytest.mark.parametrize("hit", [W + 1, 50, 51, 99])
def test_a_hit_replays_from_another_position(hit: int) -> None:
    _, positions = computed(decoder_replay=DecoderReplay.OFF, prefix_hit=hit)
    assert positions.tolist() == list(range(hit - W, 100))
    full, _ = computed(decoder_replay=DecoderReplay.OFF)
    restored, positions = computed(decoder_replay=DecoderReplay.OFF, prefix_hit=hit, encoder_replay=EncoderReplay.OFF)
    assert positions.tolist() == list(range(hit, 100))
    np.testing.assert_allclose(restored[hit:], full[hit:], atol=2e-5)


def test_rows_are_not_counted() -> None:
    rows: list[int] = []
    computed(prefix_hit=60, on_rows=rows.append)
    assert rows == [40, 20, 40, 16]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ("[1, 2", [], "--input-ids: .* cannot be read"),
        ({"ids": [1]}, [], "--input-ids: .* holds something else; allowed: a JSON list of token ids"),
        ([1, 2.5], [], "holds something else"),
        ([True, 1], [], "holds something else"),
        ([], [], "--input-ids: is empty"),
        ([1, 512], [], "--input-ids: holds 512; allowed: token ids 0 to 511"),
        ([-1], [], "--input-ids: holds -1"),
        ([1] * 4097, [], "--input-ids: has 4097 tokens; allowed: at most 4096"),
        ([1, 2, 3], ["--chunk-size", "0"], "--chunk-size: is 0; allowed: at least 1"),
        ([1, 2, 3], ["--prefix-hit", "3"], "--prefix-hit: is 3; allowed: 0 to 2"),
        ([1, 2, 3], ["--prefix-hit", "-1"], "--prefix-hit: is -1"),
        ([1, 2, 3], ["--output", "/nowhere/out.npz"], "--output: /nowhere/out.npz cannot be written"),
    ],
)
def test_bad_input_is_not_named(tmp_path: Path, ids: object, options: list[str], message: str) -> None:
    with pytest.raises(CedarError, match=message):
        run(tmp_path, ids, *options)


def test_a_prompt_beyond_the_cache_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_runner("tiny-a", "fp32_noquant")
    monkeypatch.setattr(runner.cache._pages, "_free", runner.cache._pages._free[:3])
    with pytest.raises(CedarError, match="100 tokens with decoder replay off do not fit the cache"):
        computed(decoder_replay=DecoderReplay.OFF)
    assert runner.usage().sequences == 0
