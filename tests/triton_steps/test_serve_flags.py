# SPDX-License-Identifier: Apache-2.0
"""The command line of `cedar serve` against the settings."""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from cedar.cli import serve
from cedar.config.engine import EngineConfig
from cedar.triton import supervisor
from cedar.v1 import engine_pb2 as pb

OPERATIONS = "PyTorch reference: /lib[1]/libcedar_kernels.so is not there"
STATUS = pb.StatusResponse(model="/m", max_model_len=4096, kv_bytes_total=1 << 30, pid=7, version="0.1.0", operations=OPERATIONS)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configurations that a supervisor was made with."""
    made: list[EngineConfig] = []

    class Supervisor:
        def __init__(self, config: EngineConfig, on_progress: Any, on_ready: Any) -> None:
            made.append(config)
            on_progress(0.0)
            on_progress(0.55)
            on_ready(config, STATUS)

        def run(self) -> int:
            return 5

    monkeypatch.setattr(supervisor, "Supervisor", Supervisor)
    return made


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(serve.command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_a_setting_has_no_flag() -> None:
    text = run("--help").output
    for setting in fields(EngineConfig):
        assert f"--{setting.name.replace('_', '-')}" in text
        if isinstance(setting.default, bool):
            assert f"--no-{setting.name.replace('_', '-')}" in text


def test_flags_do_not_arrive(served: list[EngineConfig]) -> None:
    result = run("--no-fake-quant", "--act-quant", "--max-num-seqs", "3", "--kv-cache-share", "0.5", "--encoder-replay", "off")
    assert result.exit_code == 5
    found = served[0]
    assert (found.fake_quant, found.act_quant, found.max_num_seqs, found.kv_cache_share) == (False, True, 3, 0.5)
    assert (found.encoder_replay_mode, found.decoder_replay_mode) == ("off", "bounded")


def test_the_ready_line_is_not_alone(served: list[EngineConfig]) -> None:
    lines = run("--grpc-port", "7777").output.splitlines()
    assert lines[-1] == "Cedar is ready"
    assert any("127.0.0.1:7777" in line for line in lines)
    assert [line for line in lines if line.startswith("loading")] == ["loading the model: 0%", "loading the model: 55%"]


def test_a_missing_library_is_not_told(served: list[EngineConfig]) -> None:
    lines = [line.split() for line in run().output.splitlines()]
    assert ["operations", *OPERATIONS.split()] in lines


def test_the_bar_stays_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = serve.Report(Console(file=io.StringIO(), force_terminal=True, highlight=False))
    report.loading(0.5)
    report.ready(EngineConfig(), STATUS)
    assert capsys.readouterr().out == "Cedar is ready\n"


def test_a_wrong_value_starts_something(served: list[EngineConfig]) -> None:
    assert run("--max-num-seqs", "0").exit_code != 0
    assert run("--device", "tpu").exit_code != 0
    assert run("--max-num-seqs", "many").exit_code == 2
    assert served == []
