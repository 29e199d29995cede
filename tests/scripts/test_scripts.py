# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh and scripts/setup.sh: what they report when something goes wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAST, SLOW = "not slow and not gpu", "slow and not gpu"


def _phases(tmp_path: Path, codes: dict[str, int], *arguments: str) -> tuple[int, list[str]]:
    """test.sh with a stand-in for Python that logs its arguments and ends with the status of the phase."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    cases = "".join(f'*"-m {phase}"*) exit {code};; ' for phase, code in codes.items())
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{tmp_path}/log\ncase "$*" in {cases}esac\nexit 77\n')
    python.chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "test.sh"), *arguments], env=environment, timeout=30, capture_output=True
    )
    return done.returncode, (tmp_path / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("fast", "slow", "status", "phases"),
    [
        (0, 0, 0, 2),
        (1, 0, 1, 1),  # a failure of the fast phase is final
        (0, 1, 1, 2),
        (0, 5, 0, 2),  # a selection without slow tests
        (5, 0, 0, 2),
        (5, 5, 5, 2),  # no test at all is not a success
        (0, 2, 2, 2),
        (3, 0, 3, 1),
    ],
)
def test_status_of_pytest_lost(tmp_path: Path, fast: int, slow: int, status: int, phases: int) -> None:
    code, log = _phases(tmp_path, {FAST: fast, SLOW: slow}, "tests/cache")
    assert code == status
    assert len(log) == phases
    assert all(line.startswith("-m pytest") and line.endswith("tests/cache") for line in log)


def test_own_marker_run_twice(tmp_path: Path) -> None:
    code, log = _phases(tmp_path, {"gpu": 0}, "-m", "gpu")
    assert code == 0
    assert log == ["-m pytest -m gpu"]


def test_setup_with_an_unfit_python_goes_on(tmp_path: Path) -> None:
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "PYTHON": "/bin/false"}
    command = ["bash", str(ROOT / "scripts" / "setup.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "PYTHON=/bin/false is not a Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()
