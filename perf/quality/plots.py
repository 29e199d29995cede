# SPDX-License-Identifier: Apache-2.0
"""Plots of the training and of `perf.quality.eval`: python -m perf.quality.plots build/quality/conversations/log.jsonl"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from perf.quality.windows import BUCKETS


def draw(result: dict[str, Any], path: Path) -> None:
    """Differences by task and cell; where windows were measured, perplexity and window errors by distance."""
    windows = result.get("windows")
    rows = ["DDD", "PEF"] if windows else ["DDD"]
    figure, axes = plt.subplot_mosaic("\n".join(rows), figsize=(18, 6 * len(rows)), layout="constrained")
    _differences(axes["D"], result)
    if windows:
        _perplexity(axes["P"], windows)
        for place, side in (("E", "encoder"), ("F", "decoder")):
            _errors(axes[place], side, windows[side]["relative_error"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _differences(axis: Any, result: dict[str, Any]) -> None:
    """One group of intervals a task, in it one interval a cell."""
    cells = result["cells"][1:]
    for number, cell in enumerate(cells):
        rows = cell["tasks"]
        places = [task + 0.8 * ((number + 0.5) / len(cells) - 0.5) for task in range(len(rows))]
        spread = [[100 * max(0.0, row["value"] - row["low"]) for row in rows]]
        spread.append([100 * max(0.0, row["high"] - row["value"]) for row in rows])
        style = {"fmt": "os^vDPX*<>"[number % 10], "color": f"C{number % 10}", "markersize": 5, "capsize": 3, "elinewidth": 1.5}
        axis.errorbar(places, [100 * row["value"] for row in rows], yerr=spread, label=cell["name"], **style)
    tasks = result["cells"][0]["tasks"]
    axis.set_xticks(range(len(tasks)), [f"{row['task'].replace('_', ' ')}\noff: {row['exact_match']:.1%}" for row in tasks])
    for border in range(len(tasks) - 1):
        axis.axvline(border + 0.5, color="lightgrey", linewidth=1)
    axis.axhline(0, color="grey", linewidth=1)
    axis.axhline(-2, color="black", linestyle="--", linewidth=1)
    axis.set(xlim=(-0.5, len(tasks) - 0.5), ylabel="exact match, points against off")
    measured = result["measured"]
    axis.set_title(f"difference on the same {measured['items']} items a task; intervals hold all together with 95 %")
    axis.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _errors(axis: Any, side: str, layers: dict[str, list[float]]) -> None:
    for number, (layer, values) in enumerate(layers.items()):
        places = [max(edge, 0.5) for edge in BUCKETS[: len(values)]]
        axis.plot(places, [max(v, 1e-8) for v in values], marker=".", color=plt.cm.viridis(number / len(layers)), label=layer)
    axis.set(xscale="log", yscale="log", xlabel="tokens from the replay start", ylabel="relative error of the streams")
    axis.set_title(f"{side}-side replay, by layer")
    axis.legend(fontsize=8, ncols=2)


def _perplexity(axis: Any, windows: dict[str, Any]) -> None:
    for side, values in windows.items():
        buckets = values["perplexity"]
        axis.plot([max(b["from"], 0.5) for b in buckets], [b["loss_increase"] for b in buckets], marker="o", label=f"{side} side")
    axis.axhline(0, color="grey", linewidth=1)
    axis.set(
        xscale="log", xlabel="tokens from the replay start", ylabel="increase of the loss, nats a token", title="held-out text"
    )
    axis.legend()


def loss_curve(logs: list[Path], path: Path) -> None:
    """Losses and held-out accuracy over the steps of one or more stages, one after another."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    offset = 0
    points: dict[str, list[tuple[int, float]]] = {}
    for log in logs:
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            for name, value in row.items():
                if name.endswith("loss"):
                    points.setdefault(name, []).append((offset + row["step"], value))
            for kind, value in row.get("held_out", {}).items():
                points.setdefault(f"held out {kind}", []).append((offset + row["step"], value))
        offset += max(row["step"] for row in rows)
    for name, values in points.items():
        axis = right if name.startswith("held out") else left
        axis.plot(*zip(*values, strict=True), label=name.removeprefix("held out "), linewidth=1)
    left.set(xlabel="step", ylabel="nats a token", yscale="log", title="training loss")
    right.set(xlabel="step", ylabel="exact match", title="held-out items, training forward")
    left.legend()
    right.legend(fontsize=6, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    loss_curve(paths, paths[-1].with_name("training.png"))
