# SPDX-License-Identifier: Apache-2.0
"""The quality harness: which requests the engine really gets, and what counts as a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from perf.quality import eval as quality
from perf.quality.blocks import Block, Crew, Outcome
from perf.quality.cells import CELLS, CHANGED, EXACT, OFF, Marks
from perf.quality.eval import compared, moved
from perf.quality.items import LONG_TASKS
from perf.quality.serving import Answer, Cell, Question, Server, Serving, is_right, shift
from perf.quality.windows import Windows

from cedar.config.presets import preset
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.engine.work import StepResult, StepWork
from cedar.errors import CedarError
from cedar.model.make import make_checkpoint


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    model = tmp_path_factory.mktemp("quality") / "tiny"
    make_checkpoint(preset("tiny"), model, seed=5)
    return Server(Serving(model, device="cpu", dtype="float32", ops="auto", chunk=64, sequences=4, items=32))


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    draw = Random(0)
    prompts = [tuple(draw.randrange(11, 400) for _ in range(length)) for length in (90, 300, 70, 400, 500, 250)]
    return [Question("noise", prompt, (5, 6, 7, 1)) for prompt in prompts]


def test_a_cold_cell_finds_a_prefix_or_a_hit_cell_finds_none(server: Server, questions: list[Question]) -> None:
    for cell in CELLS[:7]:
        answers = server.answer(questions, cell)
        window, page = server.runner.config.sliding_window, server.runner.page_tokens
        for question, answer in zip(questions, answers, strict=True):
            length = len(question.prompt)
            expected = min(round(length * cell.hit), length - 1) // page * page if cell.hit else 0
            expected = expected if expected > window else 0
            assert answer.cached_tokens == expected, cell.name
            bounded = cell.encoder is EncoderReplay.BOUNDED
            assert answer.replayed_tokens == (window if expected and bounded else 0), cell.name
            assert len(answer.first) == 5
            assert 1 <= len(answer.token_ids) <= len(question.answer) + 4


def test_answers_depend_on_the_items_served_beside_them(server: Server, questions: list[Question]) -> None:
    together = server.answer(questions, OFF)
    alone = [server.answer([question], OFF)[0] for question in questions]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]


def test_a_bounded_cell_changes_nothing(server: Server, questions: list[Question]) -> None:
    """Prompts are many windows long, so each bounded side must move the first logits; exact must not."""
    base = server.answer(questions, OFF)
    moved = {
        cell.name: [shift(a, b) > CHANGED for a, b in zip(base, own, strict=True)]
        for cell, own in zip(CELLS[1:5], server.answers(questions, CELLS[1:5]), strict=True)
    }
    assert all(moved["both"][1:2] + moved["both"][3:5])
    assert all(moved["decoder"])
    assert all(moved["encoder"][1:2] + moved["encoder"][3:5])
    assert not any(moved["exact"])


def test_small_chunks_are_large_or_change_an_answer(server: Server, questions: list[Question]) -> None:
    """An engine of its own cuts the prompts, over the same runner."""
    rows: list[int] = []
    step = server.runner.step

    def counted(work: StepWork) -> StepResult:
        rows.append(sum(len(item.token_ids) for item in work.prefills))
        return step(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.runner, "step", counted)
        small = server.answer(questions, replace(OFF, chunk=16))
        assert max(rows) == 16
        rows.clear()
        assert [a.token_ids for a in server.answer(questions, OFF)] == [a.token_ids for a in small]
        assert max(rows) == 64


def test_sequences_wait_for_memory_in_a_mode(server: Server, questions: list[Question]) -> None:
    """The budget is made so that as many sequences as were asked for run at one time, whatever the replay mode."""
    most = 0
    step = server.runner.step

    def counted(work: StepWork) -> StepResult:
        nonlocal most
        most = max(most, server.runner.usage().sequences)
        return step(work)

    for cell in CELLS[:7]:
        most = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.runner, "step", counted)
            server.answer(questions, cell)
        assert most == 4, cell.name


def test_a_lost_prefix_is_a_hit(server: Server) -> None:
    """A prompt whose cached prefix was evicted would be measured as the cold prompt that it then is."""
    question, cell = Question("noise", tuple(range(11, 311)), (5, 1)), CELLS[1]
    hit = server._hit(len(question.prompt), cell.hit)
    server._check_hits([(question, cell)], [Answer(cached_tokens=hit)])
    with pytest.raises(CedarError, match=f"both: 0 tokens of a prompt were cached instead of {hit}"):
        server._check_hits([(question, cell)], [Answer(cached_tokens=0)])


def test_fp8_records_are_fp4_records(server: Server, questions: list[Question]) -> None:
    """They take the window record's bytes and are nearer to the unquantised entries, so they change logits."""
    other = Server(replace(server.serving, global_kv="fp8", decoder=DecoderReplay.OFF))
    source = server.runner.config.kv_source_layer_ids[0]
    fp4, fp8 = (one.runner.cache.kv(source).record for one in (server, other))
    assert (fp4.width, fp8.width) == (9 * fp4.dim // 16, 33 * fp8.dim // 32)
    answers = zip(server.answer(questions, OFF), other.answer(questions, replace(OFF, global_kv="fp8")), strict=True)
    assert all(shift(a, b) > CHANGED for a, b in answers)


def test_a_wrong_answer_counts_as_right() -> None:
    question = Question("x", (1, 2), (5, 6, 1))
    assert is_right(question, Answer([5, 6, 1]))
    for wrong in ([5, 6], [5, 6, 1, 1], [5, 7, 1], []):
        assert not is_right(question, Answer(wrong))


def test_a_worse_or_idle_cell_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures name the cell and the task; a bounded cell whose logits differ from off's by rounding alone, as those of exact do,
    fails however good it is."""
    questions = [Question(kind, (1,), (5, 1)) for kind in ("copy", "recall") for _ in range(600)]
    right = [Answer([5, 1], ((5, -0.1),)) for _ in questions]
    base = Marks.of(questions, right, right)
    draw = Random(0)
    rounded, again = ([Answer([5, 1], ((5, -0.1 - 0.01 * draw.random()),)) for _ in questions] for _ in range(2))
    exact = Marks.of(questions, right, rounded)
    worse = [Answer([5 if n % 10 else 6, 1], ((5, -0.2),)) if n < 600 else Answer([5, 1], ((5, -0.2),)) for n in range(1200)]

    def cell(name: str, own: list[Answer], kind: Cell) -> dict[str, object]:
        modes = {"encoder_replay": kind.encoder.value, "decoder_replay": kind.decoder.value}
        marks = Marks.of(questions, right, own)
        farther = moved(marks, exact, marks.right)
        tasks = compared(base, marks, exact, 4)
        return {"name": name, **modes, "hit": 0.0, "replayed_tokens": 0, "moved": farther, "tasks": tasks}

    bounded = Cell("decoder", EncoderReplay.OFF, DecoderReplay.BOUNDED)
    answers = {"off": (right, OFF), "worse": (worse, bounded), "idle": (again, bounded), "exact": (rounded, EXACT)}
    failures = quality._failures([cell(name, own, kind) for name, (own, kind) in answers.items()])
    assert len(failures) == 2
    assert failures[0].startswith("worse, copy: -10.00%")
    assert failures[1].startswith("idle: log-probabilities are those of off")


def test_window_errors_are_of_the_wrong_layers_or_rows(server: Server) -> None:
    """A hit of H tokens: nothing is wrong in the first layer once the window is past, everything before has an error that
    falls; the cut layer of a bounded decoder is exact, the layers behind it are not."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(11, 400, 160).tolist() for _ in range(2)]
    found = Windows(server.runner, 64).measure(texts, 96)
    window, cut = server.runner.config.sliding_window, server.runner.config.cut
    assert window == 8
    encoder, decoder = (found[side]["relative_error"] for side in ("encoder", "decoder"))
    assert list(encoder) == [str(layer) for layer in range(cut)]
    assert encoder["0"][0] > 1e-3  # the first replayed row
    assert max(encoder["0"][2:]) < 1e-6  # from 8 tokens on
    assert encoder["1"][2] > 1e-6
    assert decoder[str(cut)][0] < 1e-6
    assert all(values[0] > 1e-3 for layer, values in decoder.items() if int(layer) > cut)
    for side in ("encoder", "decoder"):
        assert all(bucket["perplexity_full"] > 1 for bucket in found[side]["perplexity"])


def test_a_result_counts_blocks_that_nobody_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four blocks of two items two are finished: four items a task; the blocks' file takes them to the next run."""
    marks = Marks({task: [True, True] for task in LONG_TASKS}, {task: [0.5, 0.5] for task in LONG_TASKS}, 10, 0, 128)
    seen: list[list[int]] = []

    def run(crew: Crew) -> Outcome:
        seen.append(list(crew._jobs))
        names = [cell.name for cell in crew._plan.cells]
        crew._outcome.blocks += [Block(number, marks, dict.fromkeys(names, marks)) for number in seen[-1][:2]]
        crew._outcome.left = seen[-1][2:]
        return crew._outcome

    monkeypatch.setattr(Crew, "run", run)
    (tmp_path / "text.json.xz").touch()
    arguments = {"data": tmp_path, "items": 8, "block": 2, "texts": 0, "device": "cpu", "cells": "both", "model": Path("small")}
    for output, resume, items in (("a.json", None, 4), ("b.json", tmp_path / "a.blocks.json", 8)):
        with pytest.raises(SystemExit):
            quality.main(**arguments, resume=resume, output=tmp_path / output)  # type: ignore[arg-type]
        result = json.loads((tmp_path / output).read_text())
        assert (result["measured"]["items"], result["measured"]["blocks_left"]) == (items, (8 - items) // 2)
        assert [row["n"] for row in result["cells"][1]["tasks"]] == [items] * len(LONG_TASKS)
    assert seen == [[0, 1, 2, 3], [2, 3]]
    assert (tmp_path / "b.png").stat().st_size > 10_000
