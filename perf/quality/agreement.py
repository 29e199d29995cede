# SPDX-License-Identifier: Apache-2.0
"""Does the kernel library choose the same tokens as the reference operations? Teacher-forced, on held-out items and text.

    python -m perf.quality.prepare
    python -m perf.quality.agreement

Every position of a prompt with its right answer is scored by both; where the reference's first two choices are closer than the
margin, rounding may decide. A second reference that starts from embeddings moved by 1e-7 says what rounding alone changes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from perf.quality.corpus import Corpus
from perf.quality.items import LATER, Sets
from perf.quality.prepare import DIRECTORY
from rich.progress import track
from rich.table import Table

from cedar.bench import facts
from cedar.bench.screen import report_console
from cedar.config.engine import EngineConfig
from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.score import score
from cedar.errors import CedarError, invalid
from cedar.model.embedded import embedded_model_dir

MARGIN = 0.5
NOISE = 1e-7
TEXT_TOKENS = 512
Logits = npt.NDArray[np.float32]


@dataclass
class Agreement:
    """Of one kind of text. answers: items; firm: those whose margins stay above `MARGIN` in the answer; kept: of these, the ones
    whose answer is the same, token by token. The shares are of positions, sure: of those with a margin above `MARGIN`."""

    positions: int = 0
    same: int = 0
    sure: int = 0
    sure_same: int = 0
    answers: int = 0
    firm: int = 0
    kept: int = 0

    def add(self, expected: Logits, actual: Logits, answer_from: int | None) -> None:
        """expected, actual: [T, vocab] of the same tokens. answer_from: the position that chooses the answer's first token."""
        best = np.sort(np.partition(expected, -2, axis=-1)[:, -2:], axis=-1)
        sure, same = best[:, 1] - best[:, 0] > MARGIN, expected.argmax(-1) == actual.argmax(-1)
        self.positions += len(same)
        self.same += int(same.sum())
        self.sure += int(sure.sum())
        self.sure_same += int((same & sure).sum())
        if answer_from is not None:
            firm = bool(sure[answer_from:].all())
            self.answers += 1
            self.firm += firm
            self.kept += firm and bool(same[answer_from:].all())

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the shares."""
        return {**asdict(self), "agreement": self.same / self.positions, "sure_agreement": self.sure_same / max(1, self.sure)}


def runner_of(model: Path, ops: str, noise: float = 0.0) -> ModelRunner:
    """A runner on this CPU; noise: relative, on its embeddings."""
    runner = ModelRunner.load(EngineConfig.load({"model": str(model), "device": "cpu", "dtype": "float32", "ops": ops}))
    if noise:
        g = torch.Generator().manual_seed(0)
        runner.model.embed.mul_(1 + noise * torch.randn(runner.model.embed.shape, generator=g))
    return runner


def compare(
    reference: ModelRunner, others: dict[str, ModelRunner], texts: Sequence[tuple[str, Sequence[int], int | None]]
) -> dict[str, dict[str, Agreement]]:
    """By name of the other runner, then by kind. texts: (kind, token ids, position that chooses the answer's first token)."""
    found: dict[str, dict[str, Agreement]] = {name: defaultdict(Agreement) for name in others}
    for kind, ids, answer_from in track(texts, "scoring", console=report_console(), transient=True):
        expected = _scored(reference, ids)
        for name, other in others.items():
            found[name][kind].add(expected, _scored(other, ids), answer_from)
    return found


def _scored(runner: ModelRunner, ids: Sequence[int]) -> Logits:
    return score(runner, ids, chunk_size=len(ids), decoder_replay=DecoderReplay.OFF)


def main(
    model: Annotated[Path | None, typer.Option(help="checkpoint directory; none: the embedded model")] = None,
    data: Annotated[Path, typer.Option(help="what perf.quality.prepare wrote: held-out text")] = DIRECTORY,
    items: Annotated[int, typer.Option(help="of each task")] = 32,
    texts: Annotated[int, typer.Option(help=f"held-out texts of {TEXT_TOKENS} tokens")] = 16,
    seed: Annotated[int, typer.Option(help="of the items")] = 1,
    output: Annotated[Path, typer.Option(help="result file")] = DIRECTORY.parent / "agreement.json",
) -> None:
    """Compare the library's choices with the reference's, position by position, on a CPU in float32."""
    if not (data / "text.json.xz").is_file():
        raise invalid("--data", f"{data} has no text.json.xz", "a directory that python -m perf.quality.prepare wrote")
    model = model or embedded_model_dir()
    sets = Sets(model, Corpus.load(data / "text.json.xz"), seed)
    scored: list[tuple[str, Sequence[int], int | None]] = [
        (question.kind, [*question.prompt, *question.answer[:-1]], len(question.prompt) - 1)
        for question in sets.alone(range(items))
    ]
    scored += [("text", ids, None) for ids in sets.texts(texts, TEXT_TOKENS)]
    others = {"native": runner_of(model, "native"), "reference, noise of 1e-7": runner_of(model, "reference", NOISE)}
    found = compare(runner_of(model, "reference"), others, scored)
    result = facts.header("teacher-forced choices of the kernel library and of the reference operations")
    result["settings"] = {"items": items, "texts": texts, "text_tokens": TEXT_TOKENS, "margin": MARGIN, "seed": seed}
    result["agreement"] = {name: {kind: a.as_dict() for kind, a in kinds.items()} for name, kinds in found.items()}
    facts.write(output, result)
    console = report_console()
    for name, kinds in found.items():
        console.print(_table(f"{name}, against the reference", kinds))
    console.print(str(output))


def _table(title: str, kinds: dict[str, Agreement]) -> Table:
    table = Table(title=title)
    for heading in ("kind", "positions", "same", f"of margins > {MARGIN}", "answers with such margins", "same text"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in (*LATER, "text"):
        if kind in kinds:
            a = kinds[kind].as_dict()
            shares = f"{a['agreement']:.2%}", f"{a['sure_agreement']:.2%}"
            table.add_row(kind, f"{a['positions']:,}", *shares, f"{a['firm']} of {a['answers']}", str(a["kept"]))
    return table


if __name__ == "__main__":
    try:
        typer.run(main)
    except CedarError as error:
        sys.exit(str(error))
