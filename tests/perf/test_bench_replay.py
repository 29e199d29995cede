# SPDX-License-Identifier: Apache-2.0
"""`cedar bench --replay`: every figure is of the work that it names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cedar.bench import replay
from cedar.cli import app
from cedar.errors import CedarError
from perf import tables

TOKENS = 512
LAYERS, CUT, W = 12, 6, 8
"""Of preset ``tiny``."""


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("CEDAR_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CEDAR_CPU_THREADS", "1")
    monkeypatch.setenv("CEDAR_KV_CACHE_BYTES", str(1 << 26))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> dict[str, Any]:
    """What the command writes about that model."""
    output = tmp_path_factory.mktemp("bench") / "replay.json"
    options = ["--model", str(tiny), "--prompt-tokens", str(TOKENS), "--runs", "2", "--output", str(output)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CEDAR_CPU_THREADS", "1")
        done = CliRunner().invoke(app, ["bench", "--replay", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "of cold, off" in done.output
    return json.loads(output.read_text())


def test_a_case_ran_other_rows_than_its_mode_says(result: dict[str, Any]) -> None:
    shared = TOKENS - replay.NEW_TOKENS
    hit, snapshot = shared // 64 * 64, shared // 256 * 256
    new, after = TOKENS - hit, TOKENS - snapshot
    rows = {(case["replay"], case["prefix"]): (case["rows_x_layers"], case["source_rows"]) for case in result["cases"]}
    decoder = LAYERS - CUT
    assert rows == {
        ("both sides", "cold"): (TOKENS * CUT + W * decoder, TOKENS),
        ("both sides", "hit"): ((W + new) * CUT + W * decoder, W + new),
        ("decoder side", "cold"): (TOKENS * CUT + W * decoder, TOKENS),
        ("decoder side", "hit"): (after * CUT + W * decoder, after),
        ("encoder side", "cold"): (TOKENS * LAYERS, TOKENS),
        ("encoder side", "hit"): ((W + new) * LAYERS, W + new),
        ("off", "cold"): (TOKENS * LAYERS, TOKENS),
        ("off", "hit"): (after * LAYERS, after),
    }
    found = {(case["replay"], case["prefix"]): (case["cached_tokens"], case["replayed_tokens"]) for case in result["cases"]}
    for (mode, prefix), counts in found.items():
        expected = (hit, W) if mode in ("both sides", "encoder side") else (snapshot, 0)
        assert counts == ((0, 0) if prefix == "cold" else expected)


def test_a_cold_prompt_with_replay_costs_more_than_half(result: dict[str, Any]) -> None:
    cold = {case["replay"]: case for case in result["cases"] if case["prefix"] == "cold"}
    assert cold["both sides"]["full_work_percent"] == pytest.approx(100 * (CUT + (LAYERS - CUT) * W / TOKENS) / LAYERS, abs=0.01)
    assert cold["off"]["full_work_percent"] == 100


def test_the_result_does_not_say_what_was_measured(result: dict[str, Any], tiny: Path) -> None:
    settings = result["settings"]
    assert settings["model"] == str(tiny)
    assert (settings["prompt_tokens"], settings["shared_tokens"], settings["runs"]) == (TOKENS, TOKENS - 100, 2)
    assert (settings["layers"], settings["cut"], settings["sliding_window"]) == (LAYERS, CUT, W)
    assert result["machine"]["cores"] >= 1
    assert all(case["ttft_ms"]["count"] == 2 and case["ttft_ms"]["min"] > 0 for case in result["cases"])


def test_a_miss_is_measured_as_a_hit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEDAR_PREFIX_CACHE", "false")
    with pytest.raises(CedarError, match="both sides, hit: 0 tokens came from the prefix cache"):
        replay.measure(str(tiny), TOKENS, 1)


def test_a_request_that_failed_is_a_figure(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cedar.engine.runner import ModelRunner

    def fails(*_: object) -> None:
        raise RuntimeError("broken device")

    monkeypatch.setattr(ModelRunner, "step", fails)
    with pytest.raises(CedarError, match="broken device"):
        replay.measure(str(tiny), TOKENS, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replay", "--url", "localhost:1"], "--url: is given together with --replay"),
        (["--replay", "--concurrency", "1"], "--concurrency: is given together with --replay"),
        (["--replay", "--max-tokens", "4"], "--max-tokens: is given together with --replay"),
        (["--prompt-tokens", "4096"], "--prompt-tokens: is given without --replay"),
        (["--replay", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_a_bad_option_is_not_named(options: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["bench", *options]).exception
    assert isinstance(error, CedarError)
    assert message in error.message


@pytest.mark.parametrize("prompt_tokens", [511, 16384])
def test_a_prompt_that_shows_nothing_or_does_not_fit_is_measured(tiny: Path, prompt_tokens: int) -> None:
    with pytest.raises(CedarError, match=rf"--prompt-tokens: is {prompt_tokens}; allowed: 512 to 16383"):
        replay.measure(str(tiny), prompt_tokens, 1)


def test_the_plot_cannot_be_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables.plot(result, tmp_path / "replay.png")
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
