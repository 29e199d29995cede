# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_triton import FakeTriton, two_words

from cedar.cli import chat
from cedar.text.messages import EFFORTS

README = Path(__file__).parents[2] / "client" / "README.md"


def test_examples_of_the_readme_run_as_written(server: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    server.scripts |= dict.fromkeys(("import json", "What is 345 + 278?"), two_words)
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block.replace("localhost:8001", server.url), str(README), "exec"), namespace)
    namespace["client"].close()
    assert len(blocks) == 6
    assert "Hello worldstop 7 4" in capsys.readouterr().out
    assert namespace["texts"] == ["Hello world"] * 8
    generations = [call.parameters for call in server.calls if "cancel" not in {tensor.name for tensor in call.request.inputs}]
    assert len(generations) > 20
    assert all("max_tokens" in settings for settings in generations)


def test_reasoning_efforts_of_readme_and_help_are_those_the_server_takes() -> None:
    assert f"1 to 100, or {', '.join(EFFORTS)}" == chat.EFFORTS
    assert f"`reasoning_effort` ({chat.EFFORTS})" in README.read_text()
