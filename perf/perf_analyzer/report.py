# SPDX-License-Identifier: Apache-2.0
"""Tables and a plot of a result file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_LATENCIES = (
    ("ttft_ms", "time to first token, ms"),
    ("inter_token_latency_ms", "inter-token latency, ms"),
    ("request_latency_ms", "request latency, ms"),
)


def tables(result: dict[str, Any], console: Console) -> None:
    """Print the latencies and the throughput of every level."""
    latency = Table(title=f"{result['title']}: latency")
    latency.add_column("concurrency", justify="right")
    for _, heading in _LATENCIES:
        latency.add_column(f"{heading}\np50 / p90 / p99", justify="right", no_wrap=True)
    throughput = Table(title=f"{result['title']}: throughput")
    for heading in (
        "concurrency",
        "requests",
        "seconds",
        "tokens in",
        "tokens out",
        "tokens out/s",
        "requests/s",
        "server agrees",
    ):
        throughput.add_column(heading, justify="right")
    for level in result["levels"]:
        cells = []
        for key, _ in _LATENCIES:
            row = level[key]
            cells.append(" / ".join(f"{row[p]:.1f}" for p in ("p50", "p90", "p99")) if row else "-")
        latency.add_row(str(level["concurrency"]), *cells)
        throughput.add_row(
            str(level["concurrency"]),
            str(level["requests"]),
            f"{level['duration_s']:.2f}",
            str(level["input_tokens"]),
            str(level["output_tokens"]),
            f"{level['output_tokens_per_s']:.1f}",
            f"{level['requests_per_s']:.2f}",
            "no" if level["problems"] else "yes",
        )
    console.print(latency, throughput)


def plot(result: dict[str, Any], path: Path, console: Console) -> None:
    """One PNG: latencies and throughput over concurrency. Without matplotlib: a message, no picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        console.print("no plot: matplotlib is not installed (it is part of the dev extra)")
        return
    levels = result["levels"]
    x = [level["concurrency"] for level in levels]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, (key, heading) in zip(axes, _LATENCIES[:2], strict=False):
        for percentile in ("p50", "p90", "p99"):
            axis.plot(
                x, [level[key][percentile] if level[key] else float("nan") for level in levels], marker="o", label=percentile
            )
        axis.set_title(heading)
        axis.legend()
    axes[2].plot(x, [level["output_tokens_per_s"] for level in levels], marker="o", color="black")
    axes[2].set_title("output tokens/s")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [str(value) for value in x])
        axis.set_xlabel("concurrent requests")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.suptitle(f"{result['title']} ({result['machine']['cpu']}, {result['machine']['cores']} cores)")
    figure.savefig(path, dpi=120, metadata={"Software": ""})
    console.print(f"plot: {path}")
