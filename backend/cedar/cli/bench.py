# SPDX-License-Identifier: Apache-2.0
"""`cedar bench`: streamed completions measured through Triton; or, in the engine alone, time to first token by replay mode."""

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
    model: Annotated[
        str, typer.Option(help="checkpoint; empty: the embedded model, with --replay a random one of preset small")
    ] = "",
    max_tokens: Annotated[int | None, typer.Option(help="tokens per completion (64)", min=2)] = None,
    runs: Annotated[int | None, typer.Option(help="completions per client (8); with --replay: of each kind (5)", min=1)] = None,
    concurrency: Annotated[str | None, typer.Option(help="numbers of clients, each with its own connection (1,8)")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="no server: first tokens by replay mode, cold and on a hit")] = False,
    prompt_tokens: Annotated[int | None, typer.Option(help="with --replay: length of the prompt (4096)")] = None,
    output: Annotated[Path | None, typer.Option(help="write the result as JSON; none: only the table")] = None,
) -> None:
    """Measure time to first token and tokens/s of streamed completions, or (--replay) what bounded replay saves."""
    from cedar.bench import facts
    from cedar.bench.screen import report_console

    console = report_console()
    if replay:
        _refuse(
            {"--url": url or None, "--concurrency": concurrency, "--max-tokens": max_tokens}, "is given together with --replay"
        )
        result = _replay(model, 4096 if prompt_tokens is None else prompt_tokens, runs or 5, console)
    else:
        _refuse({"--prompt-tokens": prompt_tokens}, "is given without --replay")
        result = _streams(
            url, model, _levels("1,8" if concurrency is None else concurrency), runs or 8, max_tokens or 64, console
        )
    if output is not None:
        facts.write(output, result)
        console.print(f"result: {output}")


def _refuse(options: dict[str, Any], problem: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise invalid(name, problem, "options of one measurement")


def _replay(model: str, prompt_tokens: int, runs: int, console: Console) -> dict[str, Any]:
    from cedar.bench import facts
    from cedar.bench.replay import MODES, measure
    from cedar.bench.screen import progress

    result = facts.header("time to first token in the engine, by replay mode")
    with progress(console) as bars:
        task = bars.add_task(f"{prompt_tokens} tokens, cold and on a hit", total=runs * len(MODES))
        result["settings"], result["cases"] = measure(model, prompt_tokens, runs, partial(bars.advance, task))
    console.print(_replay_table(result))
    return result


def _replay_table(result: dict[str, Any]) -> Table:
    settings, cases = result["settings"], result["cases"]
    model = f"{settings['model']} ({settings['layers']} layers, window {settings['sliding_window']}) on {settings['device']}"
    prompt = f"a prompt of {settings['prompt_tokens']:,} tokens, on a hit {settings['shared_tokens']:,} of them known"
    table = Table(title=f"First token, {model}\n{prompt}; median (min to max) of {settings['runs']}")
    for heading in ("replay", "prefix", "TTFT, ms", "of cold, off", "rows x layers", "of full", "cached", "replayed"):
        table.add_column(heading, justify="left" if heading in ("replay", "prefix") else "right", no_wrap=True)
    (full,) = (case["ttft_ms"]["p50"] for case in cases if (case["replay"], case["prefix"]) == ("off", "cold"))
    for case in cases:
        table.add_row(
            case["replay"],
            case["prefix"],
            _spread(case["ttft_ms"]),
            f"{case['ttft_ms']['p50'] / full:.1%}",
            f"{case['rows_x_layers']:,}",
            f"{case['full_work_percent']:.2f}%",
            f"{case['cached_tokens']:,}",
            str(case["replayed_tokens"]),
            end_section=case["prefix"] == "hit",
        )
    return table


def _streams(url: str, model: str, levels: list[int], runs: int, max_tokens: int, console: Console) -> dict[str, Any]:
    from cedar.bench import facts
    from cedar.bench.local import local_server
    from cedar.model.embedded import NAME

    result = facts.header("streamed completions through Triton")
    result["settings"] = {"max_tokens": max_tokens, "runs_per_client": runs, "model": model or NAME}
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
    return result


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
