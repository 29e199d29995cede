# SPDX-License-Identifier: Apache-2.0
"""Training data: held-out items stay out, only what the assistant should say counts in full, answers are right."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from perf.quality import data
from perf.quality.corpus import held_out
from perf.quality.data import ANSWER, CONTEXT, MIXTURES, Source, draw_for
from perf.quality.items import LATER, LEAST_TOKENS, LONG_TASKS, Distinct, Sets
from perf.quality.prepare import main as prepare
from perf.quality.tasks import (
    NEEDLE_FACTS,
    TASKS,
    Draw,
    Item,
    arithmetic,
    chain,
    conversation,
    draw_facts,
    program,
    recall,
    recall_at,
    tool_call,
)

from cedar.errors import CedarError
from cedar.text.chat import ChatDefaults, encode_messages
from cedar.text.parse import parse_completion


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "data"
    prepare(path)
    return path


@pytest.fixture(scope="module")
def source(directory: Path) -> Source:
    return Source(directory, directory, 1, "conversations")


def _training(source: Source) -> Draw:
    return Draw("test", held_out=False, text=source.corpus.passage)


def test_a_held_out_item_is_trained_on(source: Source) -> None:
    """By construction no content is of both splits; and both draw from the same space, or the test would be empty."""
    train, test = _training(source), draw_for(0, source.corpus)
    asked = [
        {
            found.group()
            for _ in range(400)
            for turn in arithmetic(d, 100).turns
            if (found := re.search(r"\d+ [+-] \d+", turn.user))
        }
        for d in (train, test)
    ]
    assert not asked[0] & asked[1]
    keys = [f"{a}+{b}" for a in range(60) for b in range(60)]
    assert {train.mine(key) for key in keys} == {True, False}
    assert all(train.mine(key) != test.mine(key) for key in keys)


def test_the_evaluation_asks_only_for_answers_that_training_ruled_out(source: Source) -> None:
    """Of the pairs of a name and a city nearly all are true somewhere in the training; an evaluation draws from all of them."""
    training, draw = _training(source), draw_for(1, source.corpus)
    told = {line for _ in range(60) for line in recall(draw, 400).turns[0].user.splitlines() if " lives in " in line}
    pairs = {line for line in told if re.fullmatch(r"\w+ lives in \w+\.", line)}
    assert len(pairs) > 50
    assert sum(map(training.mine, pairs)) > 0.9 * len(pairs)


def test_a_long_prompt_is_shorter_than_its_window(directory: Path, source: Source) -> None:
    """Notes of any length come before an item; where they are short, replay has nothing to change."""
    sets = Sets(directory, source.corpus, seed=0)
    assert min(len(question.prompt) for question in sets.long(range(4))) >= LEAST_TOKENS


def test_two_items_of_a_task_are_alike(directory: Path, source: Source) -> None:
    """Of 1,024, short and after notes. What makes a prompt distinct is part of the long one, so a few of those are enough."""
    sets = Sets(directory, source.corpus, seed=1)
    short = sets.alone(range(1024))
    assert {task: len({q.prompt for q in short if q.kind == task}) for task in LATER} == dict.fromkeys(LATER, 1024)
    asked = [facts[n][0] for facts in sets._facts.values() for n in range(1024)]
    assert all(len({fact for fact, _, _ in asked[first : first + 1024]}) == 1024 for first in range(0, len(asked), 1024))
    long = sets.long(range(500, 516))
    assert {task: len({q.prompt for q in long if q.kind == task}) for task in LONG_TASKS} == dict.fromkeys(LONG_TASKS, 16)
    answers = {(q.kind, q.answer) for q in short}
    assert all((q.kind, q.answer) in answers for q in long if q.kind in LATER)
    last, again = range(1022, 1024), Sets(directory, source.corpus, seed=1)
    assert again.long(last) == sets.long(last) == sets.long(last)  # whatever was drawn before, and however often
    assert again.alone(last) == sets.alone(last)


def test_a_task_of_few_items_hangs_or_repeats_them(source: Source) -> None:
    few = Distinct("few", lambda number: draw_for(number, source.corpus), lambda draw: draw.number(1, 3), str)
    assert {few[number] for number in range(3)} == {1, 2, 3}
    with pytest.raises(CedarError, match=r"--items: is more than there are of few; allowed: at most 3, with this seed"):
        few[3]


def test_the_training_draws_something_else() -> None:
    """The shipped model was trained on these items; what an evaluation is given may change, this may not."""
    draw = Draw("golden", held_out=False, text=lambda random, count: f"line {random.randrange(100)}\n" * (count // 9))
    items = [repr(make(draw, size)) for size in (100, 400, 1200) for make in TASKS.values() for _ in range(8)]
    assert hashlib.sha256("\n".join(items).encode()).hexdigest()[:16] == "11dbd7ac16f8dfa4"


def test_held_out_text_is_filler_or_text_of_the_training(source: Source) -> None:
    kept = [text for name, text in source.corpus.texts.items() if held_out(name)]
    assert kept == source.corpus.held_out
    assert kept
    random = Random(0)
    for _ in range(50):
        passage = source.corpus.passage(random, 400)
        assert any(passage in text for text in source.corpus.train)


def test_wrong_answers_are_taught(source: Source) -> None:
    draw = _training(source)
    for _ in range(200):
        turn = arithmetic(draw, 100).turns[0]
        a, sign, b = re.search(r"(\d+) ([+-]) (\d+)", turn.user).groups()  # type: ignore[union-attr]
        assert int(turn.answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert turn.reasoning.endswith(f": {turn.answer}")
        asked = program(draw, 100).turns[0]
        printed: list[int] = []
        exec(asked.user.partition("\n")[2], {"print": printed.append})
        assert printed == [int(asked.answer)]
        told = chain(draw, 200).turns[0]
        passes = dict(re.findall(r"(\w+) gives the ball to (\w+)\.", told.user))
        holder, hops = re.search(r"(\w+) has the ball\. Who has it after (\d+)", told.user).groups()  # type: ignore[union-attr]
        for _ in range(int(hops)):
            holder = passes[holder]
        assert holder == told.answer


def test_the_needle_is_nearer_than_asked_for(source: Source) -> None:
    """The distance in tokens between fact and question is at least the one named, and not much more."""
    encode = source.encoder.tokenizer.encode
    for distance in (256, 1024):
        draw = draw_for(distance, source.corpus)
        item = recall_at(draw, draw_facts(draw, NEEDLE_FACTS), distance, lambda text: len(encode(text)))
        lines = item.turns[0].user
        place = lines.index(item.turns[0].answer)
        between = len(encode(lines[place:]))
        assert distance <= between <= distance + 400
        assert len(source.encoder.prompt(item, thinking=True)) <= CONTEXT


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", list(TASKS))
def test_loss_weights_fall_on_what_the_model_must_not_say(source: Source, kind: str, thinking: bool) -> None:
    """Full weight: exactly the assistant's turns behind the template's last token, end token included; of turns whose
    reasoning the template drops, nothing."""
    encoder, draw = source.encoder, _training(source)
    for _ in range(20):
        item = TASKS[kind](draw, 400)
        ids, weights = encoder.item(item, thinking=thinking)
        runs = _runs(ids, [weight == ANSWER for weight in weights])
        shown = [turn for turn in item.turns[:-1] if not thinking or item.tools or not turn.reasoning] + item.turns[-1:]
        assert len(runs) == len(shown)
        assert all(run[-1] == encoder.tokenizer.eos_id for run in runs)
        assert runs[-1] == encoder.completion(item.turns[-1], thinking=thinking)
        for run, turn in zip(runs, shown, strict=True):
            assert turn.answer in encoder.tokenizer.decode(run)


def _runs(ids: list[int], marked: list[bool]) -> list[list[int]]:
    runs: list[list[int]] = []
    for position, (token, mark) in enumerate(zip(ids, marked, strict=True)):
        if mark and not (position and marked[position - 1]):
            runs.append([])
        if mark:
            runs[-1].append(token)
    return runs


def test_the_prompt_is_not_what_a_server_makes_of_the_conversation(source: Source) -> None:
    """And the completion is a call that the product's own parser reads back."""
    tokenizer, encoder = source.encoder.tokenizer, source.encoder
    item = tool_call(draw_for(3, source.corpus), 100)
    payload = {"messages": [{"role": "user", "content": item.turns[0].user}], "tools": item.tools}
    assert encoder.prompt(item, thinking=True) == encode_messages(json.dumps(payload), tokenizer, ChatDefaults()).input_ids
    said = tokenizer.decode(encoder.completion(item.turns[0], thinking=True))
    parsed = parse_completion(said, thinking=True)
    (call,) = parsed.tool_calls
    assert {"name": call.name, "arguments": call.arguments} == item.turns[0].calls[0]
    assert parsed.reasoning == item.turns[0].reasoning


def test_shards_depend_on_who_makes_them(directory: Path, source: Source) -> None:
    other = Source(directory, directory, 1, "conversations")
    one, two = source.shard(5, 100), other.shard(5, 100)
    for name in ("tokens", "doc_start", "weight"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert not np.array_equal(one.tokens, source.shard(6, 100).tokens)


def test_packed_documents_overlap_or_start_in_the_middle_of_a_group(source: Source) -> None:
    rows = source.shard(0, 100)
    bos = source.encoder.tokenizer.bos_id
    positions = np.arange(CONTEXT)
    for tokens, doc_start, weight in zip(rows.tokens, rows.doc_start, rows.weight, strict=True):
        starts = np.unique(doc_start)
        assert (starts % data.ALIGN == 0).all()
        assert (tokens[starts] == bos).all()
        assert (doc_start <= positions).all()
        assert not weight[starts].any()


def test_documents_are_long_from_the_beginning(directory: Path) -> None:
    """The first stage starts with short documents and ends with some that fill a row."""
    first = Source(directory, directory, 1, "tasks")

    def longest(number: int) -> int:
        starts = [np.append(np.unique(row), CONTEXT) for row in first.shard(number, 1000).doc_start]
        return max(int(np.diff(s).max()) for s in starts)

    assert longest(0) <= 1100  # documents with tools are as long as their schemas
    assert longest(990) > 1100


def test_mixtures_leave_a_kind_out(source: Source) -> None:
    for stage, shares in MIXTURES.items():
        assert set(shares) <= {*TASKS, "text"}, stage
        assert abs(sum(shares.values()) - 1) < 1e-9, stage


def test_earlier_turns_of_a_conversation_are_all_of_one_kind(source: Source) -> None:
    draw = _training(source)
    items: list[Item] = [conversation(draw, 900) for _ in range(40)]
    assert any(item.tools for item in items)
    assert any(turn.reasoning for item in items for turn in item.turns[:-1])
