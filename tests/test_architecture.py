# SPDX-License-Identifier: Apache-2.0
"""The rooms and their arrows (backend/README.md): imports go one way, and the Triton stubs stay without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "backend" / "cedar"
OPEN_TO_ALL = {"errors", "config", "v1"}
MAY_IMPORT = {
    "config": set(),
    "text": set(),
    "cache": set(),
    "ops": {"cache"},
    "model": {"cache", "ops"},
    "engine": {"cache", "ops", "model", "text"},
    "service": {"engine", "model", "text"},
    "triton": {"engine.request", "engine.admission", "service", "text", "model.embedded"},
}
TORCH_FREE = [f"cedar.triton.{step}" for step in ("tokenize", "encoder_prefill", "decoder_generate", "deliver", "supervisor")]


def imported(file: Path) -> set[str]:
    """Modules of the package that a file imports, without the leading ``cedar.``."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cedar."):
            names.add(node.module.removeprefix("cedar."))
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("cedar.") for alias in node.names if alias.name.startswith("cedar.")}
    return names


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_upward(room: str) -> None:
    allowed = MAY_IMPORT[room] | OPEN_TO_ALL | {room}
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in sorted((PACKAGE / room).rglob("*.py"))
        for name in sorted(imported(file))
        if not any(name == good or name.startswith(good + ".") for good in allowed)
    ]
    assert wrong == []


def test_a_step_of_the_ensemble_imports_torch() -> None:
    # only Triton's stub has its utilities; an empty module lets the imports run here
    code = (
        "import sys, types; sys.modules['torch'] = None; "
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('triton_python_backend_utils'); "
        f"import {', '.join(TORCH_FREE)}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_outgrows_what_is_read_at_once() -> None:
    long = [
        str(file) for file in sorted(PACKAGE.rglob("*.py")) if "v1" not in file.parts and len(file.read_text().splitlines()) > 400
    ]
    assert long == []
