# SPDX-License-Identifier: Apache-2.0
"""The chat payload, checked once: what a caller may send as ``messages``.

Every refusal is INVALID_ARGUMENT on a path such as ``messages[3].content``. Keys that are not listed here are errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from cedar.errors import CedarError, invalid
from cedar.text.dsml import ToolCall, to_json
from cedar.text.tokenizer import IMAGE_TOKEN

EFFORTS: Mapping[str, int] = {"none": 0, "low": 50, "high": 75, "xhigh": 75, "max": 100}


def _refuse(problem: str, allowed: str, at: str = "") -> NoReturn:
    """An error below the current field; ``at`` continues its path."""
    raise PydanticCustomError("refused", "{problem}; allowed: {allowed}", {"problem": problem, "allowed": allowed, "at": at})


def _join_parts(value: Any) -> Any:
    """A list of text parts becomes one text, joined by blank lines."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            _refuse(f"is {kind!r}" if isinstance(part, dict) else "is not an object", "text parts only", f"[{index}].type")
        if not isinstance(part.get("text"), str):
            _refuse("is not a string", "a string", f"[{index}].text")
        if len(part) > 2:
            _refuse(f"has the keys {', '.join(map(str, part))}", "type, text", f"[{index}]")
        texts.append(part["text"])
    return "\n\n".join(texts)


def _clean(value: str) -> str:
    if IMAGE_TOKEN in value:
        _refuse(f"contains {IMAGE_TOKEN}", "text; this server has no vision tower")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse("holds half of a surrogate pair", "well-formed Unicode")
    return value


def _writable(value: Any, at: str = "") -> Any:
    """JSON that can be written again: a number such as 1e999 is read as infinity, which cannot."""
    try:
        to_json(value)
    except (ValueError, RecursionError, TypeError) as error:
        _refuse(f"cannot be written as JSON ({error})", "finite numbers, moderate nesting", at)
    return value


def _markup_name(value: str) -> str:
    """Names stand between quotes in DSML, which has no escapes."""
    if not value or len(value) > 256 or any(c in '"<>' or c.isspace() for c in value):
        _refuse(f"is {value[:64]!r}", 'a name of 1 to 256 characters without spaces, quotes, "<" and ">"')
    return value


def _arguments(value: Any) -> Any:
    """Arguments arrive as JSON text (the OpenAI form) or as the object itself."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_constant)
        except (ValueError, RecursionError) as error:
            _refuse(f"is not valid JSON ({error})", "a JSON object")
    if not isinstance(value, dict):
        _refuse(f"is a JSON {type(value).__name__}", "a JSON object")
    for name in value:
        _markup_name(name)
    return _writable(value)


def _function(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("name"), str):
        _refuse("is missing or not a string", "the function's name", ".name")
    _markup_name(value["name"])
    _writable(value)
    return value


def _effort(value: Any) -> Any:
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    if type(value) is int and 1 <= value <= 100:
        return value
    return _refuse(f"is {value!r}", f"1 to 100, or {', '.join(EFFORTS)}")


def _schema(value: Any) -> Any:
    """OpenAI's response_format to the JSON schema that the answer must follow; None when any text will do."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" or value is None:
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        _refuse(f"is {kind!r}" if isinstance(value, dict) else "is not an object", "text, json_object, json_schema", ".type")
    holder = value.get("json_schema")
    if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
        _refuse("is missing or not an object", "a JSON schema", ".json_schema.schema")
    return _writable(holder["schema"], ".json_schema.schema")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


Text = Annotated[str, BeforeValidator(_join_parts), AfterValidator(_clean)]
Name = Annotated[str, AfterValidator(_markup_name)]
Schema = Annotated[dict[str, Any] | None, BeforeValidator(_schema)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tool(_Strict):
    """A function the model may call. ``function`` goes into the prompt as it is."""

    type: Literal["function"] = "function"
    function: Annotated[dict[str, Any], AfterValidator(_function)]


class CalledFunction(_Strict):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = Field(default_factory=dict)


class Call(_Strict):
    """A call that the assistant made; ``id`` ties a tool's result to it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_tool_call(self) -> ToolCall:
        return ToolCall(self.function.name, self.function.arguments)


class System(_Strict):
    role: Literal["system"]
    content: Text = ""
    tools: tuple[Tool, ...] | None = None
    response_format: Schema = None


class Developer(_Strict):
    role: Literal["developer"]
    content: Annotated[Text, Field(min_length=1)]
    tools: tuple[Tool, ...] | None = None
    response_format: Schema = None


class User(_Strict):
    role: Literal["user"]
    content: Text


class Assistant(_Strict):
    role: Literal["assistant"]
    content: Text | None = None
    reasoning_content: Annotated[Text | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))] = None
    tool_calls: tuple[Call, ...] | None = None


class ToolResult(_Strict):
    role: Literal["tool"]
    content: Text
    tool_call_id: str | None = None


class LatestReminder(_Strict):
    role: Literal["latest_reminder"]
    content: Text


ROLES: Mapping[str, type[_Strict]] = {
    "system": System,
    "user": User,
    "developer": Developer,
    "assistant": Assistant,
    "tool": ToolResult,
    "latest_reminder": LatestReminder,
}
Message = System | User | Developer | Assistant | ToolResult | LatestReminder


class ChatRequest(_Strict):
    """The payload's object form; a bare list is its ``messages``. ``reasoning_effort``: 1-100; 0 = "none"."""

    messages: Annotated[tuple[Annotated[Message, Field(discriminator="role")], ...], Field(min_length=1)]
    tools: tuple[Tool, ...] | None = None
    thinking: StrictBool | None = None
    reasoning_effort: Annotated[int, BeforeValidator(_effort)] | None = None
    response_format: Schema = None
    drop_thinking: StrictBool = True


def parse_messages(payload: str | bytes | list[Any] | dict[str, Any]) -> ChatRequest:
    """Check a chat payload: JSON text, or what it decodes to. Raises INVALID_ARGUMENT naming the first field at fault."""
    if isinstance(payload, str | bytes):
        try:
            payload = json.loads(payload, parse_constant=_constant)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            raise invalid("messages", f"not valid JSON ({error})", "a list of messages, or an object with that list") from error
    if isinstance(payload, list):
        payload = {"messages": payload}
    if not isinstance(payload, dict):
        raise invalid("messages", f"is a JSON {type(payload).__name__}", "a list of messages, or an object with that list")
    try:
        request = ChatRequest.model_validate(payload)
    except ValidationError as error:
        raise _as_cedar_error(error.errors(include_url=False)[0]) from None
    _check_conversation(request)
    return request


def _check_conversation(request: ChatRequest) -> None:
    """What no single message shows: who speaks last, one place for tools, results that answer calls."""
    order: set[str] = set()
    for index, message in enumerate(request.messages):
        if isinstance(message, Assistant) and message.tool_calls:
            order = {call.id for call in message.tool_calls if call.id}
        elif isinstance(message, ToolResult) and message.tool_call_id and order and message.tool_call_id not in order:
            raise invalid(f"messages[{index}].tool_call_id", f"{message.tool_call_id!r} names no call", ", ".join(sorted(order)))
        for name in ("tools", "response_format"):
            if getattr(request, name) and getattr(message, name, None):
                raise invalid(name, f"is also given in messages[{index}]", "one of the two places")
    last = len(request.messages) - 1
    while last > 0 and isinstance(request.messages[last], LatestReminder):
        last -= 1
    role = request.messages[last].role
    if role in ("assistant", "latest_reminder") or (role == "system" and last == 0 < len(request.messages) - 1):
        raise invalid(f"messages[{last}].role", f"{role} speaks last", "system, developer, user or tool at the end")


_PROBLEMS = {
    "missing": ("is missing", "this key is required"),
    "union_tag_not_found": ("role is missing", ", ".join(ROLES)),
    "union_tag_invalid": ("no such role", ", ".join(ROLES)),
    "string_type": ("is not a string", "a string, or a list of text parts where it is a content"),
    "string_too_short": ("is empty", "text"),
    "too_short": ("is empty", "at least one message"),
    "bool_type": ("is not a boolean", "true or false"),
    "tuple_type": ("is not a list", "a list"),
    "dict_type": ("is not an object", "an object"),
    "model_type": ("is not an object", "an object"),
    "model_attributes_type": ("is not an object", "an object"),
    "literal_error": ("is not one of the values allowed", "function"),
}


_MODELS: Mapping[str, type[_Strict]] = {"tools": Tool, "tool_calls": Call, "function": CalledFunction, **ROLES}


def _as_cedar_error(error: ErrorDetails) -> CedarError:
    """pydantic's first complaint in our wording. Its path holds the role after ``messages[i]``: the union's tag, not a key."""
    location = error["loc"]
    path = ""
    for position, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif position != 2 or location[0] != "messages":
            path += f".{part}" if path else part
    path = path or "messages"
    if error["type"] == "refused":
        context = error["ctx"]
        return invalid(path + context["at"], context["problem"], context["allowed"])
    if error["type"] == "extra_forbidden":
        parents = [part for part in location[:-1] if isinstance(part, str)]
        model = _MODELS[parents[-1]] if parents else ChatRequest
        return invalid(path, "no such key", ", ".join(model.model_fields))
    return invalid(path, *_PROBLEMS.get(error["type"], (error["msg"], "see the README's chat section")))
