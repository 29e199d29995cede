# SPDX-License-Identifier: Apache-2.0
"""`cedar generate`: one completion from a running server, streamed to the terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cedar.errors import CedarError, ErrorCode, invalid

if TYPE_CHECKING:
    from cedar_client import Delta

INTERRUPTED = 128 + 2
PIPE_CLOSED = 128 + 13
Url = Annotated[str, typer.Option(help="gRPC address of the server, host:port", envvar="CEDAR_URL")]
DEFAULT_URL = "localhost:8001"


class Meter:
    """The user's clock on one answer: from asking to each token."""

    def __init__(self) -> None:
        self._asked = time.perf_counter()
        self._first: float | None = None
        self._last = self._asked
        self._first_tokens = 0
        self.tokens = 0

    def feed(self, delta: Delta) -> None:
        """Note that this part has come now; parts without tokens do not count."""
        if not delta.token_ids:
            return
        self._last = time.perf_counter()
        self.tokens += delta.num_output_tokens
        if self._first is None:
            self._first, self._first_tokens = self._last, self.tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in s; None before it."""
        return None if self._first is None else self._first - self._asked

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first response; None until a second one has come."""
        if self._first is None or self._last <= self._first:
            return None
        return (self.tokens - self._first_tokens) / (self._last - self._first)

    def summary(self, last: Delta | None, cancelled: bool = False) -> str:
        """One line: what it cost and how it ended."""
        parts = []
        if last is not None:
            parts.append(f"{last.num_input_tokens} prompt tokens ({last.cached_tokens} cached)")
        parts.append(f"{self.tokens} tokens")
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1e3:.0f} ms")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        ending = "cancelled" if cancelled else last.finish_reason if last is not None else None
        return f"[{', '.join([*parts, ending] if ending else parts)}]"


@contextmanager
def client_errors(url: str) -> Iterator[None]:
    """The client's exceptions in the words of this command line."""
    import cedar_client

    codes: tuple[tuple[type[Exception], ErrorCode], ...] = (
        (cedar_client.InvalidArgument, ErrorCode.INVALID_ARGUMENT),
        (cedar_client.Unavailable, ErrorCode.UNAVAILABLE),
        (TimeoutError, ErrorCode.DEADLINE_EXCEEDED),
    )
    try:
        yield
    except cedar_client.ConnectionLost as error:
        raise CedarError(ErrorCode.UNAVAILABLE, f"no connection to {url}; is `cedar serve` running there? ({error})") from error
    except cedar_client.CedarError as error:
        code = next((code for kind, code in codes if isinstance(error, kind)), ErrorCode.INTERNAL)
        raise CedarError(code, str(error)) from error


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Ends silently when the reader of our output has gone, as in ``cedar generate … | head``."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None


def write(text: str) -> None:
    """To standard output, at once. Characters that the terminal cannot show are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def note(text: str) -> None:
    """To standard error: figures and remarks, so that standard output is the answer alone."""
    dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def given(**settings: Any) -> dict[str, Any]:
    """The settings that the user gave; the rest are the server's defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def command(
    prompt: Annotated[str | None, typer.Argument(help="the prompt, as it is; left out: standard input")] = None,
    url: Url = DEFAULT_URL,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens to generate")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="nucleus sampling")] = None,
    top_k: Annotated[int | None, typer.Option(help="0: off")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends the output; repeatable")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="go on after the end of text")] = False,
    logprobs: Annotated[int | None, typer.Option(help="alternatives per token, with --json")] = None,
    timeout_ms: Annotated[int | None, typer.Option(help="deadline, queueing included")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object at the end instead of streamed text")] = False,
) -> None:
    """Complete a prompt. The text goes to standard output, figures to standard error; Ctrl-C cancels the request."""
    from cedar_client import Client

    if prompt is None:
        if sys.stdin.isatty():
            raise invalid("PROMPT", "is missing", "a prompt as argument or on standard input")
        prompt = sys.stdin.read()
    settings = given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or None,
        ignore_eos=ignore_eos or None,
        logprobs=logprobs,
        timeout_ms=timeout_ms,
    )
    with quiet_pipe(), client_errors(url), Client(url) as client:
        _run(client, prompt, settings, as_json)


def _run(client: Any, prompt: str, settings: dict[str, Any], as_json: bool) -> None:
    from cedar_client import Completion

    meter = Meter()
    deltas: list[Delta] = []
    with client.generate(prompt, return_perf_metrics=as_json, **settings) as stream:
        try:
            for delta in stream:
                meter.feed(delta)
                deltas.append(delta)
                if not as_json:
                    write(delta.text)
        except KeyboardInterrupt:
            stream.close()
            note("\n" + meter.summary(deltas[-1] if deltas else None, cancelled=True))
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        result = asdict(Completion.join(stream.key, deltas))
        write(
            json.dumps({**result, "ttft_s": meter.ttft_s, "tokens_per_second": meter.tokens_per_second}, ensure_ascii=False)
            + "\n"
        )
    else:
        write("\n")
        note(meter.summary(deltas[-1]))
