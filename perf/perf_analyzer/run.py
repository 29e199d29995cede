# SPDX-License-Identifier: Apache-2.0
"""Drive a running Cedar with the real perf_analyzer (gRPC, streaming, decoupled) and report tokens, not responses.

    python perf/perf_analyzer/run.py --profile cpu
    python perf/perf_analyzer/run.py --url HOST:8001 --metrics-url http://HOST:8002/metrics --concurrency 1,4,16

Exit status: 0 all levels ran and their token counts agree with the server's; 1 a level failed or disagrees; 2 it could not start.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs as a plain script, too

from perf.perf_analyzer import binary, export, report, server, workload

from cedar.bench import facts
from cedar.bench.screen import progress, report_console
from cedar.bench.stats import describe

OUTPUT = Path(__file__).resolve().parents[2] / "build" / "perf"


class LevelError(Exception):
    """perf_analyzer failed at one level; the message carries the end of its output."""


def main(
    profile: Annotated[str, typer.Option(help="name of a file in profiles/, or a path to one")] = "cpu",
    url: Annotated[str, typer.Option(help="gRPC address of the running server")] = "127.0.0.1:8001",
    metrics_url: Annotated[str, typer.Option(help="its Prometheus page")] = "http://127.0.0.1:8002/metrics",
    concurrency: Annotated[str, typer.Option(help="levels, such as 1,4,16; default: the profile's")] = "",
    requests_per_slot: Annotated[int, typer.Option(help="requests per concurrent slot; default: the profile's", min=0)] = 0,
    output: Annotated[Path | None, typer.Option(help="result file; default: build/perf/perf_analyzer_PROFILE.json")] = None,
    perf_analyzer: Annotated[Path | None, typer.Option(help="a perf_analyzer of your own")] = None,
    keep_exports: Annotated[Path | None, typer.Option(help="directory for the raw inputs and profile exports")] = None,
    note: Annotated[str, typer.Option(help="free text for the result file: what the server runs, on what")] = "",
) -> None:
    """Measure TTFT, inter-token latency, request latency and throughput at every concurrency level."""
    console = report_console()
    try:
        load = workload.load_profile(profile)
        levels = parse_levels(concurrency) or load.concurrency
        load = load.model_copy(update={"requests_per_slot": requests_per_slot or load.requests_per_slot})
        tool = binary.obtain(perf_analyzer)
        head = {
            **facts.header(f"perf_analyzer, profile {load.name}"),
            "note": note,
            "perf_analyzer": tool.version(),
            "server": server.check(url, load.model),
            "profile": load.model_dump(mode="json"),
        }
        at_rest = server.at_rest(metrics_url)
    except (workload.ProfileError, binary.Unavailable, server.ServerError) as error:
        console.print(f"[bold red]cannot start:[/] {escape(str(error))}")
        raise typer.Exit(2) from error
    runner = Runner(tool, load, url, metrics_url, at_rest, keep_exports)
    rows: list[dict[str, Any]] = []
    try:
        with progress(console) as bars:
            task = bars.add_task("warm-up", total=len(levels))
            runner.warm_up()
            for level in levels:
                bars.update(task, description=f"concurrency {level}, {load.requests(level)} requests")
                rows.append(runner.level(level))
                bars.advance(task)
    except (LevelError, export.ExportError, server.ServerError) as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}")
        raise typer.Exit(1) from error
    result = {**head, "levels": rows}
    path = output or OUTPUT / f"perf_analyzer_{load.name}.json"
    facts.write(path, result)
    report.tables(result, console)
    report.plot(result, path.with_suffix(".png"), console)
    console.print(f"result: {path}")
    problems = [f"concurrency {row['concurrency']}: {problem}" for row in rows for problem in row["problems"]]
    for problem in problems:
        console.print(f"[bold red]disagreement:[/] {escape(problem)}")
    raise typer.Exit(1 if problems else 0)


@dataclass
class Runner:
    """Runs perf_analyzer once per level and turns each export into a table row."""

    tool: binary.PerfAnalyzer
    profile: workload.Profile
    url: str
    metrics_url: str
    counters: dict[str, float]  # the server's, at rest, before the next request
    keep: Path | None = None  # a directory for the raw inputs and exports
    # The prompts are the same in every run; the salt keeps one run from finding another's prefixes in the cache.
    cache_salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def warm_up(self) -> None:
        """Requests that are not counted: first-use costs belong to no level."""
        if self.profile.warmup_requests:
            self._drive(1, self.profile.warmup_requests, "warm-up")

    def level(self, concurrency: int) -> dict[str, Any]:
        """One level's row; ``problems`` names every disagreement between what was asked, sent and counted."""
        done, change, command = self._drive(concurrency, self.profile.requests(concurrency), f"c{concurrency}")
        timings = [request.timing for request in done]
        start = min(timing.start for timing in timings)
        return {
            "concurrency": concurrency,
            **describe(timings),
            "problems": problems(done, self.profile.requests(concurrency), change),
            "server_metrics_change": change,
            "command": command,
            "per_request": {
                "start_s": [round(timing.start - start, 6) for timing in timings],
                "ttft_s": [None if timing.ttft is None else round(timing.ttft, 6) for timing in timings],
                "latency_s": [round(timing.latency, 6) for timing in timings],
                "input_tokens": [timing.num_input_tokens for timing in timings],
                "output_tokens": [timing.tokens for timing in timings],
            },
        }

    def _drive(self, concurrency: int, count: int, name: str) -> tuple[list[export.Request], dict[str, float], str]:
        """The requests of one run, what the server's counters made of them, and the command."""
        with tempfile.TemporaryDirectory(prefix="cedar-perf-") as scratch:
            folder = self.keep or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            inputs, exported = folder / f"inputs-{name}.json", folder / f"export-{name}.json"
            exported.unlink(missing_ok=True)
            inputs.write_text(json.dumps({"data": workload.requests(self.profile, count, name, self.cache_salt)}))
            command = [
                *(str(self.tool.path), "-m", self.profile.model, "-u", self.url, "-i", "grpc", "--streaming", "--async"),
                *("--input-data", str(inputs), "--concurrency-range", str(concurrency), "--request-count", str(count)),
                # One measurement over exactly these requests: a stability criterion would repeat it.
                *("--stability-percentage", "999", "--profile-export-file", str(exported)),
            ]
            try:
                done = subprocess.run(
                    command,
                    env=self.tool.environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=self.profile.timeout_s,
                )
            except subprocess.TimeoutExpired as error:
                raise LevelError(f"perf_analyzer did not end within {self.profile.timeout_s:.0f} s ({name})") from error
            if done.returncode or not exported.is_file():
                raise LevelError(f"perf_analyzer ended with status {done.returncode} ({name}):\n{done.stdout[-3000:]}")
            shown = ["perf_analyzer", *(Path(arg).name if arg.startswith(str(folder)) else arg for arg in command[1:])]
            requests = export.read(exported)
        before, tokens = self.counters, sum(request.timing.tokens for request in requests)
        self.counters = server.settled(self.metrics_url, before[server.GENERATED] + tokens)
        return requests, server.growth(self.counters, before), " ".join(shown)


def problems(done: list[export.Request], count: int, change: dict[str, float]) -> list[str]:
    """What does not add up: requests, tokens per request (every one asks for an exact number), the server's own counter."""
    found = []
    if len(done) != count:
        found.append(f"{count} requests sent, {len(done)} in the export")
    short = [request for request in done if request.timing.tokens != request.max_tokens]
    if short:
        first = short[0]
        found.append(
            f"{len(short)} requests with ignore_eos did not get their max_tokens, the first {first.timing.tokens} of "
            f"{first.max_tokens} (finish_reason {first.finish_reason!r})"
        )
    tokens = sum(request.timing.tokens for request in done)
    counted = change.get(server.GENERATED, 0.0)
    if counted != tokens:
        found.append(f"clients received {tokens} tokens, {server.GENERATED} grew by {counted:g} (is there other traffic?)")
    return found


def parse_levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        levels = [0]
    if any(level < 1 for level in levels):
        raise workload.ProfileError(f"--concurrency {text!r}: expected positive whole numbers, such as 1,4,16")
    return levels


if __name__ == "__main__":
    typer.run(main)
