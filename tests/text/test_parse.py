# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.text.chat import ChatDefaults, render
from cedar.text.dsml import ToolCall, render_calls
from cedar.text.messages import parse_messages
from cedar.text.parse import Completion, parse_completion

BLOCK = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="s" string="true">a "b" <c></｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="n" string="false">[1, 2]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
CALLS = (ToolCall("f", {"s": 'a "b" <c>', "n": [1, 2]}),)


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("why</think>answer", True, Completion("why", "answer")),
        ("answer", False, Completion(None, "answer")),
        ("", True, Completion("", "")),
        ("cut off while reason", True, Completion("cut off while reason", "")),
        ("why</think>", True, Completion("why", "")),
        (f"why</think>answer\n\n{BLOCK}", True, Completion("why", "answer", CALLS)),
        (f"answer\n\n{BLOCK}", False, Completion(None, "answer", CALLS)),
        (BLOCK, False, Completion(None, "", CALLS)),
        (f"why\n\n{BLOCK}", True, Completion("why", "", CALLS)),
        (f"why\n\n{BLOCK}</think>answer", True, Completion("why", "", CALLS)),
        (f"{BLOCK} trailing words", False, Completion(None, "", CALLS)),
        ("<think>why</think>answer", True, Completion("why", "answer")),
        ("<think>why</think>answer", False, Completion("why", "answer")),
        ("</think>answer", False, Completion(None, "answer")),
        ("why</think>the tag </think> again", True, Completion("why", "the tag </think> again")),
        ("no block: <｜DSML｜ invoke", False, Completion(None, "no block: <｜DSML｜ invoke")),
    ],
)
def test_text_is_split_into_reasoning_answer_and_calls(text: str, thinking: bool, expected: Completion) -> None:
    assert parse_completion(text, thinking) == expected


@pytest.mark.parametrize(
    ("value", "string", "expected"),
    [
        ("1.5", 'string="false"', 1.5),
        ('"x"', 'string="false"', "x"),
        ("not json", 'string="false"', "not json"),
        ("1.5", 'string="true"', "1.5"),
        ("true", "", True),
        ("plain", "", "plain"),
    ],
)
def test_parameter_value_follows_its_string_attribute(value: str, string: str, expected: Any) -> None:
    tag = f'<｜DSML｜ parameter name="k"{" " + string if string else ""}>'
    text = (
        f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{tag}{value}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    assert parse_completion(text, False).tool_calls == (ToolCall("f", {"k": expected}),)


@given(cut=st.integers(0, 400))
def test_block_that_breaks_off_keeps_whole_calls_only(cut: int) -> None:
    calls = [ToolCall("a", {"x": 1}), ToolCall("b", {"y": "z"})]
    text = "".join(piece.text for piece in render_calls(calls))[:cut]
    parsed = list(parse_completion(text, False).tool_calls)
    assert parsed == calls[: text.count("</｜DSML｜ invoke>")]


NAMES = st.text(st.characters(exclude_categories=["Cs", "Z", "C"], exclude_characters='"<>'), min_size=1, max_size=8)
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="｜"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
) | st.sampled_from(["</｜DSML｜ invoke>", "</｜DSML｜ calls>", '<｜DSML｜ parameter name="x">', "</think>"])
TOOL_CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3)
PROSE = WORDS.filter(lambda text: "think>" not in text)


@given(content=PROSE, reasoning=PROSE, calls=TOOL_CALLS, thinking=st.booleans())
def test_what_the_encoder_writes_for_an_assistant_turn_is_read_back(
    content: str, reasoning: str, calls: list[ToolCall], thinking: bool
) -> None:
    turn = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls] or None,
    }
    user = {"role": "user", "content": "q"}
    request = parse_messages({"messages": [user, turn, user], "thinking": thinking, "drop_thinking": False})
    text = "".join(piece.text for piece in render(request, "", "EOS", ChatDefaults()))
    head = "<｜Assistant｜><think>" if thinking else "<｜Assistant｜></think>"
    generated = text.split(head, 1)[1].rsplit("EOS<｜User｜>", 1)[0]
    assert parse_completion(generated, thinking) == Completion(reasoning if thinking else None, content, tuple(calls))


@given(text=st.text(max_size=60), thinking=st.booleans())
def test_no_output_of_a_model_makes_it_fail(text: str, thinking: bool) -> None:
    parse_completion(text, thinking)


@pytest.mark.parametrize(
    "unit",
    ['<｜DSML｜ invoke name="f">', '<｜DSML｜ parameter name="k">', '<｜DSML｜ invoke name="f"></｜DSML｜ invoke>', "<｜DSML｜ "],
)
def test_endless_markup_is_parsed_in_linear_time(unit: str) -> None:
    start = time.process_time()
    parse_completion("<｜DSML｜ calls>" + unit * 50_000, False)
    assert time.process_time() - start < 5
