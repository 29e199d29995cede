# SPDX-License-Identifier: Apache-2.0
"""Blocks of items, answered in every cell by one of several processes that share a device.

A block is self-contained: its items are served together and compared with their own answers of off, so results depend neither on
the number of processes nor on which of them took it. The parent hands out jobs over one pipe per process: one that dies closes
its pipe and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from perf.quality.cells import OFF, Marks
from perf.quality.corpus import Corpus
from perf.quality.items import Sets
from perf.quality.serving import Answer, Cell, Server, Serving
from perf.quality.windows import Windows

WINDOWS = -1
"""The job that is no block."""
WINDOW_TOKENS, WINDOW_HIT, WINDOW_CHUNK = 1152, 512, 512
CONTEXT_BYTES = 700 << 20
"""What a process takes of a GPU beside its tensors."""
SLOWER = 1.15
"""A block may take so much longer than the slowest before it."""
ENDING_SECONDS = 5.0


@dataclass(frozen=True)
class Plan:
    """What every worker is told. data: held-out text (`Corpus.load`). block: items of each task in a block; the last may have
    fewer. base: how all cells are served that do not say otherwise. gpus: that the workers take turns on, as
    CUDA_VISIBLE_DEVICES names them; none: whatever a process sees."""

    base: Serving
    cells: tuple[Cell, ...]
    data: Path
    seed: int
    items: int
    block: int
    texts: int
    workers: int
    gpus: tuple[str, ...] = ()

    @property
    def jobs(self) -> list[int]:
        """Numbers of the blocks, behind the windows, which take less long."""
        return [WINDOWS] * bool(self.texts) + list(range(-(-self.items // self.block)))

    def serving(self, cell: Cell) -> Serving:
        """How a cell is served. Only base serves more than cold prompts in mode off."""
        ops = cell.ops or self.base.ops
        if (ops, cell.global_kv) == (self.base.ops, self.base.global_kv):
            return self.base
        return replace(self.base, ops=ops, global_kv=cell.global_kv, decoder=cell.decoder)

    def groups(self) -> dict[tuple[Serving, int], list[Cell]]:
        """Cells that can be served together, by how and by chunk size; off comes first."""
        found: dict[tuple[Serving, int], list[Cell]] = {}
        for cell in self.cells:
            found.setdefault((self.serving(cell), cell.chunk), []).append(cell)
        return found

    def numbers(self, block: int) -> range:
        """Items of a block."""
        return range(block * self.block, min(self.items, (block + 1) * self.block))


@dataclass(frozen=True)
class Block:
    """What the items of one block got, by cell; ``alone``: short prompts."""

    number: int
    alone: Marks
    cells: dict[str, Marks]

    @property
    def size(self) -> int:
        """Items of a task."""
        return max(map(len, self.alone.right.values()), default=0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        cells = {name: marks.as_dict() for name, marks in self.cells.items()}
        return {"number": self.number, "alone": self.alone.as_dict(), "cells": cells}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Block:
        """The inverse."""
        cells = {name: Marks.from_dict(marks) for name, marks in data["cells"].items()}
        return cls(data["number"], Marks.from_dict(data["alone"]), cells)


class Worker:
    """What one process does."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        self._plan = plan
        self._sets = Sets(plan.base.model, Corpus.load(plan.data), plan.seed)
        self._servers: dict[Serving, Server] = {}
        if plan.base.device != "cpu" and torch.cuda.is_available():
            total = torch.cuda.get_device_properties(0).total_memory
            neighbours = -(-plan.workers // max(1, len(plan.gpus)))
            torch.cuda.set_per_process_memory_fraction(0.97 * (1 / neighbours - CONTEXT_BYTES / total))
        self._server(plan.base)

    @property
    def device(self) -> str:
        parameter = next(self._server(self._plan.base).runner.model.parameters())
        return torch.cuda.get_device_name() if parameter.is_cuda else "cpu"

    def block(self, number: int, told: Callable[[int], object]) -> Block:
        """Answer a block. ``told``: called with the number of cells that are newly done."""
        plan = self._plan
        numbers, base = plan.numbers(number), self._server(plan.base)
        alone, long = self._sets.alone(numbers), self._sets.long(numbers)
        short = base.answer(alone, OFF)
        cells: dict[str, Marks] = {}
        reference: list[Answer] = []
        for (serving, _), together in plan.groups().items():
            begun = time.monotonic()
            found = self._server(serving).answers(long, together)
            reference = reference or found[0]
            share = (time.monotonic() - begun) / len(together)
            for cell, answers in zip(together, found, strict=True):
                cells[cell.name] = Marks.of(long, reference, answers, share)
            told(len(together))
        return Block(number, Marks.of(alone, short, short), cells)

    def windows(self) -> dict[str, Any]:
        """See `Windows.measure`."""
        runner = self._server(self._plan.base).runner
        return Windows(runner, WINDOW_CHUNK).measure(self._sets.texts(self._plan.texts, WINDOW_TOKENS), WINDOW_HIT)

    def _server(self, serving: Serving) -> Server:
        if serving not in self._servers:
            self._servers[serving] = Server(serving)
        return self._servers[serving]


def work(plan: Plan, connection: Connection) -> None:
    """A process: does the jobs that come, says (what, value)."""
    try:
        worker = Worker(plan)
        connection.send(("ready", worker.device))
        while (job := connection.recv()) is not None:
            done = worker.windows() if job == WINDOWS else worker.block(job, lambda cells: connection.send(("part", cells)))
            connection.send(("done", done))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


@dataclass
class _Hand:
    process: BaseProcess
    connection: Connection
    job: int | None = None
    since: float = 0.0


@dataclass
class Outcome:
    """blocks: those that were finished, by number. lost: of each worker that died, why. left: blocks that nobody finished. runs:
    seconds that each run took, with those whose blocks it went on from."""

    blocks: list[Block] = field(default_factory=list)
    windows: dict[str, Any] | None = None
    lost: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    device: str = ""
    runs: list[float] = field(default_factory=list)


class Crew:
    """The processes. done: what an earlier crew finished, to go on from. clock: seconds since the measurement began; it ends at
    ``seconds``, and no block is begun that is expected to end later. told: called with the number of cells that are newly done;
    lost: with the reason why a worker died."""

    def __init__(
        self,
        plan: Plan,
        seconds: float,
        clock: Callable[[], float],
        told: Callable[[int], object] = lambda _: None,
        lost: Callable[[str], object] = lambda _: None,
        done: Outcome | None = None,
    ) -> None:
        self._plan, self._seconds, self._clock = plan, seconds, clock
        self._told, self._lost = told, lost
        self._slowest = 0.0
        self._outcome = done or Outcome()
        finished = {block.number for block in self._outcome.blocks} | ({WINDOWS} if self._outcome.windows else set())
        self._jobs = deque(job for job in plan.jobs if job not in finished)
        self._hands: dict[Connection, _Hand] = {}

    def run(self, target: Callable[[Plan, Connection], None] = work) -> Outcome:
        """Until all jobs are done, or the time is over, or no worker is left."""
        try:
            for number in range(min(self._plan.workers, len(self._jobs))):
                with _seeing(self._plan.gpus, number):
                    self._start(target)
            while self._hands and (left := self._seconds - self._clock()) > 0:
                for connection in wait(list(self._hands), timeout=left):
                    assert isinstance(connection, Connection)
                    self._hear(self._hands[connection])
        finally:
            _end([hand.process for hand in self._hands.values()])
        outcome = self._outcome
        outcome.blocks.sort(key=lambda block: block.number)
        finished = {block.number for block in outcome.blocks}
        outcome.left = [job for job in self._plan.jobs if job != WINDOWS and job not in finished]
        outcome.runs.append(self._clock())
        return outcome

    def _start(self, target: Callable[[Plan, Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(self._plan, theirs), daemon=True)
        process.start()
        theirs.close()
        self._hands[ours] = _Hand(process, ours)

    def _hear(self, hand: _Hand) -> None:
        try:
            what, value = hand.connection.recv()
        except (EOFError, OSError):
            hand.process.join(ENDING_SECONDS)
            what, value = "failed", f"a worker ended without a word, exit code {hand.process.exitcode}"
        if what == "part":
            self._told(value)
        elif what == "failed":
            self._outcome.lost.append(value)
            self._lost(value)
            self._dismiss(hand)
        else:
            self._take(hand, value)
            self._give(hand)

    def _take(self, hand: _Hand, value: Any) -> None:
        """What a worker has done: nothing yet, the windows or a block."""
        if hand.job is None:
            self._outcome.device = value
        elif hand.job == WINDOWS:
            self._outcome.windows = value
        else:
            self._outcome.blocks.append(value)
            self._slowest = max(self._slowest, self._clock() - hand.since)

    def _give(self, hand: _Hand) -> None:
        if not self._jobs or self._clock() + SLOWER * self._slowest > self._seconds:
            hand.connection.send(None)
            self._dismiss(hand)
            return
        hand.job, hand.since = self._jobs.popleft(), self._clock()
        hand.connection.send(hand.job)

    def _dismiss(self, hand: _Hand) -> None:
        del self._hands[hand.connection]
        _end([hand.process], ENDING_SECONDS)
        hand.connection.close()


@contextmanager
def _seeing(gpus: Sequence[str], number: int) -> Iterator[None]:
    """What is started in the block sees one GPU, in turns."""
    name, before = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ[name] = gpus[number % len(gpus)]
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif gpus:
            del os.environ[name]


def _end(processes: Sequence[BaseProcess], patience: float = 0.0) -> None:
    """Let them end by themselves for so long, then end them."""
    for process in processes:
        process.join(patience)
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(ENDING_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
