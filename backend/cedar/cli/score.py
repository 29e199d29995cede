# SPDX-License-Identifier: Apache-2.0
"""`cedar score`: the logits of every position of a prompt, through the engine's own path."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cedar.config.engine import EngineConfig
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.errors import invalid


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Ops(StrEnum):
    REFERENCE = "reference"
    NATIVE = "native"
    AUTO = "auto"


def command(
    input_ids: Annotated[Path, typer.Option(help="JSON file: a list of token ids")],
    output: Annotated[Path, typer.Option(help="file to write: .npz with float32 array logits [T, vocab]")],
    model: Annotated[str | None, typer.Option(help="checkpoint directory; none: the embedded model")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="rows per prefill step; none: max_num_batched_tokens")] = None,
    prefix_hit: Annotated[int, typer.Option(help="simulate a prefix-cache hit of exactly this many tokens")] = 0,
    encoder_replay: Annotated[EncoderReplay | None, typer.Option(help="encoder side, after a prefix hit")] = None,
    decoder_replay: Annotated[DecoderReplay | None, typer.Option(help="decoder side")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="arithmetic of activations")] = None,
    fake_quant: Annotated[Switch, typer.Option(help="the cache and index quantisers, part of the model")] = Switch.ON,
    act_quant: Annotated[Switch, typer.Option(help="FP8 activations of the quantised linears")] = Switch.OFF,
    ops: Annotated[Ops | None, typer.Option(help="provider of the fused operations")] = None,
) -> None:
    """Write the logits of every position; NaN where a replay mode does not compute a position to the end."""
    import numpy as np

    from cedar.engine.runner import ModelRunner
    from cedar.engine.score import score

    flags = {"model": model, "dtype": dtype, "fake_quant": fake_quant == "on", "act_quant": act_quant == "on", "ops": ops}
    settings = EngineConfig.load(flags)
    ids = _read_ids(input_ids)
    output = _writable(output)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        loading = bar.add_task("Loading", total=None)
        runner = ModelRunner.load(settings, lambda done, total, name: bar.update(loading, completed=done, total=total))
        bar.remove_task(loading)
        scoring = bar.add_task("Scoring", total=len(ids) + prefix_hit)
        logits = score(
            runner,
            ids,
            chunk_size=settings.max_num_batched_tokens if chunk_size is None else chunk_size,
            prefix_hit=prefix_hit,
            encoder_replay=encoder_replay or EncoderReplay(settings.encoder_replay_mode),
            decoder_replay=decoder_replay or DecoderReplay(settings.decoder_replay_mode),
            on_rows=lambda rows: bar.advance(scoring, rows),
        )
    with output.open("wb") as file:
        np.savez(file, logits=logits)
    computed = int(np.isfinite(logits[:, 0]).sum())
    console.print(f"{output}: {computed} of {len(ids)} positions computed to the end")


def _read_ids(path: Path) -> list[int]:
    allowed = "a JSON list of token ids, such as [0, 17, 4]"
    try:
        ids: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid("--input-ids", f"{path} cannot be read ({error})", allowed) from None
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise invalid("--input-ids", f"{path} holds something else", allowed)
    return ids


def _writable(path: Path) -> Path:
    """Found out before the work, not after it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise invalid("--output", f"{path} cannot be written", "a file in a directory that exists")
    return path
