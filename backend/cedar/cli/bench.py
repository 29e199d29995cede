# SPDX-License-Identifier: Apache-2.0
"""`cedar bench`: time to first token and tokens/s of streamed completions, measured through Triton."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cedar.cli.generate import client_errors
from cedar.errors import invalid


def command(
    url: Annotated[str, typer.Option(help="gRPC address of a running server; empty: start one for the measurement")] = "",
    model: Annotated[str, typer.Option(help="checkpoint of the server that is started; empty: the embedded model")] = "",
    max_tokens: Annotated[int, typer.Option(help="tokens per completion", min=2)] = 64,
    runs: Annotated[int, typer.Option(help="completions per client", min=1)] = 8,
    concurrency: Annotated[str, typer.Option(help="numbers of clients, each with its own connection")] = "1,8",
    output: Annotated[Path | None, typer.Option(help="write the result as JSON; none: only the table")] = None,
) -> None:
    """Measure time to first token and tokens/s of streamed completions."""
    from cedar.bench import facts
    from cedar.bench.local import local_server
    from cedar.bench.screen import report_console

    levels = _levels(concurrency)
    console = report_console()
    result = facts.header("streamed completions through Triton")
    result["settings"] = {"max_tokens": max_tokens, "runs_per_client": runs, "model": model or "embedded"}
    with ExitStack() as stack:
        if not url:
            console.print("starting a server on free loopback ports")
            server = stack.enter_context(local_server(["--model", model] if model else []))
            url = server.grpc
            result["ready_after_s"] = round(server.ready_after, 3)
            console.print(f"ready after {server.ready_after:.1f} s")
        with client_errors(url):
            result["levels"] = _measure(url, levels, runs, max_tokens, console)
    console.print(_table(result["levels"]))
    if output is not None:
        facts.write(output, result)
        console.print(f"result: {output}")


def _measure(url: str, levels: list[int], runs: int, max_tokens: int, console: Console) -> list[dict[str, Any]]:
    from cedar.bench import load
    from cedar.bench.screen import progress
    from cedar.bench.stats import describe

    rows: list[dict[str, Any]] = []
    with progress(console) as bars:
        load.level(url, 1, 1, max_tokens, lambda: None)  # first-use costs belong to no level
        for clients in levels:
            task = bars.add_task(f"{clients} concurrent", total=clients * runs)
            timings = load.level(url, clients, runs, max_tokens, partial(bars.advance, task))
            rows.append({"concurrency": clients, **describe(timings)})
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="median (min to max)")
    for heading in ("concurrency", "requests", "TTFT, ms", "tokens/s of a request", "tokens/s in all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ttft, rate = (_spread(row[key]) for key in ("ttft_ms", "tokens_per_s_per_request"))
        table.add_row(str(row["concurrency"]), str(row["requests"]), ttft, rate, f"{row['output_tokens_per_s']:.1f}")
    return table


def _spread(values: dict[str, float]) -> str:
    return f"{values['p50']:.1f} ({values['min']:.1f} to {values['max']:.1f})"


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1 or max(levels) > 256:
        raise invalid("--concurrency", f"is {text!r}", "whole numbers from 1 to 256, such as 1,8")
    return levels
