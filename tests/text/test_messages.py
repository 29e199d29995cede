# SPDX-License-Identifier: Apache-2.0
"""Refused payloads: each error names the field, the problem and what is allowed."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.errors import CedarError, ErrorCode
from cedar.text.chat import ChatDefaults, render
from cedar.text.messages import parse_messages

HI = {"role": "user", "content": "Hi"}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}


def after(message: Any) -> list[Any]:
    return [HI, {"role": "assistant", "content": "Hello"}, HI, message, HI]


def with_call(function: Any) -> list[Any]:
    return [HI, {"role": "assistant", "tool_calls": [{"function": function}]}, HI]


def options(**more: Any) -> dict[str, Any]:
    return {"messages": [HI], **more}


REFUSED: list[tuple[Any, str, str]] = [
    # payload, field, part of the problem and of what is allowed
    ("{", "messages", "not valid JSON .*; allowed: a list of messages"),
    (b"\xff", "messages", "not valid JSON"),
    ("[" * 100_000, "messages", "not valid JSON"),
    (
        '{"tools": [{"function": {"name": "f", "x": 1e999}}], "messages": [{"role": "user", "content": ""}]}',
        "tools[0].function",
        "cannot be written as JSON",
    ),
    ('[{"role": "user", "content": NaN}]', "messages", "NaN is not JSON"),
    ('"text"', "messages", "is a JSON str; allowed: a list of messages"),
    ("3", "messages", "is a JSON int"),
    ("null", "messages", "is a JSON NoneType"),
    ([], "messages", "is empty; allowed: at least one message"),
    ({}, "messages", "is missing"),
    ({"messages": "Hi"}, "messages", "is not a list; allowed: a list"),
    (options(temperature=1), "temperature", "no such key; allowed: messages, tools, thinking, reasoning_effort"),
    (after("Hi"), "messages[3]", "is not an object"),
    (after({}), "messages[3]", "role is missing; allowed: system, user, developer"),
    (after({"role": "robot", "content": "x"}), "messages[3]", "no such role; allowed: system, user"),
    (after({"role": "user"}), "messages[3].content", "is missing"),
    (after({"role": "user", "content": 3}), "messages[3].content", "is not a string"),
    (after({"role": "user", "content": None}), "messages[3].content", "is not a string"),
    (
        after({"role": "user", "content": "a\ud800"}),
        "messages[3].content",
        "holds half of a surrogate pair; allowed: well-formed",
    ),
    (after({"role": "user", "content": "x", "name": "n"}), "messages[3].name", "no such key; allowed: role, content"),
    (after({"role": "user", "content": "x", "user": 1}), "messages[3].user", "no such key; allowed: role, content"),
    (
        after({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        "messages[3].content[0].type",
        "'image_url'; ",
    ),
    (after({"role": "user", "content": ["x"]}), "messages[3].content[0].type", "is not an object"),
    (after({"role": "user", "content": [{"type": "text"}]}), "messages[3].content[0].text", "is not a string"),
    (after({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}), "messages[3].content[0]", "has the keys"),
    (after({"role": "user", "content": "<｜deepseek_image｜>"}), "messages[3].content", "contains <｜deepseek_image｜>"),
    (after({"role": "developer", "content": ""}), "messages[3].content", "is empty"),
    (after({"role": "assistant", "reasoning_content": 1}), "messages[3].reasoning_content", "is not a string"),
    (with_call({}), "messages[1].tool_calls[0].function.name", "is missing"),
    (with_call({"name": 'a"b'}), "messages[1].tool_calls[0].function.name", "without spaces, quotes"),
    (with_call({"name": "f", "x": 1}), "messages[1].tool_calls[0].function.x", "no such key; allowed: name, arguments"),
    (with_call({"name": "f", "arguments": "{"}), "messages[1].tool_calls[0].function.arguments", "not valid JSON"),
    (with_call({"name": "f", "arguments": "[]"}), "messages[1].tool_calls[0].function.arguments", "is a JSON list"),
    (with_call({"name": "f", "arguments": '{"a": NaN}'}), "messages[1].tool_calls[0].function.arguments", "NaN is not JSON"),
    (with_call({"name": "f", "arguments": {'"': 1}}), "messages[1].tool_calls[0].function.arguments", "without spaces, quotes"),
    (with_call({"name": "f", "arguments": '{"a": 1e999}'}), "messages[1].tool_calls[0].function.arguments", "cannot be written"),
    (with_call("f"), "messages[1].tool_calls[0].function", "is not an object"),
    (
        [HI, CALL, {"role": "tool", "tool_call_id": "2", "content": "x"}],
        "messages[2].tool_call_id",
        "'2' names no call; allowed: 1",
    ),
    ([HI, CALL], "messages[1].role", "assistant speaks last; allowed: system, developer, user or tool"),
    ([{"role": "latest_reminder", "content": "x"}], "messages[0].role", "latest_reminder speaks last"),
    ([{"role": "system"}, {"role": "latest_reminder", "content": "x"}], "messages[0].role", "system speaks last"),
    (options(thinking="yes"), "thinking", "is not a boolean; allowed: true or false"),
    (options(reasoning_effort=0), "reasoning_effort", "is 0; allowed: 1 to 100, or none, low, high, xhigh, max"),
    (options(reasoning_effort=101), "reasoning_effort", "is 101"),
    (options(reasoning_effort=True), "reasoning_effort", "is True"),
    (options(reasoning_effort="medium"), "reasoning_effort", "is 'medium'"),
    (options(reasoning_effort="none", thinking=True), "reasoning_effort", "is none although thinking is true"),
    (options(tools={}), "tools", "is not a list"),
    (options(tools=["f"]), "tools[0]", "is not an object"),
    (options(tools=[{"function": {}}]), "tools[0].function.name", "is missing or not a string"),
    (options(tools=[{"type": "web", "function": {"name": "f"}}]), "tools[0].type", "allowed: function"),
    (options(response_format="json"), "response_format.type", "is not an object"),
    (options(response_format={"type": "xml"}), "response_format.type", "is 'xml'; allowed: text, json_object, json_schema"),
    (
        options(response_format={"type": "json_schema", "json_schema": {"schema": {"minimum": float("inf")}}}),
        "response_format.json_schema.schema",
        "cannot be written as JSON",
    ),
    (options(response_format={"type": "json_schema"}), "response_format.json_schema.schema", "is missing"),
    (
        {"messages": [{"role": "system", "tools": [{"function": {"name": "f"}}]}, HI], "tools": [{"function": {"name": "f"}}]},
        "tools",
        "is also given in messages[0]",
    ),
]


@pytest.mark.parametrize(("payload", "field", "part"), REFUSED, ids=[f"{i}-{case[1]}" for i, case in enumerate(REFUSED)])
def test_bad_payload_is_refused_by_name(payload: Any, field: str, part: str) -> None:
    with pytest.raises(CedarError) as caught:
        render(parse_messages(payload), "B", "E", ChatDefaults())
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.message.startswith(f"{field}: ")
    assert re.search(part.replace("[", r"\["), caught.value.message)
    assert "; allowed: " in caught.value.message


@pytest.mark.parametrize("depth", [100, 500, 900, 990, 2000, 50_000])
def test_deeply_nested_schema_is_encoded_or_refused(depth: int) -> None:
    schema = '{"a":' * depth + "1" + "}" * depth
    tools = '[{"function": {"name": "f", "parameters": PARAMETERS}}]'.replace("PARAMETERS", schema)
    payload = '{"messages": [{"role": "user", "content": "x"}], "tools": ' + tools + "}"
    with suppress(CedarError):
        assert render(parse_messages(payload), "B", "E", ChatDefaults())[0].control


def test_openai_nulls_and_the_short_name_of_reasoning_are_accepted() -> None:
    request = parse_messages(
        {
            "messages": [HI, {"role": "assistant", "content": None, "tool_calls": None, "reasoning": "r"}, HI],
            "tools": None,
            "response_format": None,
            "reasoning_effort": None,
            "thinking": None,
        }
    )
    assert request.messages[1].reasoning_content == "r"  # type: ignore[union-attr]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "messages", "tools", "function", "name", "type", "x"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
ROLE = st.sampled_from(["system", "user", "developer", "assistant", "tool", "latest_reminder"])


@given(
    payload=JSON | st.lists(st.fixed_dictionaries({"role": ROLE}, optional={"content": JSON, "tool_calls": JSON, "tools": JSON}))
)
def test_any_json_is_encoded_or_refused_and_nothing_else(payload: Any) -> None:
    with suppress(CedarError):
        assert render(parse_messages(json.dumps(payload)), "B", "E", ChatDefaults())[0].control
