# SPDX-License-Identifier: Apache-2.0
"""`cedar chat`: a conversation with a running server, in the terminal or through pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cedar.cli.generate import DEFAULT_URL, INTERRUPTED, Meter, Url, client_errors, given, note, quiet_pipe, write
from cedar.errors import CedarError, invalid, unavailable

if TYPE_CHECKING:
    from cedar_client import Client, Delta

HELP = "/reset  forget the conversation   /system TEXT  set or clear the system message   /thinking on|off   /quit"
LEAVE = ("/quit", "/exit")
EFFORTS = "1 to 100, or none, low, high, xhigh, max"


def _effort(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


class Conversation:
    """Messages so far, and how the next answer is asked for."""

    def __init__(self, system: str, thinking: bool, effort: int | str | None) -> None:
        self.system = system
        self.thinking = thinking
        self.effort = effort
        self.turns: list[dict[str, Any]] = []

    def payload(self, text: str) -> dict[str, Any]:
        """The chat payload that asks ``text``."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*head, *self.turns, {"role": "user", "content": text}]
        return {"messages": messages, "thinking": self.thinking} | given(reasoning_effort=self.effort if self.thinking else None)

    def add(self, text: str, answer: str) -> None:
        """Remember a finished exchange."""
        from cedar.text.parse import parse_completion

        parsed = parse_completion(answer, self.thinking)
        turn = {"role": "assistant", "content": parsed.content} | given(reasoning_content=parsed.reasoning)
        self.turns += [{"role": "user", "content": text}, turn]


class AnswerPrinter:
    """Writes an answer as it comes. At a terminal reasoning is dim; through a pipe it goes to standard error."""

    def __init__(self, thinking: bool) -> None:
        from cedar.text.chat import END_THINK
        from cedar.text.stop import StopMatcher

        self._reasoning = StopMatcher([END_THINK]) if thinking else None
        self._terminal = sys.stdout.isatty()
        self._dim = self._terminal and "NO_COLOR" not in os.environ

    def __enter__(self) -> AnswerPrinter:
        if self._reasoning is not None and self._dim:
            write("\x1b[2m")
        return self

    def __exit__(self, *error: object) -> None:
        """The answer is over, whole or not; reasoning may have been all of it."""
        if self._reasoning is not None:
            self._end_reasoning(self._reasoning.finish())
        else:
            write("\n")

    def push(self, text: str) -> None:
        """Print what came."""
        if self._reasoning is None:
            write(text)
            return
        result = self._reasoning.push(text)
        if result.matched:
            self._end_reasoning(result.emit)
            write(result.rest.removeprefix("\n"))
        else:
            self._think(result.emit)

    def _end_reasoning(self, text: str) -> None:
        self._think(text + ("\x1b[0m\n" if self._dim else "\n"))
        self._reasoning = None

    def _think(self, text: str) -> None:
        if self._terminal:
            write(text)
        else:
            sys.stderr.write(text)
            sys.stderr.flush()


class Session:
    """The loop between the user and the server."""

    def __init__(self, client: Client, url: str, conversation: Conversation, settings: dict[str, Any]) -> None:
        self._client = client
        self._url = url
        self._conversation = conversation
        self._settings = settings
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(HELP),
            "/reset": self._reset,
            "/system": self._set_system,
            "/thinking": self._set_thinking,
        }

    def run(self, interactive: bool) -> None:
        """Read and answer until /quit, /exit or the end of input. Errors end only a session that nobody watches."""
        for line in _lines(interactive):
            text = line.strip()
            if text in LEAVE:
                return
            try:
                if text.startswith("/"):
                    self._command(text)
                elif text:
                    self._answer(text)
            except CedarError as error:
                if not interactive:
                    raise
                note(f"cedar: {error}")
            except KeyboardInterrupt:
                if not interactive:
                    raise typer.Exit(INTERRUPTED) from None

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if name not in self._commands:
            raise invalid(name, "no such command", ", ".join([*self._commands, *LEAVE]))
        self._commands[name](argument.strip())

    def _reset(self, _: str) -> None:
        self._conversation.turns.clear()
        note("conversation forgotten")

    def _set_system(self, argument: str) -> None:
        self._conversation.system = argument
        note("system message set" if argument else "system message cleared")

    def _set_thinking(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise invalid("/thinking", f"is {argument!r}", "on or off")
        self._conversation.thinking = argument == "on"
        note(f"thinking {argument}")

    def _answer(self, text: str) -> None:
        """Ask and print. A cancelled or failed exchange is not remembered."""
        meter = Meter()
        pieces: list[str] = []
        last: Delta | None = None
        payload: Any = self._conversation.payload(text)
        with client_errors(self._url), self._client.generate(messages=payload, **self._settings) as stream:
            try:
                with AnswerPrinter(self._conversation.thinking) as printer:
                    for last in stream:
                        meter.feed(last)
                        pieces.append(last.text)
                        printer.push(last.text)
            except KeyboardInterrupt:
                stream.close()
                note(meter.summary(last, cancelled=True))
                raise
        note(meter.summary(last))
        self._conversation.add(text, "".join(pieces))


def _lines(interactive: bool) -> Iterator[str]:
    """What the user types; at the prompt Ctrl-C gives a fresh line and Ctrl-D ends."""
    if not interactive:
        yield from sys.stdin
        return
    import readline  # noqa: F401  (line editing and history for input())

    while True:
        try:
            yield input("> ")
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            note("\n/quit or Ctrl-D to leave")


def command(
    url: Url = DEFAULT_URL,
    system: Annotated[str, typer.Option(help="system message")] = "",
    thinking: Annotated[bool, typer.Option(help="reason before answering")] = True,
    reasoning_effort: Annotated[str | None, typer.Option(help=f"{EFFORTS}; none is --no-thinking")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of an answer")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="nucleus sampling")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answers")] = None,
) -> None:
    """Chat with a server. Ctrl-C cancels an answer; /help lists the commands. With piped input each line is a message."""
    from cedar_client import Client

    interactive = sys.stdin.isatty()
    settings = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if reasoning_effort == "none":
        thinking, reasoning_effort = False, None
    conversation = Conversation(system, thinking, _effort(reasoning_effort))
    with quiet_pipe(), client_errors(url), Client(url) as client:
        if not client.ready():
            problem = "is `cedar serve` running there, or is that the HTTP port? gRPC is 8001 by default"
            raise unavailable(f"no server is ready at {url}; {problem}")
        if interactive:
            note(f"{url}  {HELP}")
        Session(client, url, conversation, settings).run(interactive)
