# SPDX-License-Identifier: Apache-2.0
"""`cedar inspect`: what a checkpoint is, what it costs to serve, and whether it is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cedar.cli.generate import quiet_pipe, write
from cedar.config.presets import PRESETS, preset
from cedar.errors import CedarError, ErrorCode, invalid

if TYPE_CHECKING:
    from cedar.config.model import ModelConfig

NUMERICS = {
    "weights": "FP8 E4M3 in 32x32 tiles, routed experts MXFP4 in rows of 32; the CPU path dequantises them, exactly",
    "caches": "FP8 window KV, FP4 global KV, MXFP4 index keys and queries: part of the model (--fake-quant, on)",
    "activations": "FP8 inputs of quantised linears: a speed option (--act-quant, off)",
    "always float32": "mHC coefficients and mixing, norms, RoPE, softmax, gate, SwiGLU, Engram gate, logits",
}


def command(
    directory: Annotated[Path | None, typer.Argument(help="Checkpoint directory.")] = None,
    preset_name: Annotated[str, typer.Option("--preset", help=f"A configuration without weights: {' | '.join(PRESETS)}")] = "",
    kv: Annotated[bool, typer.Option("--kv", help="The caches of a sequence instead, by allocating them.")] = False,
    tokens: Annotated[int | None, typer.Option(help="With --kv: length of the sequence (32768, or the longest).")] = None,
    kv_cache_bytes: Annotated[int | None, typer.Option(help="With --kv: a KV budget; tells what it buys.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Tell what a checkpoint is: configuration, layer schedule, bytes by part, KV bytes per token, completeness.

    With --kv: what a sequence takes in the caches, as allocated, and what a budget buys.
    """
    from cedar.config.model import ModelConfig

    if (directory is None) == (not preset_name):
        raise invalid("DIRECTORY", "give a checkpoint directory or --preset", "one of the two")
    config = ModelConfig.from_dict(preset(preset_name)) if directory is None else ModelConfig.load(directory)
    name = str(directory or preset_name)
    if kv:
        _show_kv(name, config, tokens, kv_cache_bytes, as_json)
        return
    for option, value in (("--tokens", tokens), ("--kv-cache-bytes", kv_cache_bytes)):
        if value is not None:
            raise invalid(option, "is given without --kv", "both or none")
    report = describe(config)
    failure: CedarError | None = None
    if directory is None:
        report["check"] = _self_check(config, preset_name)
    else:
        try:
            report["check"] = _verify(directory)
        except CedarError as error:
            failure = error
            report["check"] = {"complete": False, "problems": error.message.splitlines()[1:]}
    with quiet_pipe():
        write(json.dumps({"name": name, **report}) + "\n" if as_json else _tables(name, report))
    if failure is not None:
        raise failure


def _show_kv(name: str, config: ModelConfig, tokens: int | None, kv_cache_bytes: int | None, as_json: bool) -> None:
    from cedar.cli.inspect_kv import describe_kv, tables_kv
    from cedar.config.engine import EngineConfig

    report = describe_kv(config, EngineConfig.load({"kv_cache_bytes": kv_cache_bytes}), tokens)
    with quiet_pipe():
        write(json.dumps({"name": name, **report}) + "\n" if as_json else tables_kv(name, report))


def describe(config: ModelConfig) -> dict[str, Any]:
    """Everything that follows from the configuration alone, ready for JSON."""
    from cedar.model.layout import expected_tensors

    parts: dict[str, dict[str, int]] = {}
    for spec in expected_tensors(config).values():
        part = parts.setdefault(spec.part, {"tensors": 0, "bytes": 0})
        part["tensors"] += 1
        part["bytes"] += spec.nbytes
    names = ("index", "ratio", "mode", "kv_source", "index_source", "candidate_source", "uses_candidates", "engram")
    return {
        "config": config.model_dump(),
        "cut": config.cut,
        "layers": [{name: getattr(layer, name) for name in names} for layer in config.layers],
        "parts": parts,
        "kv_bytes_per_token": config.kv_bytes_per_token,
        "window_bytes_per_sequence": config.window_bytes_per_sequence,
        "numerics": NUMERICS,
    }


def _verify(directory: Path) -> dict[str, Any]:
    from cedar.model.checkpoint import CheckpointReader

    reader = CheckpointReader(directory)
    result = reader.verify()
    return {
        "complete": True,
        "shards": len(reader.shards),
        "text_tensors": result.text_tensors,
        "text_bytes": result.text_bytes,
        "skipped": {part: {"tensors": count, "bytes": size} for part, (count, size) in result.skipped.items()},
    }


def _self_check(config: ModelConfig, name: str) -> dict[str, Any]:
    """No weights here: count what a complete checkpoint holds, and hold the release's count against the published one."""
    from cedar.model.layout import RELEASE_TENSORS, count_tensors

    count = count_tensors(config)
    if name == "release" and count != RELEASE_TENSORS:
        raise CedarError(ErrorCode.INTERNAL, f"the release has {RELEASE_TENSORS} tensors, this layout gives {count}")
    return {"complete": None, "tensors": count}


def _tables(name: str, report: Mapping[str, Any]) -> str:
    console = Console()
    with console.capture() as capture:
        _print(console, name, report)
    return capture.get()


def _print(console: Console, name: str, report: Mapping[str, Any]) -> None:
    config = report["config"]
    console.print(f"[bold]{name}[/]", highlight=False)
    rows = {key: value for key, value in config.items() if not isinstance(value, dict | tuple)}
    console.print(pairs("Configuration", rows))
    schedule = Table(title=f"Layer schedule (encoder 0-{report['cut'] - 1}, decoder from {report['cut']})")
    for heading in ("layers", "ratio", "mode", "KV of", "selection of", ""):
        schedule.add_column(heading)
    for row in _runs(report["layers"]):
        schedule.add_row(*row)
    console.print(schedule)
    console.print(_parts(report["parts"], report["check"]))
    length = config["max_position_embeddings"]
    memory = {
        "global KV per token": f"{report['kv_bytes_per_token']:g} B",
        f"global KV of {length:,} tokens": size_text(round(report["kv_bytes_per_token"] * length)),
        f"windows per sequence ({config['sliding_window']} tokens a layer)": size_text(report["window_bytes_per_sequence"]),
    }
    console.print(pairs("Memory of a sequence (packed caches)", memory))
    console.print(pairs("Numerics", report["numerics"]))
    console.print(_verdict(report["check"]), highlight=False)


def _parts(parts: Mapping[str, Mapping[str, int]], check: Mapping[str, Any]) -> Table:
    """What follows from the configuration; then the vision tower, which a text server skips and therefore cannot size."""
    table = Table(title="Checkpoint by part")
    for heading in ("part", "tensors", "bytes"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for part, size in parts.items():
        table.add_row(part, f"{size['tensors']:,}", size_text(size["bytes"]))
    tensors, size_of_all = (sum(size[key] for size in parts.values()) for key in ("tensors", "bytes"))
    table.add_row("all of these", f"{tensors:,}", size_text(size_of_all), style="bold")
    if check.get("tensors", tensors) != tensors:
        table.add_row("vision tower, not served", f"{check['tensors'] - tensors:,}", "not counted")
        table.add_row("a complete checkpoint", f"{check['tensors']:,}", "", style="bold")
    return table


def pairs(title: str, rows: Mapping[str, Any]) -> Table:
    """Names and values without a heading."""
    table = Table(title=title, show_header=False)
    for key, value in rows.items():
        table.add_row(key, str(value))
    return table


def _runs(layers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Neighbouring layers that do the same as one row."""
    rows: list[tuple[int, int, tuple[str, ...]]] = []
    for layer in layers:
        index = layer["index"]
        notes = {"candidate_source": "candidate source", "uses_candidates": "inside candidates", "engram": "Engram"}
        sources = ["-" if layer[key] is None else str(layer[key]) for key in ("kv_source", "index_source")]
        note = ", ".join(text for key, text in notes.items() if layer[key])
        row = (str(layer["ratio"]), str(layer["mode"]), *sources, note)
        if rows and rows[-1][2] == row:
            rows[-1] = (rows[-1][0], index, row)
        else:
            rows.append((index, index, row))
    return [(str(first) if first == last else f"{first}-{last}", *row) for first, last, row in rows]


def _verdict(check: Mapping[str, Any]) -> str:
    if check["complete"] is None:
        return f"A complete checkpoint has {check['tensors']:,} tensors."
    if not check["complete"]:
        return "[bold red]Not a complete checkpoint.[/]"
    skipped = "".join(f"; {part} {size['tensors']:,} tensors, not served" for part, size in check["skipped"].items())
    return f"[bold green]Complete[/]: {check['text_tensors']:,} text tensors, {size_text(check['text_bytes'])}{skipped}."


def size_text(size: int) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size} B"
