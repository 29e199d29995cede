# SPDX-License-Identifier: Apache-2.0
"""The quality harness: which requests the engine really gets, and what counts as a failure."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from perf.quality import eval as quality
from perf.quality.eval import CELLS, compared
from perf.quality.serving import Answer, Cell, Question, Server, is_changed, is_right
from perf.quality.windows import Windows

from cedar.config.presets import preset
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.model.make import make_checkpoint

OFF = CELLS[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    model = tmp_path_factory.mktemp("quality") / "tiny"
    make_checkpoint(preset("tiny"), model, seed=5)
    return Server(model, device="cpu", dtype="float32", chunk=64, sequences=4, cache_bytes=1 << 27)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    draw = Random(0)
    prompts = [tuple(draw.randrange(11, 400) for _ in range(length)) for length in (90, 300, 70, 400, 500, 250)]
    return [Question("noise", prompt, (5, 6, 7, 1)) for prompt in prompts]


def test_a_cold_cell_finds_a_prefix_or_a_hit_cell_finds_none(server: Server, questions: list[Question]) -> None:
    for cell in CELLS[:6]:
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
        cell.name: [is_changed(a, b) for a, b in zip(base, server.answer(questions, cell), strict=True)] for cell in CELLS[1:5]
    }
    assert all(moved["both"][1:2] + moved["both"][3:5])
    assert all(moved["decoder"])
    assert all(moved["encoder"][1:2] + moved["encoder"][3:5])
    assert not any(moved["exact"])


def test_a_wrong_answer_counts_as_right() -> None:
    question = Question("x", (1, 2), (5, 6, 1))
    assert is_right(question, Answer([5, 6, 1]))
    for wrong in ([5, 6], [5, 6, 1, 1], [5, 7, 1], []):
        assert not is_right(question, Answer(wrong))


def test_a_worse_or_idle_cell_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures name the cell and the task; a bounded cell whose logits are those of off fails however good it is."""
    questions = [Question(kind, (1,), (5, 1)) for kind in ("copy", "recall") for _ in range(600)]
    right = [Answer([5, 1], ((5, -0.1),)) for _ in questions]
    worse = [Answer([5 if n % 10 else 6, 1], ((5, -0.2),)) if n < 600 else Answer([5, 1], ((5, -0.2),)) for n in range(1200)]

    def cell(name: str, own: list[Answer], kind: Cell) -> dict[str, object]:
        modes = {"encoder_replay": kind.encoder.value, "decoder_replay": kind.decoder.value}
        return {"name": name, **modes, "hit": 0.0, "replayed_tokens": 0, "tasks": compared(questions, right, own, 4)}

    bounded = Cell("decoder", EncoderReplay.OFF, DecoderReplay.BOUNDED)
    cells = [cell("off", right, OFF), cell("worse", worse, bounded), cell("idle", right, bounded), cell("exact", right, CELLS[4])]
    failures = quality._failures(cells)
    assert len(failures) == 2
    assert failures[0].startswith("worse, copy: -10.00%")
    assert failures[1].startswith("idle: no log-probability")


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
