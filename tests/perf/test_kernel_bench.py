# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark's table, rows and input sets, without a GPU."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from perf.kernels import bench
from perf.kernels.case import EVICTING_BYTES, MOST_SETS, OURS, Case, Unavailable, rotate, sets_for

CEILING = {"bytes": 4e12, "bf16": 8e14, "fp8": 1.2e15, "tf32": 3e14}


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"op": "wo_a", "name": name, "T": 8, "floor_us": 1.0, "note": "", **more}


def test_a_peer_that_is_slower_wins() -> None:
    ours = row(OURS, us=2.0, floor_percent=50.0, relative_error=1e-3)
    lines = bench.table([ours, row("slow", us=9.0), row("fast", us=3.0), row("absent", unavailable="no module")]).splitlines()
    assert lines[1].split() == ["wo_a", "T=8", "2.00", "50.0", "1.0e-03", "3.00", "1.50", "fast"]
    assert len(lines) == 2


def test_a_row_that_failed_is_not_told() -> None:
    assert "cedar: RuntimeError: no" in bench.table([row(OURS, error="RuntimeError: no"), row("peer", us=3.0)])


@pytest.mark.parametrize(("error", "key"), [(Unavailable("no module"), "unavailable"), (RuntimeError("no"), "error")])
def test_a_row_that_cannot_be_built_ends_the_run(error: Exception, key: str) -> None:
    def build() -> Any:
        raise error

    case = Case("wo_a", OURS, {"T": 8}, build, 8e6)
    found = bench.run_case(case, 0.1, lambda: None, CEILING)  # type: ignore[arg-type]
    assert str(error) in found[key]
    assert found["floor_us"] == pytest.approx(2.0)


def test_inputs_stay_in_the_cache() -> None:
    assert sets_for(EVICTING_BYTES / 5) == 5
    assert sets_for(1) == MOST_SETS
    assert sets_for(1e12) == 1


def test_a_call_gets_the_inputs_of_another() -> None:
    seen: list[int] = []
    call = rotate(lambda seed: seed, 3, seen.append)
    for number in range(5):
        call(number)
    assert seen == [0, 1, 2, 0, 1]


def test_a_choice_of_rows_is_not_respected() -> None:
    options = argparse.Namespace(tokens="48", ops="wo_a,moe_fp4", names=OURS, compiled=False, host_gib=0, limit=None)
    assert {(case.op, case.rows, case.name) for case in bench.collect(options)} == {("wo_a", 48, OURS), ("moe_fp4", 48, OURS)}
