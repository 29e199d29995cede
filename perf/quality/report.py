# SPDX-License-Identifier: Apache-2.0
"""The model's card and perf/README.md, as far as they say what was measured: ``python -m perf.quality.report`` writes it from
``results/quality_1024.json``, ``--check`` compares.

What is written stands between ``<!-- quality: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from cedar.model.embedded import embedded_model_dir

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "quality_1024.json"
FILES = (embedded_model_dir() / "README.md", HERE.parent / "README.md")
_BLOCK = re.compile(r"(<!-- quality: (\w+) -->\n).*?(<!-- end -->)", re.S)
Result = dict[str, Any]


def _table(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]) + "\n"


def answers(result: Result) -> str:
    """What is right with nothing bounded, by task."""
    alone = {row["task"]: f"{row['exact_match']:.1%}" for row in result["alone"]}
    rows = [
        [row["task"].replace("_", " "), alone.get(row["task"], ""), f"{row['exact_match']:.1%}", f"{row['standard_error']:.1%}"]
        for row in result["cells"][0]["tasks"]
    ]
    return _table(["task", "alone", "behind other text", "standard error"], rows)


def cells(result: Result) -> str:
    """Every other way of serving against off."""
    rows = []
    for cell in result["cells"][1:]:
        tasks = cell["tasks"]
        worst = min(tasks, key=lambda row: float(row["low"]))
        rows.append(
            [
                cell["name"],
                f"{cell['hit']:.0%}" if cell["hit"] else "",
                f"{cell['cached_tokens'] / cell['prompt_tokens']:.1%}" if cell["hit"] else "",
                f"{cell['chunk']:,}",
                f"{cell['moved']:.1%}",
                f"{sum(row['lost'] for row in tasks)} / {sum(row['won'] for row in tasks)}",
                f"{100 * worst['low']:+.2f} ({worst['task'].replace('_', ' ')})",
            ]
        )
    headings = [
        "",
        "hit asked for",
        "prompt tokens found",
        "tokens of a step",
        "first logits moved, of items",
        "answers lost / won",
    ]
    return _table([*headings, "the least a task's interval reaches, points"], rows)


def failures(result: Result) -> str:
    """How many comparisons failed, and which."""
    measured, failed = result["measured"], [row for cell in result["cells"][1:] for row in cell["tasks"] if not row["passes"]]
    said = f"{measured['items']:,} items a task; of {measured['comparisons']} comparisons {len(failed) or 'none'} failed."
    return "\n".join([said, *(f"* {failure}" for failure in result["failures"])]) + "\n"


def windows(result: Result) -> str:
    """Perplexity of held-out text by distance from the replay start, and the streams' error in the last layer of a side."""
    rows = []
    for side, found in result["windows"].items():
        layer, errors = list(found["relative_error"].items())[-1]
        for bucket, error in zip(found["perplexity"], errors, strict=False):
            values = [f"{bucket['tokens']:,}", *(f"{bucket[f'perplexity_{run}']:,.0f}" for run in ("full", "bounded"))]
            rows.append([f"{side}, from {bucket['from']}", *values, f"{bucket['loss_increase']:+.3f}", f"{error:.1%} ({layer})"])
    headings = ["side, tokens from the replay start", "tokens", "perplexity, full", "bounded", "loss, nats a token"]
    return _table([*headings, "error of the streams (layer)"], rows)


WRITTEN = {"answers": answers, "cells": cells, "failures": failures, "windows": windows}


def rendered(text: str, result: Result) -> str:
    """``text`` with every such block made anew; an unknown name raises KeyError."""
    return _BLOCK.sub(lambda match: match[1] + WRITTEN[match[2]](result) + match[3], text)


def main() -> int:
    """Exit status 1 if ``--check`` finds a difference."""
    result, status = json.loads(RESULT.read_text(encoding="utf-8")), 0
    for file in FILES:
        old = file.read_text(encoding="utf-8")
        new = rendered(old, result)
        if "--check" in sys.argv[1:]:
            status |= new != old
        else:
            file.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
