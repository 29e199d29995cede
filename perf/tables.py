# SPDX-License-Identifier: Apache-2.0
"""The tables of perf/README.md, made from the committed results: ``python perf/tables.py`` writes them, ``--check`` compares.

A table stands between ``<!-- table: FILE -->`` and ``<!-- end -->``, FILE being a name in perf/results.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PERF = Path(__file__).resolve().parent
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)
_HEADINGS = (
    "concurrency",
    "requests",
    "TTFT ms, p50 / p90 / p99",
    "inter-token ms, p50 / p90 / p99",
    "request ms, p50 / p90 / p99",
    "tokens/s",
    "tokens in / out",
)


def markdown(result: dict[str, Any]) -> str:
    """One result file as a table and the line that says where it comes from."""
    machine = result["machine"]
    where = ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["gpus"]])
    rows = [f"| {' | '.join(_HEADINGS)} |", f"|{'---:|' * len(_HEADINGS)}"]
    for level in result["levels"]:
        latencies = (_percentiles(level[key]) for key in ("ttft_ms", "inter_token_latency_ms", "request_latency_ms"))
        cells = (
            str(level["concurrency"]),
            str(level["requests"]),
            *latencies,
            f"{level['output_tokens_per_s']:.1f}",
            f"{level['input_tokens']} / {level['output_tokens']}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return f"{result['date'][:10]}, {where}: `{result['command']}`\n\n" + "\n".join(rows) + "\n"


def rendered(text: str) -> str:
    """``text`` with every table made anew."""

    def table(match: re.Match[str]) -> str:
        return match[1] + markdown(json.loads((PERF / "results" / match[2]).read_text())) + match[3]

    return _BLOCK.sub(table, text)


def _percentiles(values: dict[str, float] | None) -> str:
    return " / ".join(f"{values[p]:.1f}" for p in ("p50", "p90", "p99")) if values else "-"


def main() -> int:
    """Exit status 1 if ``--check`` finds a difference."""
    readme = PERF / "README.md"
    text = readme.read_text()
    if "--check" in sys.argv[1:]:
        return int(rendered(text) != text)
    readme.write_text(rendered(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
