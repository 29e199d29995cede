# SPDX-License-Identifier: Apache-2.0
"""Keep what runs of the GPU tests said: ``python perf/gpu_tests.py gpu.xml... perf/results/gpu_tests.json MACHINE COMMAND``.

Each ``gpu.xml`` comes from COMMAND, ``python -m pytest -m gpu --junitxml gpu.xml <tests>``, on MACHINE, the one with the GPU.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path


def summarise(reports: Sequence[Path], machine: str, command: str) -> dict[str, object]:
    """Every test with its outcome and seconds."""
    dates, tests = [], []
    for report in reports:
        suite = ElementTree.parse(report).getroot().find("testsuite")
        if suite is None:
            raise SystemExit(f"{report}: no test suite in it")
        dates.append(suite.get("timestamp"))
        for case in suite.iter("testcase"):
            outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            name = f"{case.get('classname')}::{case.get('name')}"
            tests.append({"test": name, "outcome": outcome, "seconds": case.get("time")})
    return {"machine": machine, "command": command, "date": dates[0], "tests": tests}


if __name__ == "__main__":
    if len(sys.argv) < 5:
        raise SystemExit(__doc__)
    *sources, target, machine, command = sys.argv[1:]
    Path(target).write_text(json.dumps(summarise([*map(Path, sources)], machine, command), indent=1) + "\n", encoding="utf-8")
