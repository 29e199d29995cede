# SPDX-License-Identifier: Apache-2.0
"""The README must not drift from the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "backend/README.md"])
def test_a_table_differs_from_the_code(name: str) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "readme_tables.py"))
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert script["rendered"](text) == text


def test_a_link_or_path_of_the_readme_leads_nowhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_python_example_of_the_readme_does_not_compile() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(examples) == 4
    for number, example in enumerate(examples):
        compile(example, f"README example {number}", "exec")
