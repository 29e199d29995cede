# SPDX-License-Identifier: Apache-2.0
"""DSML, the markup of tool calls: its spelling and its rendering. `cedar.text.parse` reads it back.

``｜DSML｜`` is one control token (U+FF5C bars); what stands around it in a tag, with a space before the tag's name, is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cedar.text.tokenizer import Piece

DSML = "｜DSML｜"
CALLS_OPEN = f"<{DSML} calls>"
CALLS_CLOSE = f"</{DSML} calls>"
INVOKE_CLOSE = f"</{DSML} invoke>"
PARAMETER_CLOSE = f"</{DSML} parameter>"


@dataclass(frozen=True)
class ToolCall:
    """One call of a function. ``arguments``: JSON values by parameter name, in the order written."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def to_json(value: Any) -> str:
    """JSON as the release writes it into prompts: separators with a space, characters outside ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def render_calls(calls: Iterable[ToolCall]) -> list[Piece]:
    """The calls block of an assistant turn, without the blank line before it."""
    pieces = _tag("<", " calls>\n")
    for call in calls:
        pieces += _tag("<", f' invoke name="{call.name}">\n')
        for index, (name, value) in enumerate(call.arguments.items()):
            kind, text = ("true", value) if isinstance(value, str) else ("false", to_json(value))
            pieces += _tag("\n<" if index else "<", f' parameter name="{name}" string="{kind}">{text}')
            pieces += _tag("</", " parameter>")
        pieces += [*_tag("\n</", " invoke>"), Piece("\n")]
    return [*pieces, *_tag("</", " calls>")]


def _tag(before: str, after: str) -> list[Piece]:
    return [Piece(before), Piece(DSML, control=True), Piece(after)]
