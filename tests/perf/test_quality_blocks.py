# SPDX-License-Identifier: Apache-2.0
"""Blocks of items over several processes: what happens to results when workers are many, slow or dead."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from perf.quality.blocks import WINDOWS, Block, Crew, Outcome, Plan
from perf.quality.cells import CELLS, OFF, Marks
from perf.quality.corpus import Corpus
from perf.quality.items import LATER, LONG_TASKS, Sets
from perf.quality.serving import Serving

from cedar.config.presets import preset
from cedar.model.make import make_checkpoint


def plan_of(model: Path = Path("none"), *, items: int = 4, block: int = 1, texts: int = 0, workers: int = 1) -> Plan:
    base = Serving(model, device="cpu", dtype="float32", ops="auto", chunk=256, sequences=16, items=64)
    return Plan(base, (OFF, CELLS[1]), model / "text.json.xz", seed=3, items=items, block=block, texts=texts, workers=workers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("quality") / "tiny"
    make_checkpoint(preset("tiny"), model, seed=5)
    lines = "\n".join(f"the {n}th line says that {n * n} is a square" for n in range(400))
    Corpus({f"file{n}": lines for n in range(60)}).save(model / "text.json.xz")
    return model


def measured(plan: Plan) -> Outcome:
    begun = time.monotonic()
    outcome = Crew(plan, 200, lambda: time.monotonic() - begun).run()
    assert not outcome.lost
    assert not outcome.left
    return outcome


def test_results_depend_on_the_number_of_workers(model: Path) -> None:
    one, two = (measured(plan_of(model, items=2, workers=workers)) for workers in (1, 2))
    assert [block.number for block in one.blocks] == [block.number for block in two.blocks] == [0, 1]
    for a, b in zip(one.blocks, two.blocks, strict=True):
        assert a.alone.right == b.alone.right
        for name, marks in a.cells.items():
            assert (marks.right, marks.shifts) == (b.cells[name].right, b.cells[name].shifts)
            assert marks.cached_tokens == b.cells[name].cached_tokens
    whole = Marks.joined(block.cells["both"] for block in one.blocks)
    assert list(whole.right) == list(LONG_TASKS)
    assert {len(values) for values in whole.right.values()} == {2}
    assert all(min(values) > 0 for values in whole.shifts.values())


def test_an_item_depends_on_its_block(model: Path) -> None:
    sets = Sets(model, Corpus.load(model / "text.json.xz"), 3)
    for make, tasks in ((sets.alone, LATER), (sets.long, LONG_TASKS)):
        together, apart = make(range(3)), [make(range(n, n + 1)) for n in range(3)]
        assert [question.kind for question in together] == [task for task in tasks for _ in range(3)]
        for place, question in enumerate(together):
            assert question == apart[place % 3][place // 3]
        assert len(set(together)) == len(together)


def tell_where(plan: Plan, connection: Connection) -> None:
    """A worker that only says what it sees."""
    connection.send(("failed", os.environ["CUDA_VISIBLE_DEVICES"]))


def test_all_workers_crowd_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    plan = replace(plan_of(Path("none"), items=4, workers=3), gpus=("3", "5"))
    outcome = Crew(plan, 60, lambda: 0.0).run(tell_where)
    assert sorted(outcome.lost) == ["3", "3", "5"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


def work_or_die(plan: Plan, connection: Connection) -> None:
    """A worker that dies in block 1 and fails in block 2."""
    connection.send(("ready", "nothing"))
    while (job := connection.recv()) is not None:
        if job == 1:
            os._exit(7)
        if job == 2:
            connection.send(("failed", "Traceback\nZeroDivisionError: a block of no items"))
            return
        connection.send(("part", 1))
        connection.send(("done", {"encoder": {}} if job == WINDOWS else Block(job, Marks(), {})))


def test_a_dead_worker_hangs_the_others_or_is_not_told() -> None:
    told: list[str] = []
    crew = Crew(plan_of(items=5, texts=1, workers=3), 60, lambda: 0.0, lost=told.append)
    outcome = crew.run(work_or_die)
    assert outcome.windows == {"encoder": {}}
    assert [block.number for block in outcome.blocks] == [0, 3, 4]
    assert outcome.left == [1, 2]
    assert sorted(outcome.lost) == sorted(told)
    assert sorted(why.splitlines()[-1] for why in told) == [
        "ZeroDivisionError: a block of no items",
        "a worker ended without a word, exit code 7",
    ]


def test_nobody_is_left_and_the_parent_waits() -> None:
    outcome = Crew(plan_of(items=3, workers=1), 60, lambda: 0.0).run(work_or_die)
    assert [block.number for block in outcome.blocks] == [0]
    assert outcome.left == [1, 2]
    assert len(outcome.lost) == 1


def work(plan: Plan, connection: Connection) -> None:
    connection.send(("ready", "nothing"))
    while (job := connection.recv()) is not None:
        connection.send(("part", 1))
        connection.send(("done", Block(job, Marks(), {})))


def test_a_block_is_begun_that_cannot_be_finished() -> None:
    """Each takes 40 s by the crew's clock: the third would end after 100."""
    now = 0.0

    def told(_: int) -> None:
        nonlocal now
        now += 40.0

    outcome = Crew(plan_of(items=4), 100.0, lambda: now, told).run(work)
    assert [block.number for block in outcome.blocks] == [0, 1]
    assert outcome.left == [2, 3]
    assert outcome.runs == [80.0]


def work_for_ever(plan: Plan, connection: Connection) -> None:
    connection.send(("ready", "nothing"))
    connection.recv()
    connection.recv()


def test_a_worker_that_hangs_outlives_the_time() -> None:
    begun = time.monotonic()
    crew = Crew(plan_of(items=2, workers=2), 8.0, lambda: time.monotonic() - begun)
    outcome = crew.run(work_for_ever)
    assert (outcome.blocks, outcome.left) == ([], [0, 1])
    assert 8.0 <= outcome.runs[0] < 30.0


def test_a_resumed_run_repeats_or_forgets_a_block() -> None:
    first = Crew(plan_of(items=3, workers=1), 60, lambda: 0.0).run(work_or_die)
    kept = Outcome(blocks=[Block.from_dict(block.as_dict()) for block in first.blocks])
    assert kept.blocks == first.blocks
    begun: list[int] = []
    second = Crew(plan_of(items=3), 60, lambda: 0.0, begun.append, done=kept).run(work)
    assert [block.number for block in second.blocks] == [0, 1, 2]
    assert begun == [1, 1]


def test_marks_change_on_their_way_through_a_file() -> None:
    marks = Marks({"copy": [True, False, True]}, {"copy": [False, False, True]}, 30, 20, 10, 4, 1.5)
    assert Marks.from_dict(json.loads(json.dumps(marks.as_dict()))) == marks
