# SPDX-License-Identifier: Apache-2.0
"""The quality harness: which requests the engine really gets, and what counts as a failure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from perf.quality import eval as quality
from perf.quality import kept
from perf.quality.blocks import Block, Crew, Outcome, Plan
from perf.quality.cells import CELLS, CHANGED, EXACT, OFF, SMALL_CHUNK, Marks
from perf.quality.eval import LEAST_ITEMS, MARGIN, compared, moved
from perf.quality.items import LONG_TASKS
from perf.quality.paired import Difference
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


def test_the_cells_of_small_chunks_cut_nothing(server: Server) -> None:
    """A prompt of 1,024 tokens, by what the engine tells of its chunks: those of the pages that a hit finds are small as well."""
    usual = Server(replace(server.serving, chunk=2048))
    question = Question("noise", tuple(Random(1).choices(range(11, 400), k=1024)), (5, 6, 7, 1))
    small = [cell for cell in CELLS if cell.chunk]
    assert sorted(cell.hit for cell in small) == [0.0, 0.75]
    rows: list[int] = []
    step = usual.runner.step

    def counted(work: StepWork) -> StepResult:
        rows.append(sum(len(item.token_ids) for item in work.prefills))
        return step(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usual.runner, "step", counted)
        for cell in small:
            (answer,) = usual.answer([question], cell)
            assert answer.chunks >= 4, cell.name
            assert max(rows) <= SMALL_CHUNK <= 256, cell.name
    for cell in small:
        (answer,) = usual.answer([question], replace(cell, chunk=0))
        assert answer.chunks == (2 if cell.hit else 1), cell.name


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
        modes = {
            "encoder_replay": kind.encoder.value,
            "decoder_replay": kind.decoder.value,
            "chunk": 512,
            "chunks_of_a_prompt": 2.0,
            "ops": kind.ops or "native",
            "global_kv": kind.global_kv,
        }
        marks = Marks.of(questions, right, own)
        farther = moved(marks, exact, marks.right)
        tasks = compared(base, marks, exact, 4)
        return {"name": name, **modes, "hit": 0.0, "replayed_tokens": 0, "moved": farther, "tasks": tasks}

    bounded, fp8 = Cell("decoder", EncoderReplay.OFF, DecoderReplay.BOUNDED), replace(OFF, global_kv="fp8")
    answers = {"off": (right, OFF), "worse": (worse, bounded), "idle": (again, bounded), "exact": (rounded, EXACT)}
    answers |= {"FP8": (worse[600:] * 2, fp8), "same": (right, fp8)}
    failures = quality._failures([cell(name, own, kind) for name, (own, kind) in answers.items()])
    assert len(failures) == 3
    assert failures[0].startswith("worse, copy: -10.00%")
    assert failures[1].startswith("idle: log-probabilities are those of off")
    assert failures[2] == "same: log-probabilities are those of off"


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


def test_a_cell_that_cuts_no_prompt_passes() -> None:
    off = {"name": "off", "chunk": 8192, "chunks_of_a_prompt": 1.1, "ops": "native", "global_kv": "nvfp4", "tasks": []}
    small = {**off, "name": "small", "encoder_replay": "off", "decoder_replay": "off", "hit": 0.0, "chunk": 256}
    assert quality._failures([off, {**small, "chunks_of_a_prompt": 3.4}]) == []
    (failure,) = quality._failures([off, {**small, "chunks_of_a_prompt": 1.4}])
    assert failure == "small: prompts were not cut, they took 1.4 chunks"


@pytest.mark.parametrize("names", ["both", "decoder;both", "exact", ""])
def test_nothing_tells_what_rounding_moves(names: str) -> None:
    """Without the cell exact every item whose first logits differ from off's by rounding would count as moved."""
    chosen = quality._chosen(names)
    assert chosen[0] is OFF
    assert EXACT in chosen
    assert set(names.split(";")) - {""} <= {cell.name for cell in chosen}


def test_the_least_number_of_items_is_not_what_the_help_says() -> None:
    comparisons = (len(CELLS) - 1) * len(LONG_TASKS)
    few, enough = ([True] * (LEAST_ITEMS - missing) for missing in (1, 0))
    assert Difference.of(few, few, comparisons).low <= MARGIN < Difference.of(enough, enough, comparisons).low


def plan_of(directory: Path) -> Plan:
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "text.json.xz"):
        (directory / name).write_text(name)
    base = Serving(directory, device="cpu", dtype="float32", ops="auto", chunk=64, sequences=4, items=32)
    return Plan(base, CELLS[:4], directory / "text.json.xz", seed=1, items=4, block=2, texts=1, workers=1)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("chunk", lambda plan: replace(plan, base=replace(plan.base, chunk=128))),
        ("sequences", lambda plan: replace(plan, base=replace(plan.base, sequences=8))),
        ("dtype", lambda plan: replace(plan, base=replace(plan.base, dtype="bfloat16"))),
        ("device", lambda plan: replace(plan, base=replace(plan.base, device="cuda"))),
        ("ops", lambda plan: replace(plan, base=replace(plan.base, ops="reference"))),
        ("seed", lambda plan: replace(plan, seed=2)),
        ("items", lambda plan: replace(plan, items=6)),
        ("block", lambda plan: replace(plan, block=4)),
        ("texts", lambda plan: replace(plan, texts=2)),
        ("cells", lambda plan: replace(plan, cells=(*plan.cells[:3], replace(plan.cells[3], hit=0.5)))),
        ("hardware", lambda plan: replace(plan, gpus=("0",))),
    ],
)
def test_blocks_of_another_measurement_are_taken(tmp_path: Path, what: str, change: Callable[[Plan], Plan]) -> None:
    plan = plan_of(tmp_path / "model")
    kept.save(tmp_path / "kept.json", plan, Outcome(device="cpu", runs=[1.5]))
    again = kept.load(tmp_path / "kept.json", replace(plan, workers=7))
    assert (again.device, again.runs) == ("cpu", [1.5])
    with pytest.raises(CedarError, match=f"is of another .*{what}"):
        kept.load(tmp_path / "kept.json", change(plan))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "text.json.xz"])
def test_blocks_of_another_model_are_taken(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path / "model")
    kept.save(tmp_path / "kept.json", plan, Outcome())
    (tmp_path / "model" / name).write_text("another")
    with pytest.raises(CedarError, match="is of another digest"):
        kept.load(tmp_path / "kept.json", plan)


def test_blocks_of_another_program_are_taken(tmp_path: Path) -> None:
    """What a worker imports of perf.quality counts, the rest of it does not."""
    source = Path(kept.__file__).parent
    for file in source.glob("*.py"):
        shutil.copy(file, tmp_path)
    names = {file.stem for file in kept._sources(tmp_path / "blocks.py")}
    assert {"blocks", "cells", "serving", "items", "tasks", "words", "windows"} <= names
    assert not names & {"eval", "kept", "plots", "paired", "train"}


def test_the_command_of_a_resumed_run_needs_its_blocks() -> None:
    command = "python -m perf.quality.eval --items 8 --resume 'a b.json' --seconds=220 --output c.json"
    assert kept.one_command(command, [300.0]) == command
    assert kept.one_command(command, [300.0, 100.0]) == "python -m perf.quality.eval --items 8 --output c.json --seconds 600"


def test_a_command_does_not_find_its_package(tmp_path: Path) -> None:
    """What a result calls its command runs where the repository is the working directory."""
    (tmp_path / "tool.py").write_text("from cedar.bench import facts\nprint(facts.header('')['command'])\n")
    for command in (["-m", "tool", "--x", "1"], ["tool.py"]):
        said = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        assert said.stdout.strip() == f"python {' '.join(command)}"


def test_a_result_counts_blocks_that_nobody_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four blocks of two items two are finished: four items a task; the blocks' file takes them to the next run, whose
    result is that of a run which finishes all at once."""
    marks = {
        number: Marks({task: [True, number > 1] for task in LONG_TASKS}, {task: [0.5, number] for task in LONG_TASKS}, 10, 0, 128)
        for number in range(4)
    }
    seen: list[list[int]] = []
    most = 2

    def run(crew: Crew) -> Outcome:
        seen.append(list(crew._jobs))
        names = [cell.name for cell in crew._plan.cells]
        crew._outcome.blocks += [Block(n, marks[n], dict.fromkeys(names, marks[n])) for n in seen[-1][:most]]
        crew._outcome.left, crew._outcome.device = seen[-1][most:], "cpu"
        crew._outcome.runs.append(30.0)
        return crew._outcome

    monkeypatch.setattr(Crew, "run", run)
    (tmp_path / "text.json.xz").touch()
    arguments = {"data": tmp_path, "items": 8, "block": 2, "texts": 0, "device": "cpu", "cells": "both", "model": Path("small")}
    results = []
    for most, resume, items in ((2, None, 4), (2, tmp_path / "a.blocks.json", 8), (4, None, 8)):
        name = "a.json" if most == 2 and not resume else "b.json"
        with pytest.raises(SystemExit):
            quality.main(**arguments, resume=resume, output=tmp_path / name)  # type: ignore[arg-type]
        results.append(json.loads((tmp_path / name).read_text()))
        measured = results[-1]["measured"]
        assert (measured["items"], measured["blocks_left"]) == (items, (8 - items) // 2)
        assert measured.pop("seconds_of_runs") == [30.0] * (2 if resume else 1)
        assert [row["n"] for row in results[-1]["cells"][1]["tasks"]] == [items] * len(LONG_TASKS)
    assert seen == [[0, 1, 2, 3], [2, 3], [0, 1, 2, 3]]
    assert [cell["name"] for cell in results[0]["cells"]] == ["off", "both", "exact"]
    for result in results:
        del result["date"], result["machine"], result["command"]
    assert results[1] == results[2] != results[0]
    assert (tmp_path / "b.png").stat().st_size > 10_000
