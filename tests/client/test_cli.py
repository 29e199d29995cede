# SPDX-License-Identifier: Apache-2.0
"""`cedar generate` and `cedar chat` as processes, at a pipe and at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_triton import FakeTriton, refuse

BACKEND = Path(__file__).parents[2] / "backend"
LIMIT = 60


def environment(**more: str) -> dict[str, str]:
    paths = (str(BACKEND), str(BACKEND.parent / "client"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TERM": "xterm", **more}


def command(server: FakeTriton, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "cedar", *arguments, "--url", server.url]


def run(server: FakeTriton, *arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(server, *arguments),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(**more),
    )


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, arguments: list[str]) -> None:
        self._near, far = pty.openpty()
        self.process = subprocess.Popen(
            arguments, stdin=far, stdout=far, stderr=far, env=environment(), start_new_session=True, close_fds=True
        )
        os.close(far)
        self._unread = ""

    def until(self, text: str) -> str:
        """Read until ``text`` is shown; everything from the last call's text to the end of this one."""
        deadline = time.monotonic() + LIMIT
        os.set_blocking(self._near, False)
        while text not in self._unread:
            assert time.monotonic() < deadline, self._unread[-300:]
            try:
                self._unread += os.read(self._near, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
        shown, self._unread = self._unread.split(text, 1)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self._near, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        code = self.process.wait(LIMIT)
        os.close(self._near)
        return code


def test_generate_keeps_figures_out_of_standard_output(server: FakeTriton) -> None:
    result = run(server, "generate", "two_words", "--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b")
    assert (result.returncode, result.stdout) == (0, "Hello world\n")
    assert re.fullmatch(r"\[7 prompt tokens \(4 cached\), 3 tokens, TTFT \d+ ms, [\d.]+ tokens/s, stop\]\n", result.stderr), (
        result.stderr
    )
    settings = server.calls[0].parameters
    assert {k: settings[k] for k in settings if k != "request_key"} == {
        "max_tokens": 5,
        "temperature": 0.0,
        "stop": ["a", "b"],
        "return_perf_metrics": False,
    }


def test_generate_reads_the_prompt_from_a_pipe(server: FakeTriton) -> None:
    assert run(server, "generate", stdin="two_words").stdout == "Hello world\n"


def test_generate_json_is_one_object_with_everything(server: FakeTriton) -> None:
    result = run(server, "generate", "rich", "--json", "--logprobs", "1")
    value = json.loads(result.stdout)
    assert (value["text"], value["token_ids"], value["finish_reason"], value["seed"]) == ("é", [5, 5], "length", 2**64 - 1)
    assert value["logprobs"][0]["top"][0]["token"] == "é"
    assert value["perf"]["queue_s"] == 0.1
    assert value["ttft_s"] > 0


def test_text_the_terminal_cannot_show_does_not_end_the_stream(server: FakeTriton) -> None:
    result = run(server, "generate", "rich", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout) == (0, "\\xe9\n")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("bad", "cedar: INVALID_ARGUMENT: top_p: is 2; allowed: 0 to 1"),
        ("broken", "cedar: UNAVAILABLE: no connection to "),
    ],
)
def test_failure_is_one_line_and_status_2(server: FakeTriton, prompt: str, message: str) -> None:
    server.scripts["bad"] = refuse("in ensemble 'cedar', INVALID_ARGUMENT: top_p: is 2; allowed: 0 to 1")
    for arguments, stdin in ((("generate", prompt), ""), (("chat",), f"{prompt}\n")):
        result = run(server, *arguments, stdin=stdin)
        assert result.returncode == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_generate_without_a_server_says_what_to_start() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cedar", "generate", "x", "--url", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
    )
    assert result.returncode == 2
    assert "is `cedar serve` running there?" in " ".join(result.stderr.split())


def test_ctrl_c_cancels_the_request_and_ends_with_130(server: FakeTriton) -> None:
    terminal = Terminal(command(server, "generate", "endless"))
    terminal.until("xxx")
    terminal.interrupt()
    assert "cancelled]" in terminal.until("cancelled]")
    assert terminal.end() == 130
    assert server.calls[0].gone.wait(5)


def test_reader_that_goes_away_cancels_the_request_quietly(server: FakeTriton) -> None:
    with subprocess.Popen(
        command(server, "generate", "endless"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(3)
        process.stdout.close()
        assert process.wait(LIMIT) == 141
        assert process.stderr.read() == b""
    assert server.calls[0].gone.wait(5)


def payloads(server: FakeTriton) -> list[dict[str, Any]]:
    return [json.loads(call.text("messages")) for call in server.calls]


def test_piped_chat_remembers_its_turns_and_prints_answers_only(server: FakeTriton) -> None:
    result = run(server, "chat", "--system", "Be brief.", stdin="reasoned\n\ntwo_words\n/quit\nreasoned\n")
    assert result.returncode == 0
    assert result.stdout == "Yes.\n"
    assert result.stderr.startswith("because\n[")
    assert "Hello world\n[" in result.stderr  # thinking mode: reasoning that never ended
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "reasoned"}
    answer = {"role": "assistant", "content": "\nYes.", "reasoning_content": "because"}
    assert payloads(server) == [
        {"messages": [system, user], "thinking": True},
        {"messages": [system, user, answer, {"role": "user", "content": "two_words"}], "thinking": True},
    ]


def test_piped_chat_obeys_commands(server: FakeTriton) -> None:
    lines = ["/thinking off", "two_words", "/reset", "/system Be kind.", "two_words", "/system", "/thinking on", "reasoned"]
    result = run(server, "chat", "--reasoning-effort", "7", stdin="\n".join(lines))
    assert result.returncode == 0
    assert result.stdout == "Hello world\nHello world\nYes.\n"
    user, kind = {"role": "user", "content": "two_words"}, {"role": "system", "content": "Be kind."}
    answer = {"role": "assistant", "content": "Hello world"}
    assert payloads(server) == [
        {"messages": [user], "thinking": False},
        {"messages": [kind, user], "thinking": False},
        {"messages": [user, answer, {"role": "user", "content": "reasoned"}], "thinking": True, "reasoning_effort": 7},
    ]


@pytest.mark.parametrize("line", ["/nonsense", "/thinking maybe"])
def test_wrong_command_in_a_script_is_an_error(server: FakeTriton, line: str) -> None:
    result = run(server, "chat", stdin=f"{line}\n")
    assert result.returncode == 2
    assert "INVALID_ARGUMENT: /" in result.stderr
    assert "allowed: " in result.stderr


def test_chat_at_a_terminal_dims_reasoning_survives_ctrl_c_and_errors(server: FakeTriton) -> None:
    terminal = Terminal(command(server, "chat"))
    terminal.until("> ")
    terminal.type("reasoned\n")
    shown = terminal.until("stop]")
    assert "\x1b[2mbecause\x1b[0m\r\nYes." in shown
    terminal.until("> ")
    terminal.type("endless\n")
    terminal.until("xxx")
    terminal.interrupt()
    terminal.until("cancelled]")
    assert server.calls[1].gone.wait(5)
    terminal.until("> ")
    terminal.type("broken\n")
    terminal.until("UNAVAILABLE")
    terminal.until("> ")
    terminal.interrupt()
    terminal.until("to leave")
    terminal.type("two_words\n")
    terminal.until("stop]")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    contents = [message["content"] for message in payloads(server)[-1]["messages"]]
    assert contents == ["reasoned", "\nYes.", "two_words"]  # the cancelled and the failed exchange are forgotten
