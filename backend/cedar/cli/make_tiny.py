# SPDX-License-Identifier: Apache-2.0
"""`cedar make-tiny`: a random checkpoint in the released layout, of a preset or of any configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cedar.config.presets import PRESETS, preset
from cedar.errors import invalid


def command(
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    preset_name: Annotated[str, typer.Option("--preset", help=" | ".join(PRESETS))] = "",
    config: Annotated[Path | None, typer.Option(help="A config.json of the released layout, instead of a preset.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    shards: Annotated[int, typer.Option(min=0, help="Number of weight files, at most; 0: as few as keep each under 8 GiB.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a random checkpoint in the released layout, with a working tokenizer."""
    from cedar.model.make import make_checkpoint

    if preset_name and config is not None:
        raise invalid("--preset", "is given together with --config", "one of the two")
    content = preset(preset_name or "tiny") if config is None else _read(config)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Writing {out}", total=None)
        make_checkpoint(
            content,
            out,
            seed,
            shards=shards or None,
            force=force,
            progress=lambda done, total, _: bar.update(task, completed=done, total=total),
        )
    size = sum(file.stat().st_size for file in out.iterdir())
    console.print(f"[bold green]{out}[/]: {size / 1e6:.1f} MB, random weights (seed {seed})", highlight=False)
    console.print(f"Look at it:  cedar inspect {out}\nServe it:    cedar serve --model {out}", highlight=False, markup=False)


def _read(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise invalid("--config", f"{path} cannot be read ({error})", "a config.json of the released layout") from error
    if not isinstance(content, dict):
        raise invalid("--config", f"{path} holds a {type(content).__name__}", "a config.json of the released layout")
    return content
