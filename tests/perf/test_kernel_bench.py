# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark's table, rows and input sets, without a GPU."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import pytest
import torch
from perf.kernels import bench, cases_peers, check_peers
from perf.kernels.case import EVICTING_BYTES, MOST_SETS, OURS, Case, Unavailable, rotate, sets_for
from perf.kernels.cases_peers_experts import _places
from perf.kernels.peers_data import Chain, dequantised, peer, quantise, relative
from perf.tables import beside, markdown

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


def key(case: Case) -> tuple[Any, ...]:
    return case.op, *case.facts.items()


def test_a_peer_is_beside_no_row_of_the_library() -> None:
    options = argparse.Namespace(tokens=None, ops=None, names=None, compiled=False, host_gib=1, limit=None)
    rows = bench.collect(options)
    ours = {key(case) for case in rows if case.name == OURS}
    peers = [case for case in rows if case.name != OURS]
    assert {key(case) for case in peers} <= ours
    assert {op for op, *_ in ours} - {case.op for case in peers} == {"compress_store", "engram_gate"}


@pytest.mark.parametrize("error", [0.2, math.nan, math.inf])
def test_a_peer_that_computes_something_else_is_timed(error: float) -> None:
    def case(found: float) -> Case:
        return peer(
            "wo_a", "peer", {"T": 8}, 8e6, 0.0, lambda: Chain(lambda seed: (seed,), lambda inputs: None, lambda *_: found)
        )

    wrong = bench.run_case(case(error), 0.1, lambda: None, CEILING)  # type: ignore[arg-type]
    assert "wrong result" in wrong["error"]
    assert "us" not in wrong
    check = case(1e-3).check
    assert check is not None
    assert check() == 1e-3


def test_a_provider_that_is_absent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_gemm", "flash_mla", "humming", "tokenspeed_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    for case in cases_peers.cases([48], 0):
        if case.op != "engram_gather":
            found = bench.run_case(case, 0.1, lambda: None, CEILING)  # type: ignore[arg-type]
            assert "unavailable" in found, (case.name, found)


@pytest.mark.parametrize("processes", [1, 5, 14])
def test_a_row_is_checked_by_no_process_or_by_two(processes: int) -> None:
    found = check_peers.groups(None)
    shared = [(*key(case), case.name) for lane in check_peers.lanes(found, processes) for case in lane]
    assert sorted(map(str, shared)) == sorted(str((*key(case), case.name)) for rows in found.values() for case in rows)
    left_out = {case.op for case in cases_peers.cases(None, 1)} - {op for op, *_ in shared}
    assert left_out == {"engram_gather"}


def test_a_peers_inputs_are_not_the_values() -> None:
    x = torch.randn(8, 5, 256, generator=torch.Generator().manual_seed(0)).exp()
    codes, scales = quantise(x)
    assert relative(dequantised(codes, scales), x) < 0.04
    assert torch.equal(scales.log2(), scales.log2().round())


def test_a_token_goes_to_a_row_of_another_expert() -> None:
    ids = torch.tensor([[0, 3], [3, 1], [0, 3]], dtype=torch.int32).repeat_interleave(
        3, 1
    )  # six experts a token, some more than once
    places, source, layout = _places(ids, 4)
    assert len(set(places.flatten().tolist())) == ids.numel()
    assert torch.equal(layout[places], ids)
    assert torch.equal(source[places], torch.arange(3)[:, None].expand(3, 6))
    assert all(count % 4 == 0 for count in layout.bincount().tolist())


def measured(op: str, name: str, us: float, **facts: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "T": 48, "us": us, "floor_us": 1.0, "floor_percent": 100 / us, **facts}


def test_a_peer_stands_beside_other_work() -> None:
    ours = measured("mqa_logits_topk", OURS, 5.0, context=8192, mode="sparse")
    same = [
        measured("mqa_logits_topk", "b", 10.0, context=8192, mode="dense"),
        measured("mqa_logits_topk", "c", 20.0, context=8192),
    ]
    other = [
        measured("mqa_logits_topk", "longer", 1.0, context=65536),
        measured("mega_gate", "another", 1.0),
        {**same[0], "T": 8, "us": 1.0},
        {"op": "mqa_logits_topk", "name": "wrong", "T": 48, "context": 8192, "error": "no"},
    ]
    assert beside([*other, ours, *reversed(same)]) == [(ours, same)]
    assert "| `mqa_logits_topk` context 8192 mode sparse | 5.0, 20%, 2.00x |" in markdown(
        {"date": "2026-01-01", "machine": {"gpu": "G"}, "command": "c", "ceilings": {}, "rows": [ours, *same]}
    )
