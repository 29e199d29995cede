# SPDX-License-Identifier: Apache-2.0
"""The tables of perf/README.md, made from the committed results: ``python perf/tables.py`` writes them, ``--check`` compares.

A table stands between ``<!-- table: FILE -->`` and ``<!-- end -->``, FILE being a name in perf/results. A result by replay mode
also gets a plot beside its file.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PERF = Path(__file__).resolve().parent
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)
Rows = list[tuple[str, ...]]
_LOAD = (
    "concurrency",
    "requests",
    "TTFT ms, p50 / p90 / p99",
    "inter-token ms, p50 / p90 / p99",
    "request ms, p50 / p90 / p99",
    "tokens/s",
    "tokens in / out",
)
_MEASURED = frozenset(
    [
        "op",
        "name",
        "T",
        "note",
        "floor_us",
        "us",
        "p10_us",
        "p90_us",
        "replays",
        "calls",
        "floor_percent",
        "tb_per_s",
        "tflop_per_s",
        "relative_error",
        "error",
        "unavailable",
    ]
)
"""Keys of a kernel's row that do not say what was computed, but for T, its number of tokens."""
OURS = "cedar"
_REPLAY = (
    *("replay", "prefix", "TTFT ms, median (min to max)", "of cold, off"),
    *("rows x layers, of full", "cached tokens", "replayed tokens"),
)


def markdown(result: dict[str, Any]) -> str:
    """One result file as a table and the line that says where it comes from."""
    machine = result["machine"]
    where = ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["gpus"]]) if "cpu" in machine else machine["gpu"]
    if "ceilings" in result:
        headings, rows = _kernel_rows(result["rows"])
    else:
        headings, rows = _replay_rows(result["cases"]) if "cases" in result else _load_rows(result["levels"])
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    table = [f"| {' | '.join(headings)} |", f"|{'---:|' * len(headings)}", *lines]
    return f"{result['date'][:10]}, {where}: `{result['command']}`\n\n" + "\n".join(table) + "\n"


def _load_rows(levels: list[dict[str, Any]]) -> tuple[tuple[str, ...], Rows]:
    rows: Rows = []
    for level in levels:
        latencies = (_percentiles(level[key]) for key in ("ttft_ms", "inter_token_latency_ms", "request_latency_ms"))
        counts = (str(level["concurrency"]), str(level["requests"]))
        totals = (f"{level['output_tokens_per_s']:.1f}", f"{level['input_tokens']} / {level['output_tokens']}")
        rows.append((*counts, *latencies, *totals))
    return _LOAD, rows


def _replay_rows(cases: list[dict[str, Any]]) -> tuple[tuple[str, ...], Rows]:
    rows: Rows = []
    for case in cases:
        ttft, share = case["ttft_ms"], case["ttft_ms"]["p50"] / _full_ms(cases)
        spread = f"{ttft['p50']:.1f} ({ttft['min']:.1f} to {ttft['max']:.1f})"
        counts = (f"{case['full_work_percent']:.2f}%", f"{case['cached_tokens']:,}", str(case["replayed_tokens"]))
        rows.append((case["replay"], case["prefix"], spread, f"{share:.1%}", *counts))
    return _REPLAY, rows


def facts_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a kernel's row computed, beside its operation and its number of tokens."""
    return {key: value for key, value in row.items() if key not in _MEASURED}


def beside(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Every row of the library with the peers that did the same work, the fastest first.

    A peer's row tells less where it has fewer variants. No peer searches some blocks only: theirs stand beside every mode.
    """

    def same(peer: dict[str, Any], ours: dict[str, Any]) -> bool:
        facts = {key: value for key, value in facts_of(peer).items() if key != "mode"}
        return (peer["op"], peer["T"]) == (ours["op"], ours["T"]) and facts.items() <= ours.items()

    timed = sorted((row for row in rows if row["name"] != OURS and "us" in row), key=lambda row: row["us"])
    return [(row, [peer for peer in timed if same(peer, row)]) for row in rows if row["name"] == OURS]


def _kernel_rows(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], Rows]:
    """Microseconds, percent of the floor, times as fast as the fastest peer; by number of tokens."""
    tokens = sorted({row["T"] for row in rows if row["name"] == OURS})
    found: dict[str, dict[int, str]] = {}
    for ours, peers in sorted(beside(rows), key=lambda pair: str(pair[0]["op"])):
        cell = f"{ours['us']:,.{1 if ours['us'] < 1000 else 0}f}, {ours['floor_percent']:.0f}%" if "us" in ours else "failed"
        if peers and "us" in ours:
            cell += f", {peers[0]['us'] / ours['us']:.2f}x"
        title = " ".join([f"`{ours['op']}`", *(f"{key} {value}" for key, value in facts_of(ours).items())])
        found.setdefault(title, {})[ours["T"]] = cell
    lines: Rows = [(title, *(cells.get(count, "") for count in tokens)) for title, cells in found.items()]
    return ("us, of floor, against the fastest peer", *(f"{count:,}" for count in tokens)), lines


def _full_ms(cases: list[dict[str, Any]]) -> float:
    """Median time of the full work: cold, all replay off."""
    (full,) = (case["ttft_ms"]["p50"] for case in cases if (case["replay"], case["prefix"]) == ("off", "cold"))
    return float(full)


def plot(result: dict[str, Any], path: Path) -> None:
    """One PNG: first-token time and work by replay mode, cold and on a hit, over those of a cold run without replay."""
    from matplotlib.figure import Figure

    cases = result["cases"]
    modes = list(dict.fromkeys(case["replay"] for case in cases))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, prefix in zip(figure.subplots(1, 2, sharey=True), ("cold", "hit"), strict=True):
        shown = [case for case in cases if case["prefix"] == prefix]
        series = {
            "rows x layers": [case["full_work_percent"] for case in shown],
            "time to first token": [100 * case["ttft_ms"]["p50"] / _full_ms(cases) for case in shown],
        }
        for offset, (label, values) in zip((0.2, -0.2), series.items(), strict=True):
            bars = axis.barh([number + offset for number in range(len(modes))], values, 0.38, label=label)
            axis.bar_label(bars, fmt="%.1f%%", padding=2, fontsize=8)
        axis.set_title(f"{prefix} prompt" if prefix == "cold" else f"prefix hit of {shown[0]['cached_tokens']:,} tokens")
        axis.set_yticks(range(len(modes)), modes)
        axis.margins(x=0.15)
        axis.set_xlabel("% of a cold prompt with replay off")
        axis.grid(axis="x", alpha=0.3)
    axis.invert_yaxis()
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    settings = result["settings"]
    what = f"{settings['prompt_tokens']:,}-token prompt, model {settings['model']}, {settings['device']}"
    figure.suptitle(f"Work and time to first token by replay: {what}", fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": ""})


def rendered(text: str) -> str:
    """``text`` with every table made anew."""

    def table(match: re.Match[str]) -> str:
        return match[1] + markdown(json.loads((PERF / "results" / match[2]).read_text())) + match[3]

    return _BLOCK.sub(table, text)


def _percentiles(values: dict[str, float] | None) -> str:
    return " / ".join(f"{values[p]:.1f}" for p in ("p50", "p90", "p99")) if values else "-"


def main() -> int:
    """Exit status 1 if ``--check`` finds a difference."""
    readme = PERF / "README.md"
    text = readme.read_text()
    if "--check" in sys.argv[1:]:
        return int(rendered(text) != text)
    readme.write_text(rendered(text))
    for _, name, _ in _BLOCK.findall(text):
        file = PERF / "results" / name
        result = json.loads(file.read_text())
        if "cases" in result:
            plot(result, file.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
