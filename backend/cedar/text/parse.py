# SPDX-License-Identifier: Apache-2.0
"""Generated text to reasoning, answer and tool calls: the inverse of `cedar.text.chat`'s assistant turn."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from cedar.text.chat import END_THINK, THINK
from cedar.text.dsml import CALLS_CLOSE, CALLS_OPEN, DSML, INVOKE_CLOSE, PARAMETER_CLOSE, ToolCall

_IN_CALLS = re.compile(rf'<{DSML} invoke name="([^"]*)">|{re.escape(CALLS_CLOSE)}')
_IN_INVOKE = re.compile(rf'<{DSML} parameter name="([^"]*)"(?: string="(true|false)")?>|{re.escape(INVOKE_CLOSE)}')


@dataclass(frozen=True)
class Completion:
    """What a model said. ``reasoning`` is None outside thinking mode."""

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse_completion(text: str, thinking: bool) -> Completion:
    """Split a whole completion. ``thinking``: generation began inside ``<think>`` (`ChatPrompt.thinking`).

    Never fails. Reasoning ends at ``</think>`` or at a calls block, whichever comes first. A tag that the mode does not call
    for is dropped where the text begins: ``<think>`` in thinking mode, ``</think>`` in chat mode; ``<think>`` in chat mode
    opens reasoning. Text after a calls block is dropped. Of a block that breaks off, the whole calls are kept.
    """
    if not thinking and not text.startswith(THINK):
        content, calls = _split_calls(text.removeprefix(END_THINK))
        return Completion(None, content, calls)
    text = text.removeprefix(THINK)
    end, block = text.find(END_THINK), text.find(CALLS_OPEN)
    if end < 0 or 0 <= block < end:
        reasoning, calls = _split_calls(text)
        return Completion(reasoning, "", calls)
    content, calls = _split_calls(text[end + len(END_THINK) :])
    return Completion(text[:end], content, calls)


def _split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """(text before the calls block without its blank line, the calls)."""
    start = text.find(CALLS_OPEN)
    if start < 0:
        return text, ()
    calls = []
    position = start + len(CALLS_OPEN)
    while (tag := _IN_CALLS.search(text, position)) and tag.group(1) is not None:
        arguments, position = _arguments(text, tag.end())
        if position < 0:
            break
        calls.append(ToolCall(tag.group(1), arguments))
    return text[:start].removesuffix("\n\n"), tuple(calls)


def _arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    """(the parameters up to the end of an invoke element, the position behind it or -1 when it breaks off).

    A value reaches to its own closing tag, so it may hold any other markup.
    """
    arguments: dict[str, Any] = {}
    while tag := _IN_INVOKE.search(text, position):
        if tag.group(1) is None:
            return arguments, tag.end()
        end = text.find(PARAMETER_CLOSE, tag.end())
        if end < 0:
            break
        arguments[tag.group(1)] = _value(text[tag.end() : end], tag.group(2))
        position = end + len(PARAMETER_CLOSE)
    return arguments, -1


def _value(text: str, string: str | None) -> Any:
    """``string="true"``: the text itself; else JSON, and the text itself where it is not JSON."""
    if string == "true":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
