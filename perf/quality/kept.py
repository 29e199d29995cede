# SPDX-License-Identifier: Apache-2.0
"""The finished blocks that a run leaves beside its result, for another to go on from: they must be of the same measurement."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from perf.quality import blocks
from perf.quality.blocks import Block, Outcome, Plan

import cedar
from cedar.bench import facts
from cedar.errors import invalid
from cedar.ops import native

_IMPORTED = re.compile(r"^from perf\.quality\.(\w+) import", re.M)
LONGER = 1.5
"""What one run may take of what several took together."""


def identity(plan: Plan) -> dict[str, Any]:
    """All that answers depend on, as JSON gives it back: blocks that are put together have it in common."""
    base = asdict(plan.base) | {"model": plan.base.model.name}
    machine = facts.machine()
    found = {
        **base,
        "hardware": sorted({name.split(",")[0] for name in machine["gpus"]}) if plan.gpus else machine["cpu"],
        "torch": torch.__version__,
        "code": code(),
        "digest": digest(plan),
        "seed": plan.seed,
        "items": plan.items,
        "block": plan.block,
        "texts": plan.texts,
        "cells": [asdict(cell) for cell in plan.cells],
    }
    copied: dict[str, Any] = json.loads(json.dumps(found))
    return copied


def digest(plan: Plan) -> str:
    """Of the model and of the held-out text: a model trained anew has the name of the old one."""
    return _digest([*(file for file in plan.base.model.glob("*") if file.suffix in (".json", ".safetensors")), plan.data])


def code() -> str:
    """Of the sources that a worker runs, and of the kernel library if there is one."""
    library = [path for path in native.candidates() if path.is_file()][:1]
    return _digest([*Path(cedar.__file__).parent.rglob("*.py"), *_sources(Path(blocks.__file__)), *library])


def _sources(file: Path) -> set[Path]:
    """A file of perf.quality and all that it imports of it."""
    found, new = {file}, {file}
    while new:
        names = {name for source in new for name in _IMPORTED.findall(source.read_text(encoding="utf-8"))}
        new = {file.with_name(f"{name}.py") for name in names} - found
        found |= new
    return found


def _digest(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()[:16]


def save(path: Path, plan: Plan, outcome: Outcome) -> None:
    """Beside a result."""
    kept = {"of": identity(plan), "device": outcome.device, "runs": outcome.runs}
    facts.write(path, {**kept, "blocks": [each.as_dict() for each in outcome.blocks], "windows": outcome.windows})


def load(path: Path, plan: Plan) -> Outcome:
    """What is finished. Raises CedarError when it is of another measurement."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    wanted = identity(plan)
    if differ := [name for name, value in wanted.items() if kept["of"].get(name) != value]:
        raise invalid("--resume", f"{path} is of another {', '.join(differ)}", "the blocks of a run with the same settings")
    finished = [Block.from_dict(block) for block in kept["blocks"]]
    return Outcome(blocks=finished, windows=kept["windows"], device=kept["device"], runs=kept["runs"])


def one_command(command: str, runs: list[float]) -> str:
    """The command that gives at once what a resumed run ends with: without --resume, and with the time of all runs."""
    if len(runs) < 2:
        return command
    words = shlex.split(command)
    for option in ("--resume", "--seconds"):
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
        words = [word for word in words if not word.startswith(f"{option}=")]
    return shlex.join([*words, "--seconds", str(math.ceil(LONGER * sum(runs)))])
