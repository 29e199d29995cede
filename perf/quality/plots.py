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
    """Differences by task and cell, perplexity and window errors by distance."""
    figure, axes = plt.subplots(2, 2, figsize=(14, 10), layout="constrained")
    _differences(axes[0, 0], result)
    _perplexity(axes[0, 1], result["windows"])
    for axis, side in ((axes[1, 0], "encoder"), (axes[1, 1], "decoder")):
        for layer, values in result["windows"][side]["relative_error"].items():
            axis.plot(
                [max(edge, 0.5) for edge in BUCKETS[: len(values)]], [max(v, 1e-8) for v in values], marker=".", label=layer
            )
        axis.set(xscale="log", yscale="log", xlabel="tokens from the replay start", ylabel="relative error of the streams")
        axis.set_title(f"{side}-side replay, by layer")
        axis.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _differences(axis: Any, result: dict[str, Any]) -> None:
    cells = result["cells"][1:]
    for number, cell in enumerate(cells):
        places = [index + (number - len(cells) / 2) * 0.1 for index in range(len(cell["tasks"]))]
        values = [100 * row["value"] for row in cell["tasks"]]
        spread = [
            [100 * (row["value"] - row["low"]) for row in cell["tasks"]],
            [100 * (row["high"] - row["value"]) for row in cell["tasks"]],
        ]
        axis.errorbar(
            places, values, yerr=[[max(0.0, v) for v in side] for side in spread], fmt=".", capsize=2, label=cell["name"]
        )
    names = [row["task"] for row in result["cells"][0]["tasks"]]
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right")
    axis.axhline(-2, color="grey", linestyle="--", linewidth=1)
    axis.set(ylabel="exact match, points against off", title="difference on the same items, 95 % for all together")
    axis.legend(fontsize=7)


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
