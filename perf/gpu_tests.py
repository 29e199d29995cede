# SPDX-License-Identifier: Apache-2.0
"""Keep what a run of the GPU tests said: ``python perf/gpu_tests.py gpu.xml perf/results/gpu_tests.json MACHINE COMMAND``.

``gpu.xml`` comes from COMMAND, ``python -m pytest -m gpu --junitxml gpu.xml <tests>``, on MACHINE, the one with the GPU.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def summarise(report: Path, machine: str, command: str) -> dict[str, object]:
    """Every test with its outcome and seconds."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        raise SystemExit(f"{report}: no test suite in it")
    tests = []
    for case in suite.iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        tests.append({"test": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome, "seconds": case.get("time")})
    return {"machine": machine, "command": command, "date": suite.get("timestamp"), "tests": tests}


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    source, target, machine, command = sys.argv[1:]
    Path(target).write_text(json.dumps(summarise(Path(source), machine, command), indent=1) + "\n", encoding="utf-8")
