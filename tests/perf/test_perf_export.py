# SPDX-License-Identifier: Apache-2.0
"""From perf_analyzer's export to the numbers in a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from perf.perf_analyzer import export, run, server

from cedar.bench.stats import StreamTiming, describe, summary

RECORDED = Path(__file__).with_name("export_2.51.0.json")
MS = 1_000_000  # ns


def _output(tokens: int, reason: str = "") -> dict[str, Any]:
    return {"num_output_tokens": tokens, "num_input_tokens": 7, "output_ids": 0, "text_output": "x", "finish_reason": reason}


def _write(path: Path, responses: list[tuple[int, dict[str, Any]]], max_tokens: int = 5) -> Path:
    """An export with one request; ``responses``: (ms after its start, outputs)."""
    start = 1_795_966_970_000 * MS
    request = {
        "timestamp": start,
        "request_inputs": {"max_tokens": max_tokens},
        "response_timestamps": [start + when * MS for when, _ in responses],
        "response_outputs": [outputs for _, outputs in responses],
    }
    path.write_text(json.dumps({"experiments": [{"requests": [request]}]}))
    return path


def test_first_response_without_a_token_taken_for_the_first_token(tmp_path: Path) -> None:
    path = _write(tmp_path / "e.json", [(10, _output(0)), (30, _output(1)), (50, _output(4, "length"))])
    (request,) = export.read(path)
    assert request.timing.ttft == pytest.approx(0.030, abs=1e-6)
    assert request.timing.tokens == 5
    assert request.finish_reason == "length"


def test_responses_counted_as_tokens(tmp_path: Path) -> None:
    path = _write(tmp_path / "e.json", [(30, _output(1)), (50, _output(2)), (70, _output(2, "length"))])
    (request,) = export.read(path)
    assert request.timing.inter_token_latency == pytest.approx(0.040 / 4, abs=1e-6)
    assert request.timing.gaps == pytest.approx([0.020, 0.020], abs=1e-6)
    row = describe([request.timing])
    assert row["output_tokens"] == 5
    assert row["responses_with_tokens"] == 3
    assert row["output_tokens_per_s"] == pytest.approx(5 / 0.070, rel=1e-3)


def test_empty_final_response_counted_in_latency_or_gaps(tmp_path: Path) -> None:
    path = _write(tmp_path / "e.json", [(30, _output(1)), (50, _output(1, "length")), (900, {})], max_tokens=2)
    (request,) = export.read(path)
    assert request.timing.latency == pytest.approx(0.050, abs=1e-6)
    assert len(request.timing.gaps) == 1


def test_last_response_without_tokens_left_out_of_the_latency(tmp_path: Path) -> None:
    path = _write(tmp_path / "e.json", [(30, _output(1)), (50, _output(1)), (80, _output(0, "cancelled"))])
    (request,) = export.read(path)
    assert request.timing.latency == pytest.approx(0.080, abs=1e-6)
    assert request.timing.inter_token_latency == pytest.approx(0.020, abs=1e-6)


def test_one_token_gets_an_inter_token_latency() -> None:
    timing = StreamTiming(0.0, ((0.5, 1),))
    assert timing.inter_token_latency is None
    assert StreamTiming(0.0, ()).ttft is None
    assert describe([timing])["inter_token_latency_ms"] is None


@pytest.mark.parametrize(
    ("outputs", "word"),
    [
        ({"num_input_tokens": 7}, "request 0, response 0: num_output_tokens is None"),
        ({"num_output_tokens": [1, 2], "num_input_tokens": 7}, r"num_output_tokens is \[1, 2\]"),
        ({"num_output_tokens": -1, "num_input_tokens": 7}, "num_output_tokens is -1"),
        ({"num_output_tokens": 1.5, "num_input_tokens": 7}, "num_output_tokens is 1.5"),
        ({}, "request 0: no response with data"),
    ],
)
def test_malformed_count_becomes_a_number(tmp_path: Path, outputs: dict[str, Any], word: str) -> None:
    with pytest.raises(export.ExportError, match=word):
        export.read(_write(tmp_path / "e.json", [(30, outputs)]))


def test_truncated_export_read_as_a_short_run(tmp_path: Path) -> None:
    path = _write(tmp_path / "e.json", [(30, _output(1))])
    whole = path.read_text()
    path.write_text(whole[:-5])
    with pytest.raises(export.ExportError, match=r"e\.json is not a profile export"):
        export.read(path)
    path.write_text(json.dumps({"experiments": [{"requests": []}]}))
    with pytest.raises(export.ExportError, match="holds no request"):
        export.read(path)


def test_recorded_export_of_the_real_tool_misread() -> None:
    """Two requests as 2.51.0 wrote them: the expected values are sums and differences of the numbers in the file."""
    raw = json.loads(RECORDED.read_text())["experiments"][0]["requests"]
    requests = export.read(RECORDED)
    assert len(requests) == len(raw) == 2
    for request, item in zip(requests, raw, strict=True):
        counts = [output["num_output_tokens"] for output in item["response_outputs"] if output]
        first = next(i for i, count in enumerate(counts) if count)
        assert request.timing.tokens == sum(counts) == item["request_inputs"]["max_tokens"]
        assert request.timing.ttft == pytest.approx((item["response_timestamps"][first] - item["timestamp"]) / 1e9, abs=1e-6)
        assert request.finish_reason == "length"


def test_summary_off_by_one_percentile() -> None:
    got = summary([float(value) for value in range(1, 102)])
    assert got is not None
    assert (got["p50"], got["p90"], got["p99"], got["min"], got["max"], got["count"]) == (51.0, 91.0, 100.0, 1.0, 101.0, 101)
    assert summary([None]) is None


def _requests(*counts: int, max_tokens: int = 5) -> list[export.Request]:
    return [export.Request(StreamTiming(0.0, ((1.0, count),), 7), max_tokens, "length") for count in counts]


def test_agreement_reported_as_a_problem() -> None:
    assert run.problems(_requests(5, 5), 2, {server.GENERATED: 10.0}) == []


@pytest.mark.parametrize(
    ("counts", "asked", "counted", "words"),
    [
        ((5, 5), 2, 11.0, ("10 tokens", "grew by 11")),
        ((5, 5), 3, 10.0, ("3 requests sent, 2 in the export",)),
        ((5, 4), 2, 9.0, ("1 requests with ignore_eos", "4 of 5")),
    ],
)
def test_disagreement_passes(counts: tuple[int, ...], asked: int, counted: float, words: tuple[str, ...]) -> None:
    (problem,) = run.problems(_requests(*counts), asked, {server.GENERATED: counted})
    assert all(word in problem for word in words), problem
