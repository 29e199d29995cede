# SPDX-License-Identifier: Apache-2.0
"""What the trained model can do, and what SWA bounded replay does to it: exact match through the engine, on held-out items.

    python -m perf.quality.prepare
    python -m perf.quality.eval --items 1024 --block 16 --workers 12 --device cuda --sequences 600 --chunk 8192 --seconds 1135
    python -m perf.quality.eval --items 40 --block 20 --ops auto --cells 'both;decoder'     # on a CPU, minutes

Every cell is compared with "off" (nothing bounded, nothing cached) on the same items. Items are served in blocks, of which each
worker process takes one after another; what is finished when the time is over is the result. Exit status 1: a comparison fails, a
bounded cell changed nothing, or a worker died.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import typer
from perf.quality import kept, plots
from perf.quality.blocks import Crew, Outcome, Plan
from perf.quality.cells import CELLS, CHANGED, EXACT, OFF, Marks
from perf.quality.items import LONG_TASKS
from perf.quality.paired import Difference, Share
from perf.quality.prepare import DIRECTORY
from perf.quality.serving import GROUPS, Cell, Serving
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cedar.bench import facts
from cedar.bench.screen import report_console
from cedar.errors import CedarError, invalid
from cedar.model.embedded import embedded_model_dir

BOUNDED = "bounded"
MARGIN = -0.02
"""A cell passes when its interval lies above this."""
MOVED = 0.6
"""Share of the items whose first logits a bounded cell must move by more than rounding does; one that does nothing has 0.5."""
CHUNKS = {"cpu": 2048, "cuda": 4096}
SEQUENCES = {"cpu": 32, "cuda": 448}
LEAST_ITEMS = 594
"""With fewer, the interval of no change reaches the margin, when all cells are compared."""
CUT = 2
"""As many times the chunks of off must a cell of chunks so many times smaller have."""
SHOWN = 12
"""Failures that are printed."""


def compared(base: Marks, own: Marks, exact: Marks, cells: int) -> list[dict[str, Any]]:
    """One row a task. shift: how far the first logits are from off's, median; moved: see `moved`."""
    rows = []
    for task, values in own.right.items():
        difference = Difference.of(base.right[task], values, cells)
        share = Share.of(values)
        rows.append(
            {
                "task": task,
                "exact_match": round(share.value, 4),
                "standard_error": round(share.error, 4),
                "moved": round(moved(own, exact, [task]), 4),
                "shift": float(f"{median(own.shifts[task]):.3g}"),
                "passes": difference.low > MARGIN,
                **{name: round(value, 5) for name, value in asdict(difference).items()},
            }
        )
    return rows


def moved(own: Marks, exact: Marks, tasks: Iterable[str]) -> float:
    """Share of the items whose first logits are farther from off's than those of exact, which computes the same as off by the
    same operations in another order: bfloat16 rounding alone may move them by 0.1."""
    pairs = [
        (shift, max(CHANGED, rounding))
        for task in tasks
        for shift, rounding in zip(own.shifts[task], exact.shifts[task], strict=True)
    ]
    return sum(shift > rounding for shift, rounding in pairs) / len(pairs)


def main(
    model: Annotated[Path | None, typer.Option(help="checkpoint directory; none: the embedded model")] = None,
    data: Annotated[Path, typer.Option(help="what perf.quality.prepare wrote: held-out text")] = DIRECTORY,
    items: Annotated[int, typer.Option(help=f"items of each task; with all cells at least {LEAST_ITEMS} to pass")] = 1024,
    block: Annotated[int, typer.Option(help="items of each task in a block: the unit that a process takes")] = 40,
    workers: Annotated[int, typer.Option(help="processes that serve blocks; 0: one for each core, but no more than blocks")] = 0,
    seconds: Annotated[
        float, typer.Option(help="end after this long, loading included, with the blocks that are finished")
    ] = 3600,
    texts: Annotated[int, typer.Option(help="held-out texts for perplexity and window errors; 0: none")] = 16,
    cells: Annotated[str, typer.Option(help="names of the cells beside off and exact, by semicolon; empty: all")] = "",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16")] = "float32",
    ops: Annotated[str, typer.Option(help="operations of all cells but the reference's: auto | native | reference")] = "auto",
    sequences: Annotated[int, typer.Option(help="requests served at one time; 0: 448 on a GPU, 32 on a CPU")] = 0,
    chunk: Annotated[int, typer.Option(help="tokens of a step; 0: 4,096 on a GPU, 2,048 on a CPU")] = 0,
    seed: Annotated[int, typer.Option(help="of the items")] = 1,
    resume: Annotated[
        Path | None, typer.Option(help="blocks that an earlier run of the same command left beside its result: go on from there")
    ] = None,
    output: Annotated[Path, typer.Option(help="result file; the plot goes beside it")] = DIRECTORY.parent / "quality.json",
) -> None:
    """Answer held-out items in every replay mode and compare with off on the same items.

    Cells by replay side: off; both, decoder, encoder, exact (a hit of 75 % where the encoder side is bounded). Others: both,
    late hit; both, early hit; both, small chunks; decoder, small chunks; off, reference operations; off, FP8 global KV. Exact is
    always among them: it says what rounding moves. What the time does not allow is left out, and said; --resume adds it.
    """
    begun = psutil.Process().create_time()
    for name, value in (("items", items), ("block", block)):
        if value < 1:
            raise invalid(f"--{name}", f"is {value}", "at least 1")
    if not (data / "text.json.xz").is_file():
        raise invalid("--data", f"{data} has no text.json.xz", "a directory that python -m perf.quality.prepare wrote")
    on, model = _device(device), model or embedded_model_dir()
    plan = Plan(
        base=_serving(model, on, dtype, ops, block, sequences, chunk),
        cells=_chosen(cells),
        data=data / "text.json.xz",
        seed=seed,
        items=items,
        block=min(block, items),
        texts=texts,
        workers=0,
        gpus=_gpus() if on == "cuda" else (),
    )
    blocks = -(-items // plan.block)
    done = kept.load(resume, plan) if resume else Outcome()
    plan = replace(plan, workers=min(workers or len(os.sched_getaffinity(0)), blocks + bool(texts)))
    console = report_console()
    with _shown(console, blocks, len(plan.cells)) as (told, lost):
        told(len(done.blocks) * len(plan.cells))
        outcome = Crew(plan, seconds, lambda: time.time() - begun, told, lost, done).run()
    if not outcome.blocks:
        console.print(f"no block was finished in {outcome.runs[-1]:.0f} s: give more --seconds or a smaller --block")
        raise SystemExit(1)
    result = _result(plan, outcome)
    facts.write(output, result)
    kept.save(output.with_suffix(".blocks.json"), plan, outcome)
    plots.draw(result, output.with_suffix(".png"))
    _show(result, console)
    console.print(f"{output}, {output.with_suffix('.png')}")
    raise SystemExit(1 if result["failures"] else 0)


def _device(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise invalid("--device", f"is {name!r}", "auto | cpu | cuda")
    return name if name != "auto" else "cuda" if torch.cuda.device_count() else "cpu"


def _gpus() -> tuple[str, ...]:
    """All that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")) if named else tuple(map(str, range(torch.cuda.device_count())))


def _serving(model: Path, device: str, dtype: str, ops: str, block: int, sequences: int, chunk: int) -> Serving:
    whole = block * len(LONG_TASKS) * len(CELLS)
    at_once = min(whole, sequences or SEQUENCES[device])
    return Serving(
        model=model,
        device=device,
        dtype=dtype,
        ops=ops,
        chunk=chunk or CHUNKS[device],
        sequences=at_once,
        items=min(whole, GROUPS * at_once),
    )


def _chosen(names: str) -> tuple[Cell, ...]:
    """The cells of these names behind off and exact."""
    if not names:
        return CELLS
    wanted = [name.strip() for name in names.split(";")]
    known = {cell.name: cell for cell in CELLS}
    for name in wanted:
        if name not in known:
            raise invalid("--cells", f"names {name!r}", "; ".join(known))
    return (OFF, *(cell for cell in CELLS[1:] if cell is EXACT or cell.name in wanted))


@contextmanager
def _shown(console: Console, blocks: int, cells: int) -> Iterator[tuple[Any, Any]]:
    """A bar over the blocks, of ``cells`` parts each; where it cannot move, a line for each. Gives what `Crew` tells."""
    columns = (
        TextColumn("blocks"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("blocks", total=blocks)
        parts = 0

        def told(more: int) -> None:
            nonlocal parts
            parts += more
            bar.update(task, completed=parts / cells)
            if not console.is_terminal and parts % cells < more:
                console.print(f"the work of {parts // cells} of {blocks} blocks is done, {bar.tasks[0].elapsed or 0:.0f} s")

        yield told, lambda why: console.print(f"a worker died: {why}", markup=False)


def _result(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    comparisons = max(1, (len(plan.cells) - 1) * len(LONG_TASKS))
    marks = {cell.name: Marks.joined(block.cells[cell.name] for block in outcome.blocks) for cell in plan.cells}
    result = facts.header("answers of the trained model by replay mode")
    result["command"] = kept.one_command(result["command"], outcome.runs)
    result["measured"] = {
        "model": plan.base.model.name,
        "digest": kept.digest(plan),
        "code": kept.code(),
        "items": sum(len(plan.numbers(block.number)) for block in outcome.blocks),
        "blocks": len(outcome.blocks),
        "items_of_a_block": plan.block,
        "blocks_left": len(outcome.left),
        "seed": plan.seed,
        "comparisons": comparisons,
        "device": outcome.device,
        "gpus": len(plan.gpus),
        "dtype": plan.base.dtype,
        "ops": plan.base.ops,
        "workers": plan.workers,
        "chunk": plan.base.chunk,
        "sequences": plan.base.sequences,
        "seconds_of_runs": [round(seconds, 1) for seconds in outcome.runs],
    }
    alone = Marks.joined(block.alone for block in outcome.blocks)
    result["alone"] = [{"task": task, **_share(values)} for task, values in alone.right.items()]
    result["cells"] = [_cell(cell, plan, marks, comparisons) for cell in plan.cells]
    if outcome.windows is not None:
        result["windows"] = outcome.windows
    lost = [f"a worker died: {why.strip().splitlines()[-1]}" for why in outcome.lost]
    result["failures"] = _failures(result["cells"]) + lost
    return result


def _share(values: Sequence[bool]) -> dict[str, Any]:
    share = Share.of(values)
    return {"n": share.n, "exact_match": round(share.value, 4), "standard_error": round(share.error, 4)}


def _cell(cell: Cell, plan: Plan, marks: dict[str, Marks], comparisons: int) -> dict[str, Any]:
    serving, own, exact = plan.serving(cell), marks[cell.name], marks[EXACT.name]
    return {
        "name": cell.name,
        "encoder_replay": cell.encoder.value,
        "decoder_replay": cell.decoder.value,
        "hit": cell.hit,
        "chunk": cell.chunk or serving.chunk,
        "chunks_of_a_prompt": round(own.chunks / sum(map(len, own.right.values())), 2),
        "ops": serving.ops,
        "device": serving.device,
        "global_kv": serving.global_kv,
        "seconds": round(own.seconds, 1),
        "prompt_tokens": own.prompt_tokens,
        "cached_tokens": own.cached_tokens,
        "replayed_tokens": own.replayed_tokens,
        "shift": float(f"{own.shift:.3g}"),
        "moved": round(moved(own, exact, own.right), 4),
        "tasks": compared(marks[OFF.name], own, exact, comparisons),
    }


def _failures(cells: list[dict[str, Any]]) -> list[str]:
    """What does not hold: an interval that reaches below the margin; a cell that computes what "off" computes, finds no prefix or
    cuts no prompts, though it should."""
    found = []
    for cell in cells[1:]:
        found += [
            f"{cell['name']}, {row['task']}: {row['value']:+.2%} ({row['low']:+.2%} to {row['high']:+.2%})"
            for row in cell["tasks"]
            if not row["passes"]
        ]
        if BOUNDED in (cell["encoder_replay"], cell["decoder_replay"]) and cell["moved"] < MOVED:
            found.append(f"{cell['name']}: log-probabilities are those of off but for rounding")
        if (cell["ops"], cell["global_kv"]) != (cells[0]["ops"], cells[0]["global_kv"]) and not cell["moved"]:
            found.append(f"{cell['name']}: log-probabilities are those of off")
        if cell["hit"] and not cell["replayed_tokens"]:
            found.append(f"{cell['name']}: no prefix was found")
        if cell["chunk"] <= cells[0]["chunk"] // CUT and cell["chunks_of_a_prompt"] < CUT * cells[0]["chunks_of_a_prompt"]:
            found.append(f"{cell['name']}: prompts were not cut, they took {cell['chunks_of_a_prompt']} chunks")
    return found


def _show(result: dict[str, Any], console: Console) -> None:
    """One row a cell, one column a task. Intervals in points; ! marks one that reaches below the margin."""
    cells, measured = result["cells"], result["measured"]
    table = Table(title=f"exact match, {measured['items']} items a task; then differences from off in points", show_lines=True)
    table.add_column("cell")
    for row in cells[0]["tasks"]:
        table.add_column(row["task"].replace("_", " "), justify="right")
    alone = {row["task"]: f"{row['exact_match']:.1%}" for row in result["alone"]}
    table.add_row("short, off", *(alone.get(row["task"], "") for row in cells[0]["tasks"]))
    table.add_row("off", *(f"{row['exact_match']:.1%}" for row in cells[0]["tasks"]))
    for cell in cells[1:]:
        table.add_row(cell["name"], *(_points(row) for row in cell["tasks"]))
    console.print(table)
    failures = result["failures"]
    for failure in failures[:SHOWN]:
        console.print(f"FAILS {failure}", markup=False)
    if len(failures) > SHOWN:
        console.print(f"and {len(failures) - SHOWN} more, in the result file")


def _points(row: dict[str, Any]) -> str:
    value, low, high = (f"{100 * row[name]:+.1f}" for name in ("value", "low", "high"))
    return f"{value}{'' if row['passes'] else ' !'}\n{low}\n{high}"


if __name__ == "__main__":
    try:
        typer.run(main)
    except CedarError as error:
        sys.exit(str(error))
