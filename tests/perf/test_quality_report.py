# SPDX-License-Identifier: Apache-2.0
"""What the card and perf/README.md say of the measurement is what was measured."""

from __future__ import annotations

import json

import pytest
from perf.quality.report import FILES, RESULT, rendered


def test_a_text_says_something_else_than_the_result() -> None:
    """`python -m perf.quality.report` writes them."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert "<!-- quality: failures -->" in text
        assert rendered(text, result) == text, file


def test_a_failure_is_not_told() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    for each in (row for cell in result["cells"] for row in cell["tasks"]):
        each["passes"] = True
    row = result["cells"][1]["tasks"][0]
    row["passes"], row["low"], row["lost"] = False, -0.034, row["lost"] + 20
    result["failures"] = ["both, copy: -2.00% (-3.40% to -1.00%)"]
    text = rendered("<!-- quality: failures -->\n<!-- end -->\n<!-- quality: cells -->\nold\n<!-- end -->", result)
    assert "1 failed.\n* both, copy: -2.00% (-3.40% to -1.00%)\n" in text
    assert "-3.40 (copy)" in text
    assert "| both | 75% | 7" in text
    assert "old" not in text


def test_an_unknown_block_is_left_as_it_is() -> None:
    with pytest.raises(KeyError):
        rendered("<!-- quality: everything -->\n<!-- end -->", {})
