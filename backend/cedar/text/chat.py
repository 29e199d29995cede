# SPDX-License-Identifier: Apache-2.0
"""Chat messages to prompt tokens, in the release's format.

The release ships no template: code builds the prompt. Ours builds it in pieces, so that only what this module writes
becomes control tokens; what a message says stays text, even where it spells one. A caller who wants control tokens of his
own sends the whole prompt as ``text_input``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cedar.errors import invalid
from cedar.text.dsml import DSML, render_calls, to_json
from cedar.text.messages import (
    Assistant,
    ChatRequest,
    Developer,
    LatestReminder,
    Message,
    System,
    ToolResult,
    User,
    parse_messages,
)
from cedar.text.tokenizer import Piece, Tokenizer

SYSTEM, USER, ASSISTANT, REMINDER = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
_CONTROLS = re.compile("|".join(map(re.escape, (SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML))))
_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_DATA = Path(__file__).parent / "data"


def _template(name: str, placeholder: str, directory: Path | None) -> str:
    """A template file, the checkpoint's own if it has one. The newline that ends the file is not part of the template."""
    path = directory / name if directory is not None and (directory / name).is_file() else _DATA / name
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    if text.count(placeholder) != 1:
        raise invalid(str(path), f"holds {placeholder} {text.count(placeholder)} times", "exactly once")
    return text


def _tools_template(directory: Path | None = None) -> str:
    return _template("tools_template.txt", "{tool_schemas}", directory)


def _response_format_template(directory: Path | None = None) -> str:
    return _template("response_format_template.txt", "{schema}", directory)


@dataclass(frozen=True)
class ChatDefaults:
    """What a payload leaves open. The two templates are instructions in words, which the released weights know by heart:
    they are data, so that the exact wording of a release can be put beside its weights."""

    thinking: bool = True
    reasoning_effort: int = 75
    tools_template: str = field(default_factory=_tools_template)
    response_format_template: str = field(default_factory=_response_format_template)

    @classmethod
    def load(cls, directory: Path | str) -> ChatDefaults:
        """Defaults for a checkpoint: ``tools_template.txt`` and ``response_format_template.txt`` in it replace ours."""
        path = Path(directory)
        return cls(tools_template=_tools_template(path), response_format_template=_response_format_template(path))


@dataclass(frozen=True)
class ChatPrompt:
    """An encoded chat. ``thinking``: generation starts inside ``<think>``, which `parse_completion` must know."""

    input_ids: list[int]
    thinking: bool


def encode_messages(
    payload: str | bytes | list[Any] | dict[str, Any], tokenizer: Tokenizer, defaults: ChatDefaults
) -> ChatPrompt:
    """Check a chat payload and encode it. Raises INVALID_ARGUMENT naming the field (``messages[3].content``)."""
    request = parse_messages(payload)
    thinking, _ = _mode(request, defaults)
    return ChatPrompt(tokenizer.encode_pieces(render(request, tokenizer.bos_token, tokenizer.eos_token, defaults)), thinking)


def render(request: ChatRequest, bos: str, eos: str, defaults: ChatDefaults) -> list[Piece]:
    """The prompt of a checked payload; its pieces joined are the string that the release's encoder builds."""
    thinking, effort = _mode(request, defaults)
    turns = _turns(request)
    keep_all = not request.drop_thinking or any(isinstance(t, System | Developer) and t.tools for t in turns)
    if thinking and not keep_all:
        turns = _drop_old_developers(turns)
    return [Piece(bos, True), *_Renderer(turns, thinking, effort, keep_all, eos, defaults).pieces()]


def _mode(request: ChatRequest, defaults: ChatDefaults) -> tuple[bool, int]:
    """(thinking, effort). Effort "none" (0) means chat mode."""
    thinking = defaults.thinking if request.thinking is None else request.thinking
    effort = defaults.reasoning_effort if request.reasoning_effort is None else request.reasoning_effort
    if request.thinking and effort == 0:
        raise invalid("reasoning_effort", "is none although thinking is true", "one of the two")
    return thinking and effort > 0, effort


@dataclass(frozen=True)
class _UserTurn:
    """Consecutive user and tool messages. ``blocks`` are joined by blank lines."""

    blocks: tuple[User | ToolResult, ...]

    def starts_turn(self) -> bool:
        """A turn of tool results alone continues the one it answers."""
        return any(isinstance(block, User) for block in self.blocks)


_Turn = System | Developer | Assistant | LatestReminder | _UserTurn


def _turns(request: ChatRequest) -> list[_Turn]:
    """Messages with top-level tools attached, user and tool messages merged, tool results in the order of their calls."""
    turns: list[_Turn] = []
    order: dict[str, int] = {}
    blocks: list[User | ToolResult] = []
    for message in _with_tools(request):
        if isinstance(message, User | ToolResult):
            blocks.append(message)
            continue
        if blocks:
            turns.append(_UserTurn(_in_call_order(blocks, order)))
            blocks = []
        if isinstance(message, Assistant) and message.tool_calls:
            order = {call.id: index for index, call in enumerate(message.tool_calls) if call.id}
        turns.append(message)
    if blocks:
        turns.append(_UserTurn(_in_call_order(blocks, order)))
    return turns


def _with_tools(request: ChatRequest) -> list[Message]:
    """Top-level tools and response format belong to the first system message; without one, an empty one leads."""
    messages = list(request.messages)
    extra = {name: value for name in ("tools", "response_format") if (value := getattr(request, name))}
    if extra:
        index = next((i for i, message in enumerate(messages) if isinstance(message, System)), None)
        if index is None:
            messages.insert(0, System(role="system"))
            index = 0
        messages[index] = messages[index].model_copy(update=extra)
    return messages


def _in_call_order(blocks: Sequence[User | ToolResult], order: dict[str, int]) -> tuple[User | ToolResult, ...]:
    """Sorts the tool results among themselves; texts keep their places."""
    results = (block for block in blocks if isinstance(block, ToolResult))
    ordered = iter(sorted(results, key=lambda result: order.get(result.tool_call_id or "", 0)))
    return tuple(next(ordered) if isinstance(block, ToolResult) else block for block in blocks)


def _asks(turns: Sequence[_Turn], index: int) -> bool:
    """Does this turn call for an answer? A system message does when it is not the conversation's preamble."""
    turn = turns[index]
    if isinstance(turn, System):
        return index > 0 or len(turns) == 1
    return isinstance(turn, Developer | _UserTurn)


def _turn_start(turns: Sequence[_Turn]) -> int:
    """Where the current turn began: the last message that asked for something and was not only tool results; else -1."""
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if (
            (isinstance(turn, System) and index > 0)
            or isinstance(turn, Developer)
            or (isinstance(turn, _UserTurn) and turn.starts_turn())
        ):
            return index
    return -1


def _drop_old_developers(turns: list[_Turn]) -> list[_Turn]:
    start = _turn_start(turns)
    return [turn for index, turn in enumerate(turns) if index >= start or not isinstance(turn, Developer)]


class _Renderer:
    """One conversation's pieces. State is the output alone."""

    def __init__(self, turns: list[_Turn], thinking: bool, effort: int, keep_all: bool, eos: str, defaults: ChatDefaults) -> None:
        self._turns = turns
        self._thinking = thinking
        self._effort = effort
        self._keep_all = keep_all
        self._start = _turn_start(turns)
        self._eos = eos
        self._defaults = defaults
        self._out: list[Piece] = []

    def pieces(self) -> list[Piece]:
        for index, turn in enumerate(self._turns):
            if self._thinking and index == 0:
                self._control(SYSTEM)
                self._text(_EFFORT.format(self._effort))
            if isinstance(turn, System) and (index > 0 or not self._thinking):
                self._control(SYSTEM)
            self._turn(index, turn)
            follower = self._turns[index + 1] if index + 1 < len(self._turns) else None
            if _asks(self._turns, index) and (follower is None or isinstance(follower, Assistant | LatestReminder)):
                self._control(ASSISTANT)
                self._control(THINK if self._thinking and (self._keep_all or index >= self._start) else END_THINK)
        return self._out

    def _turn(self, index: int, turn: _Turn) -> None:
        if isinstance(turn, System):
            self._text(turn.content)
            self._sections(turn)
        elif isinstance(turn, Developer):
            self._control(USER)
            self._text(turn.content)
            self._sections(turn)
        elif isinstance(turn, _UserTurn):
            self._control(USER)
            self._text("\n\n".join(_block(block) for block in turn.blocks))
        elif isinstance(turn, LatestReminder):
            self._control(REMINDER)
            self._text(turn.content)
        else:
            self._assistant(turn, keep=self._thinking and (self._keep_all or index > self._start))

    def _assistant(self, turn: Assistant, keep: bool) -> None:
        if keep:
            self._text(turn.reasoning_content or "")
            self._control(END_THINK)
        self._text(turn.content or "")
        if turn.tool_calls:
            self._text("\n\n")
            self._out += render_calls(call.as_tool_call() for call in turn.tool_calls)
        self._control(self._eos)

    def _sections(self, turn: System | Developer) -> None:
        if turn.tools:
            schemas = "\n".join(to_json(tool.function) for tool in turn.tools)
            self._filled(self._defaults.tools_template, "{tool_schemas}", schemas)
        if turn.response_format:
            self._filled(self._defaults.response_format_template, "{schema}", to_json(turn.response_format))

    def _filled(self, template: str, placeholder: str, value: str) -> None:
        """A template's own control tokens are real; those in the value put into it are not."""
        before, after = template.split(placeholder)
        self._text("\n\n")
        self._trusted(before)
        self._text(value)
        self._trusted(after)

    def _trusted(self, text: str) -> None:
        position = 0
        for match in _CONTROLS.finditer(text):
            self._text(text[position : match.start()])
            self._control(match.group())
            position = match.end()
        self._text(text[position:])

    def _control(self, token: str) -> None:
        self._out.append(Piece(token, control=True))

    def _text(self, text: str) -> None:
        if text:
            self._out.append(Piece(text))


def _block(block: User | ToolResult) -> str:
    return block.content if isinstance(block, User) else f"<tool_result>{block.content}</tool_result>"
