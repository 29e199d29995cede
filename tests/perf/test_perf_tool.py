# SPDX-License-Identifier: Apache-2.0
"""Getting the binary, reading the server's counters, writing results, and one run of the whole against a real server."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from perf.perf_analyzer import binary, report, run, server
from rich.console import Console

from cedar.bench import facts
from cedar.bench.local import free_ports, local_server
from perf import tables

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def _pages(*pages: str) -> Iterator[str]:
    """A loopback server that answers with the next page, and the last one for ever; yields its URL."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (left.pop(0) if len(left) > 1 else left[0]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/metrics"
    finally:
        httpd.shutdown()
        thread.join(10)
        httpd.server_close()


def _page(tokens: int, extra: str = "") -> str:
    return f'# TYPE cedar_generation_tokens_total counter\ncedar_generation_tokens_total{{model="cedar"}} {tokens}\n{extra}'


def test_labels_buckets_or_foreign_metrics_in_the_sums() -> None:
    extra = (
        "# TYPE cedar_request_success_total counter\n"
        'cedar_request_success_total{finished_reason="stop"} 2\ncedar_request_success_total{finished_reason="length"} 3\n'
        "# TYPE cedar_time_to_first_token_seconds histogram\n"
        'cedar_time_to_first_token_seconds_bucket{le="+Inf"} 5\n'
        "cedar_time_to_first_token_seconds_sum 0.5\ncedar_time_to_first_token_seconds_count 5\n"
        "# TYPE nv_inference_count counter\nnv_inference_count 9\n"
        "# TYPE cedar_num_requests_running gauge\ncedar_num_requests_running 1\n"
    )
    with _pages(_page(7, extra)) as url:
        assert server.counters(url) == {
            "cedar_generation_tokens_total": 7.0,
            "cedar_request_success_total": 5.0,
            "cedar_time_to_first_token_seconds_sum": 0.5,
            "cedar_time_to_first_token_seconds_count": 5.0,
        }


def test_counter_read_before_the_relay_has_moved_it() -> None:
    with _pages(_page(100), _page(104), _page(110)) as url:
        now = server.settled(url, tokens=110, patience=10)
    assert server.growth(now, {server.GENERATED: 100.0}) == {server.GENERATED: 10.0}


def test_counter_that_never_arrives_waited_for_without_end() -> None:
    with _pages(_page(104)) as url:
        assert server.settled(url, tokens=110, patience=0.3)[server.GENERATED] == 104.0


def test_level_starts_from_a_counter_that_still_moves() -> None:
    with _pages(_page(100), _page(103), _page(103)) as url:
        assert server.at_rest(url, quiet=0.05)[server.GENERATED] == 103.0
    with _pages(*(_page(count) for count in range(200))) as url, pytest.raises(server.ServerError, match="other traffic"):
        server.at_rest(url, quiet=0.01, patience=0.2)


def test_foreign_metrics_page_or_dead_server_taken_for_zero() -> None:
    with _pages("nv_inference_count 1\n") as url, pytest.raises(server.ServerError, match="no cedar_generation_tokens_total"):
        server.counters(url)
    (port,) = free_ports(1)
    with pytest.raises(server.ServerError, match=str(port)):
        server.counters(f"http://127.0.0.1:{port}/metrics")
    with pytest.raises(server.ServerError, match="make serve"):
        server.check(f"127.0.0.1:{port}", "cedar")


def test_missing_or_broken_binary_started(tmp_path: Path) -> None:
    with pytest.raises(binary.Unavailable, match="not an executable file"):
        binary.obtain(tmp_path / "perf_analyzer")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'GLIBC_2.38 not found' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(binary.Unavailable, match=r"GLIBC_2\.38 not found"):
        binary.obtain(broken).version()


def test_cached_binary_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "perf_analyzer").write_text("")
    monkeypatch.setattr(binary, "CACHE", tmp_path)
    monkeypatch.setattr(binary, "_loads", lambda *_: True)
    monkeypatch.setattr(binary, "_run", lambda *_: pytest.fail("fetched"))
    assert binary.obtain().path == tmp_path / "bin" / "perf_analyzer"


def test_wheel_for_another_machine_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(binary.Unavailable, match=r"aarch64.*--perf-analyzer"):
        binary.obtain()


def test_result_file_changed_by_its_layout(tmp_path: Path) -> None:
    value = {"a": [], "b": [1, [2, {"c": "[\n x ]  {y}"}]], "d": {"e": "two  spaces"}, "f": [1.5, None, True]}
    facts.write(tmp_path / "sub" / "r.json", value)
    assert json.loads((tmp_path / "sub" / "r.json").read_text()) == value
    with pytest.raises(ValueError, match="JSON"):
        facts.write(tmp_path / "nan.json", {"x": float("nan")})
    assert not (tmp_path / "nan.json").exists()


def test_result_without_what_makes_it_repeatable() -> None:
    head = facts.header("x")
    assert head["machine"]["cores"] >= 1
    assert head["versions"]["python"]
    assert head["versions"]["tritonclient"]
    assert str(ROOT) not in json.dumps(head)


def _level(concurrency: int, problems: list[str]) -> dict[str, object]:
    percentiles = {"p50": 1.0, "p90": 2.0, "p99": 3.25}
    return {
        "concurrency": concurrency,
        "ttft_ms": percentiles,
        "inter_token_latency_ms": None,
        "request_latency_ms": percentiles,
        "requests": 8,
        "duration_s": 1.5,
        "input_tokens": 10,
        "output_tokens": 20,
        "output_tokens_per_s": 13.3,
        "requests_per_s": 5.3,
        "problems": problems,
    }


def test_table_hides_a_disagreement() -> None:
    console = Console(width=130, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.tables({"title": "t", "levels": [_level(1, []), _level(4, ["x"])]}, console)
    rows = [line for line in console.export_text().splitlines() if line.strip("│ ")[:1] in ("1", "4")]
    assert "1.0 / 2.0 / 3.2" in rows[0]
    assert [row.rstrip("│ ").rsplit(" ", 1)[-1] for row in rows[-2:]] == ["yes", "no"]


def test_plot_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = {"title": "t", "machine": {"cpu": "c", "cores": 2}, "levels": [_level(1, []), _level(4, [])]}
    report.plot(result, tmp_path / "p.png", Console(quiet=True))
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_readme_table_differs_from_the_committed_result() -> None:
    text = (tables.PERF / "README.md").read_text()
    assert text.count("<!-- table: ") == 7
    assert tables.rendered(text) == text, "run: python perf/tables.py"


def test_measuring_without_asking_changes_the_committed_results() -> None:
    assert run.OUTPUT == ROOT / "build" / "perf"
    assert "build/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "perf/results" not in (ROOT / "Makefile").read_text()


@pytest.mark.slow
@pytest.mark.server
def test_real_tool_against_a_real_server_disagrees(tmp_path: Path) -> None:
    """The whole script, as a user runs it, at 1, 4 and 16: exit status 0, every token counted by both sides."""
    with local_server() as running:
        command = [
            *(sys.executable, "perf/perf_analyzer/run.py", "--url", running.grpc, "--metrics-url", running.metrics),
            *("--concurrency", "1,4,16", "--requests-per-slot", "1", "--output", str(tmp_path / "result.json")),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [level["concurrency"] for level in result["levels"]] == [1, 4, 16]
    for level in result["levels"]:
        assert level["problems"] == []
        assert level["server_metrics_change"][server.GENERATED] == level["output_tokens"] > 0
    assert result["perf_analyzer"].startswith("2.")
