# SPDX-License-Identifier: Apache-2.0
"""What the trained model can do, and what SWA bounded replay does to it: exact match through the engine, on held-out items.

    python -m perf.quality.eval --items 1000 --device cuda --sequences 4096 --chunk 8192 --cache-gib 30
    python -m perf.quality.eval --items 20 --cells 'both;decoder'     # on a CPU, minutes

Every cell is compared with "off" (nothing bounded, nothing cached) on the same items. Exit status 1: a comparison fails, or a
bounded cell changed nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from perf.quality import plots
from perf.quality.corpus import Corpus
from perf.quality.data import Encoder, draw_for
from perf.quality.paired import Difference, Share
from perf.quality.prepare import DIRECTORY
from perf.quality.serving import Answer, Cell, Question, Server, is_changed, is_right
from perf.quality.tasks import TASKS, Draw, Item, after_notes, recall_at
from perf.quality.windows import Windows
from rich.table import Table

from cedar.bench import facts
from cedar.bench.screen import progress, report_console
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.text.tokenizer import load_tokenizer

OFF, BOUNDED, EXACT = "off", "bounded", "exact"
CELLS = (
    Cell("off", EncoderReplay.OFF, DecoderReplay.OFF),
    Cell("both", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=0.75),
    Cell("decoder", EncoderReplay.OFF, DecoderReplay.BOUNDED),
    Cell("encoder", EncoderReplay.BOUNDED, DecoderReplay.OFF, hit=0.75),
    Cell("exact", EncoderReplay.OFF, DecoderReplay.EXACT),
    Cell("both, late hit", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=1.0),
    Cell("both, early hit", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=0.5),
    Cell("both, small chunks", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=0.75, chunk=128),
)
"""The first is what the others are compared with."""
LATER = ("copy", "arithmetic", "word_problem", "chain", "program", "tool_call")
NOTES_TOKENS = 420
DISTANCES = (256, 512, 1024, 1600)
ALONE = (*LATER, *(f"recall_{distance}" for distance in DISTANCES))
MARGIN = -0.02
"""A cell passes when its interval lies above this."""


class Sets:
    """Held-out items as questions: half of them with reasoning."""

    def __init__(self, model: Path, data: Path, seed: int) -> None:
        self.encoder = Encoder(load_tokenizer(model))
        self.corpus = Corpus.load(data / "text.json.xz")
        self._seed = seed

    def alone(self, count: int) -> list[Question]:
        """Short prompts, where bounded replay changes nothing: what the model can do."""
        return [self._question(kind, n, TASKS[kind](self._draw(kind, n), 160)) for kind in LATER for n in range(count)]

    def long(self, count: int) -> list[Question]:
        """Prompts of several windows: each task after a page of notes, and recall over controlled distances."""
        found = []
        for kind in LATER:
            for n in range(count):
                draw = self._draw(f"later {kind}", n)
                found.append(self._question(kind, n, after_notes(draw, TASKS[kind](draw, 160), NOTES_TOKENS)))
        for distance in DISTANCES:
            for n in range(count):
                item = recall_at(
                    self._draw(f"recall {distance}", n), distance, lambda text: len(self.encoder.tokenizer.encode(text))
                )
                found.append(self._question(item.kind, n, item))
        return found

    def texts(self, count: int, length: int) -> list[list[int]]:
        """Token ids of passages of held-out text."""
        draw = self._draw("text", 0)
        found: list[list[int]] = []
        while len(found) < count:
            passage = self.corpus.passage(draw.random, 8 * length, held_out=True)
            ids = [self.encoder.tokenizer.bos_id, *self.encoder.tokenizer.encode(passage)]
            if len(ids) >= length:
                found.append(ids[:length])
        return found

    def _draw(self, name: str, number: int) -> Draw:
        return draw_for(f"{self._seed} {name} {number}", self.corpus)

    def _question(self, kind: str, number: int, item: Item) -> Question:
        thinking = number % 2 == 0
        prompt = self.encoder.prompt(item, thinking=thinking)
        return Question(kind, tuple(prompt), tuple(self.encoder.completion(item.turns[-1], thinking=thinking)))


def by_kind(questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, list[bool]]:
    """Right or wrong, in the order of the questions."""
    found: dict[str, list[bool]] = defaultdict(list)
    for question, answer in zip(questions, answers, strict=True):
        found[question.kind].append(is_right(question, answer))
    return found


def compared(questions: Sequence[Question], base: Sequence[Answer], other: Sequence[Answer], cells: int) -> list[dict[str, Any]]:
    """One row a task. changed: share of the items whose first logits are not the base's."""
    right, reference = by_kind(questions, other), by_kind(questions, base)
    changed: dict[str, list[bool]] = defaultdict(list)
    for question, a, b in zip(questions, base, other, strict=True):
        changed[question.kind].append(is_changed(a, b))
    rows = []
    for kind, values in right.items():
        difference = Difference.of(reference[kind], values, cells)
        share = Share.of(values)
        rows.append(
            {
                "task": kind,
                "exact_match": round(share.value, 4),
                "standard_error": round(share.error, 4),
                "changed": round(sum(changed[kind]) / len(values), 4),
                "passes": difference.low > MARGIN,
                **{name: round(value, 5) for name, value in asdict(difference).items()},
            }
        )
    return rows


def main(
    model: Annotated[Path, typer.Option(help="checkpoint directory")] = DIRECTORY.parent / "model",
    data: Annotated[Path, typer.Option(help="what perf.quality.prepare wrote: held-out text")] = DIRECTORY,
    items: Annotated[int, typer.Option(help="items of each task")] = 200,
    texts: Annotated[int, typer.Option(help="held-out texts for perplexity and window errors")] = 16,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    sequences: Annotated[int, typer.Option(help="items served at one time; a GPU takes thousands")] = 32,
    chunk: Annotated[int, typer.Option(help="tokens of a step; a GPU takes thousands")] = 512,
    cache_gib: Annotated[float, typer.Option(help="memory for caches")] = 1.0,
    cells: Annotated[str, typer.Option(help="names of the cells, by semicolon; empty: all")] = "",
    seconds: Annotated[float, typer.Option(help="begin no further cell after this long")] = 1e9,
    dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="of the items")] = 1,
    output: Annotated[Path, typer.Option(help="result file; the plots go beside it")] = DIRECTORY.parent / "quality.json",
) -> None:
    """Measure and compare."""
    console, begun = report_console(), time.monotonic()
    chosen = [cell for cell in CELLS if not cells or cell.name in ("off", *(name.strip() for name in cells.split(";")))]
    sets = Sets(model, data, seed)
    alone, long = sets.alone(items), sets.long(items)
    servers: dict[int, Server] = {}
    answers: dict[str, list[Answer]] = {}
    timings: dict[str, float] = {}
    with progress(console) as bar:
        cache_bytes = int(cache_gib * 2**30)
        for size in {cell.chunk or chunk for cell in chosen}:
            servers[size] = Server(model, device=device, chunk=size, dtype=dtype, sequences=sequences, cache_bytes=cache_bytes)
        task = bar.add_task("alone", total=len(alone))
        short = servers[chunk].answer(alone, CELLS[0], lambda: bar.advance(task))
        for cell in list(chosen):
            if time.monotonic() - begun > seconds:
                chosen.remove(cell)
                console.print(f"not measured for want of time: {cell.name}")
                continue
            started = time.monotonic()
            task = bar.add_task(cell.name, total=len(long))
            server = servers[cell.chunk or chunk]
            answers[cell.name] = server.answer(long, cell, lambda task=task: bar.advance(task))  # type: ignore[misc]
            timings[cell.name] = round(time.monotonic() - started, 1)
        task = bar.add_task("windows", total=texts)
        windows = Windows(servers[chunk].runner, 512).measure(sets.texts(texts, 1152), 512, lambda: bar.advance(task))
    result = facts.header("answers of the trained model by replay mode")
    comparisons = (len(chosen) - 1) * len({question.kind for question in long})
    result |= {
        "measured": {"model": str(model), "items": items, "seed": seed, "comparisons": comparisons, "device": _device(servers)},
        "alone": [{"task": kind, **_share(values)} for kind, values in by_kind(alone, short).items()],
        "cells": [
            _cell(cell, chunk, timings[cell.name], long, answers["off"], answers[cell.name], comparisons) for cell in chosen
        ],
        "windows": windows,
    }
    result["failures"] = _failures(result["cells"])
    facts.write(output, result)
    plots.draw(result, output.with_suffix(".png"))
    _show(result, console)
    console.print(f"{output}, {output.with_suffix('.png')}")
    raise SystemExit(1 if result["failures"] else 0)


def _device(servers: dict[int, Server]) -> str:
    parameter = next(next(iter(servers.values())).runner.model.parameters())
    return torch.cuda.get_device_name() if parameter.is_cuda else "cpu"


def _share(values: Sequence[bool]) -> dict[str, Any]:
    share = Share.of(values)
    return {"n": share.n, "exact_match": round(share.value, 4), "standard_error": round(share.error, 4)}


def _cell(
    cell: Cell,
    chunk: int,
    seconds: float,
    questions: Sequence[Question],
    base: Sequence[Answer],
    own: Sequence[Answer],
    comparisons: int,
) -> dict[str, Any]:
    return {
        "name": cell.name,
        "encoder_replay": cell.encoder.value,
        "decoder_replay": cell.decoder.value,
        "hit": cell.hit,
        "chunk": cell.chunk or chunk,
        "seconds": seconds,
        "prompt_tokens": sum(len(question.prompt) for question in questions),
        "cached_tokens": sum(answer.cached_tokens for answer in own),
        "replayed_tokens": sum(answer.replayed_tokens for answer in own),
        "tasks": compared(questions, base, own, max(1, comparisons)),
    }


def _failures(cells: list[dict[str, Any]]) -> list[str]:
    """What does not hold: an interval that reaches below the margin, a bounded cell that computes what "off" computes."""
    found = []
    for cell in cells[1:]:
        found += [
            f"{cell['name']}, {row['task']}: {row['value']:+.2%} ({row['low']:+.2%} to {row['high']:+.2%})"
            for row in cell["tasks"]
            if not row["passes"]
        ]
        if BOUNDED in (cell["encoder_replay"], cell["decoder_replay"]) and not any(row["changed"] for row in cell["tasks"]):
            found.append(f"{cell['name']}: no log-probability differs from those of off")
        if cell["hit"] and not cell["replayed_tokens"]:
            found.append(f"{cell['name']}: no prefix was found")
    return found


def _show(result: dict[str, Any], console: Any) -> None:
    table = Table(title=f"exact match, {result['measured']['items']} items a task; difference from off and its interval")
    table.add_column("task")
    table.add_column("alone", justify="right")
    for cell in result["cells"]:
        table.add_column(cell["name"], justify="right")
    alone = {row["task"]: f"{row['exact_match']:.1%}" for row in result["alone"]}
    for index, row in enumerate(result["cells"][0]["tasks"]):
        shown = [f"{row['exact_match']:.1%}"]
        for cell in result["cells"][1:]:
            other = cell["tasks"][index]
            shown.append(
                f"{other['value']:+.1%} ({other['low']:+.1%}, {other['high']:+.1%}){'' if other['passes'] else ' FAILS'}"
            )
        table.add_row(row["task"], alone.get(row["task"], ""), *shown)
    console.print(table)
    for failure in result["failures"]:
        console.print(f"FAILS {failure}")


if __name__ == "__main__":
    typer.run(main)
