# SPDX-License-Identifier: Apache-2.0
"""Train the small model on one GPU, in runs that resume where the last one stopped.

    python -m perf.quality.prepare                                # text and tokenizer: build/quality/data
    python -m perf.quality.train --steps 2500                     # as often as needed: build/quality/tasks
    python -m perf.quality.export --state build/quality/tasks/state.pt --out build/quality/tasks/model
    python -m perf.quality.train --stage conversations --start build/quality/tasks/model --steps 480
    python -m perf.quality.export --state build/quality/conversations/state.pt --tokenizer build/quality/tasks/model

The same seed, stage, step count and batch give the same data in the same order, whenever a run was interrupted. Sums on a GPU are
not in a fixed order, so the weights of two trainings agree only in what they can do.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tokenizers
import torch
import typer
from perf.quality import fake, parts
from perf.quality.data import ROWS, Rows, shards
from perf.quality.hashing import EngramRows
from perf.quality.optim import Optimiser
from perf.quality.prepare import DIRECTORY
from perf.quality.probe import Probe
from perf.quality.released import read_weights
from perf.quality.settings import complete_config
from perf.quality.train_model import TrainModel
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.model.checkpoint import CheckpointReader
from cedar.model.engram import EngramHasher, TokenMap

BALANCE = 1e-3
"""How far a gate bias moves a step towards an equal load of the experts."""
FUSED = ("read", "boundary", "collapse_norm", "expand", "expert_activation", "engram_inject", "weighted_loss")
FUSED_DYNAMIC = ("rms", "rotate", "index_scores", "index_loss", "pool_pairs")
FUSED_QUANTISERS = ("fp8_groups", "fp8_tiles", "mxfp4", "nvfp4")
"""Functions that a GPU runs as one or two kernels each. Those after the first tuple are called with many shapes."""
REPAID_FROM = 1000
"""Steps from which compiling the quantisers costs less time than it saves."""


@dataclass(frozen=True)
class Phase:
    """sparse: rows attend only to what the indexer selects. quantised: weights go through their storage formats."""

    sparse: bool
    quantised: bool


@dataclass(frozen=True)
class Plan:
    """steps of ``shards_per_step`` shards. rate: of Muon and, times a multiple, AdamW; it rises over ``warmup`` steps and falls
    linearly over the last part of the training. sparse_from, quantised_from: shares of the training where phases begin."""

    steps: int
    stage: str = "tasks"
    shards_per_step: int = 2
    seed: int = 1
    rate: float = 4e-3
    warmup: int = 100
    decay_from: float = 0.4
    sparse_from: float = 0.4
    quantised_from: float = 0.75

    def phase_at(self, step: int) -> Phase:
        return Phase(step >= self.sparse_from * self.steps, step >= self.quantised_from * self.steps)

    def rate_at(self, step: int) -> float:
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return self.rate * min(1.0, (step + 1) / self.warmup, 0.02 + 0.98 * left)


class Trainer:
    """Weights, optimiser and how far they are."""

    def __init__(self, plan: Plan, directory: Path, device: torch.device, *, compiled: bool) -> None:
        """directory: holds ``tokenizer.json``."""
        self.plan, self.device = plan, device
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        token_map = TokenMap(tokenizer)
        config = ModelConfig.from_dict(complete_config(tokenizer))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = TrainModel(config, dtype)
        self.model.weights.initialise(plan.seed)
        self.model.to(device)
        self.engram_rows = EngramRows(EngramHasher(config, token_map), token_map, device)
        self.optimiser = Optimiser(self.model.weights)
        self.step = 0
        self._phase: Phase | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._warm = 0
        self._inputs: tuple[Tensor, ...] = ()
        self._losses = torch.empty(0)
        if compiled:
            _compile_parts(quantisers=plan.steps >= REPAID_FROM)

    def hidden(self, tokens: Tensor, doc_start: Tensor, phase: Phase) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The model as it is in this phase."""
        rows = self.engram_rows(tokens, doc_start)
        return self.model(tokens, doc_start, rows, sparse=phase.sparse, weight_quant=phase.quantised)  # type: ignore[no-any-return]

    def train_step(self, batch: Rows) -> Tensor:
        """float32 [3]: the loss, that of answer tokens alone, that of the indexers. On a GPU they change with the next step."""
        phase = self.plan.phase_at(self.step)
        self.optimiser.set_rate(self.plan.rate_at(self.step))
        moved = self.move(batch)
        losses = self._captured(phase, *moved) if self.device.type == "cuda" else self._eager(phase, *moved)
        self.step += 1
        return losses

    def _eager(self, phase: Phase, tokens: Tensor, doc_start: Tensor, weight: Tensor) -> Tensor:
        self.optimiser.zero_grad()
        hidden, index_loss, load = self.hidden(tokens, doc_start, phase)
        logits = self.model.logits(hidden, weight_quant=phase.quantised)
        target = torch.nn.functional.pad(tokens[:, 1:], (0, 1)).flatten()
        weight = torch.nn.functional.pad(weight[:, 1:], (0, 1)).flatten()
        loss, answer_loss = parts.weighted_loss(logits, target, weight)
        (loss + index_loss).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self._balance(load)
        return torch.stack([loss.detach(), answer_loss, index_loss.detach()])

    def _captured(self, phase: Phase, *moved: Tensor) -> Tensor:
        """The same step as a CUDA graph: its thousands of small kernels take longer to launch than to run. The first steps of a
        phase run eagerly, which compiles and allocates what capturing may not."""
        if phase != self._phase:
            self._phase, self._graph, self._warm = phase, None, 0
            self._inputs = moved
        for mine, new in zip(self._inputs, moved, strict=True):
            mine.copy_(new)
        if self._warm < 3:
            self._warm += 1
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                losses = self._eager(phase, *self._inputs)
            torch.cuda.current_stream().wait_stream(self._stream)
            return losses
        if self._graph is None:
            self.optimiser.zero_grad()
            torch.cuda.empty_cache()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._losses = self._eager(phase, *self._inputs)
        self._graph.replay()
        return self._losses

    @torch.no_grad()
    def _balance(self, load: list[Tensor]) -> None:
        """Experts that got less than their share become easier to choose (auxiliary-loss-free balancing)."""
        for layer, share in enumerate(load):
            self.model.weights(f"layers.{layer}.ffn.gate.bias").add_((share.mean() - share).sign(), alpha=BALANCE)

    def move(self, batch: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """tokens and doc_start int64, weight float32, on the device."""
        tokens, start = (torch.from_numpy(array.astype(np.int64)).to(self.device) for array in (batch.tokens, batch.doc_start))
        return tokens, start, torch.from_numpy(batch.weight.astype(np.float32)).to(self.device)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"plan": asdict(self.plan), "step": self.step, "weights": self.model.weights.state_dict()}
        torch.save(state | {"optimiser": self.optimiser.state_dict()}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise SystemExit(f"{path} belongs to another plan: {state['plan']}")
        self.step = state["step"]
        self.model.weights.load_state_dict(state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])


def _compile_parts(*, quantisers: bool) -> None:
    torch._dynamo.config.recompile_limit = 64
    for name in FUSED:
        setattr(parts, name, torch.compile(getattr(parts, name), dynamic=False))
    for name in FUSED_DYNAMIC:
        setattr(parts, name, torch.compile(getattr(parts, name), dynamic=True))
    for name in FUSED_QUANTISERS if quantisers else ():
        setattr(fake, name, torch.compile(getattr(fake, name), dynamic=True))


def joined(source: Iterator[Rows], count: int) -> Iterator[Rows]:
    """Batches of ``count`` shards."""
    while group := list(islice(source, count)):
        yield Rows(*(np.concatenate([getattr(rows, name) for rows in group]) for name in ("tokens", "doc_start", "weight")))


STAGES = {
    "tasks": {"rate": 4e-3, "warmup": 100, "decay_from": 0.4, "sparse_from": 0.4, "quantised_from": 0.75},
    "conversations": {"rate": 1.5e-3, "warmup": 30, "decay_from": 0.1, "sparse_from": 0.5, "quantised_from": 0.0},
}
"""From random weights; and from a checkpoint that is trained already. While rows attend only to what is selected, an indexer
learns nothing of what it misses; so the second stage lets it see all of the attention once more."""


def main(
    stage: Annotated[str, typer.Option(help=" | ".join(STAGES))] = "tasks",
    steps: Annotated[int, typer.Option(help="steps of the whole stage")] = 2500,
    seconds: Annotated[float, typer.Option(help="stop, and save, after this long")] = 500.0,
    start: Annotated[Path | None, typer.Option(help="checkpoint directory to begin with; none: random weights")] = None,
    until: Annotated[float, typer.Option(help="stop, and save, at this share of the steps")] = 1.0,
    shards_per_step: Annotated[int, typer.Option(help=f"shards of {ROWS} rows a step")] = 2,
    seed: Annotated[int, typer.Option()] = 1,
    data: Annotated[Path, typer.Option(help="what perf.quality.prepare wrote")] = DIRECTORY,
    out: Annotated[Path | None, typer.Option(help="checkpoint and log; default: build/quality/STAGE")] = None,
    workers: Annotated[int, typer.Option(help="processes that make data")] = 8,
    compiled: Annotated[bool, typer.Option(help="fuse with torch.compile")] = True,
    probe_every: Annotated[int, typer.Option(help="steps between measurements on held-out items")] = 400,
) -> None:
    """Train, or go on training."""
    begun = time.monotonic()
    plan = Plan(steps, stage, shards_per_step, seed, **STAGES[stage])  # type: ignore[arg-type]
    out = out or DIRECTORY.parent / stage
    state, log = out / "state.pt", out / "log.jsonl"
    first = int(torch.load(state, map_location="cpu", weights_only=True, mmap=True)["step"]) if state.is_file() else 0
    tokenizer = start or data
    source = shards(data, tokenizer, seed, stage, first * shards_per_step, steps * shards_per_step, workers)
    batches = joined(source, shards_per_step)
    batch = next(batches)  # forks the workers, before the GPU is touched
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(plan, tokenizer, device, compiled=compiled and device.type == "cuda")
    if start is not None:
        read_weights(trainer.model.weights, CheckpointReader(start).read)
    if first:
        trainer.load(state)
    probe = Probe(data, tokenizer, trainer)
    out.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:

        def note(**values: Any) -> None:
            line = json.dumps({"step": trainer.step, "seconds": round(time.monotonic() - begun, 2), **values})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        while True:
            losses = trainer.train_step(batch)
            if trainer.step % 20 == 0 or trainer.step < first + 5:
                names = ("loss", "answer_loss", "index_loss")
                values = dict(zip(names, (round(value, 4) for value in losses.tolist()), strict=True))
                note(**values)
                if not math.isfinite(values["loss"]):
                    raise SystemExit("the loss is not finite; nothing was saved")
            done = trainer.step >= round(until * steps)
            if trainer.step % probe_every == 0 or done:
                note(held_out=probe())
            if done or time.monotonic() - begun > seconds:
                break
            batch = next(batches)
    trainer.save(state)
    print(
        f"{state}: step {trainer.step} of {steps}, {trainer.step * ROWS * shards_per_step * 2048 / 1e6:.0f} M tokens", flush=True
    )
    os._exit(0)  # workers are still making data that nobody needs


if __name__ == "__main__":
    typer.run(main)
