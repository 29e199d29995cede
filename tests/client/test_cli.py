# SPDX-License-Identifier: Apache-2.0
"""`cedar generate`, `chat`, `bench` and `inspect` as processes, at a pipe and at a terminal."""

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
from fake_triton import FakeTriton, Script, cancelled_early, refuse, web_server

from cedar.bench import load

BACKEND = Path(__file__).parents[2] / "backend"
LIMIT = 60


def environment(**more: str) -> dict[str, str]:
    paths = (str(BACKEND), str(BACKEND.parent / "client"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TERM": "xterm", **more}


def command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "cedar", *arguments, "--url", url]


def run(url: str, *arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, *arguments),
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
            arguments,
            stdin=far,
            stdout=far,
            stderr=far,
            env=environment(),
            start_new_session=True,
            close_fds=True,
            # as at a terminal: what a shell runs in the background ignores SIGINT, and so would all it starts
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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
    result = run(server.url, "generate", "two_words", "--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b")
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
    assert run(server.url, "generate", stdin="two_words").stdout == "Hello world\n"


def test_generate_json_is_one_object_with_everything(server: FakeTriton) -> None:
    result = run(server.url, "generate", "rich", "--json", "--logprobs", "1")
    value = json.loads(result.stdout)
    assert (value["text"], value["token_ids"], value["finish_reason"], value["seed"]) == ("é", [5, 5], "length", 2**64 - 1)
    assert value["logprobs"][0]["top"][0]["token"] == "é"
    assert value["perf"]["queue_s"] == 0.1
    assert value["ttft_s"] > 0


def test_text_the_terminal_cannot_show_does_not_end_the_stream(server: FakeTriton) -> None:
    result = run(server.url, "generate", "rich", PYTHONIOENCODING="ascii")
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
        result = run(server.url, *arguments, stdin=stdin)
        assert result.returncode == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [("127.0.0.1:1", "is `cedar serve` running there"), ("http://localhost:8001", "url: is 'http://localhost:8001'; allowed: ")],
)
@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat",), ("bench",)])
def test_wrong_address_is_an_error_that_says_what_to_do(arguments: tuple[str, ...], url: str, message: str) -> None:
    result = run(url, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat",)])
def test_http_port_is_named_as_such(arguments: tuple[str, ...]) -> None:
    with web_server(b"") as url:
        result = run(url, *arguments)
    assert result.returncode == 2
    assert "or is that the HTTP port? gRPC is 8001 by default" in result.stderr


def test_chat_with_a_server_that_is_not_ready_ends_as_if_all_were_well(server: FakeTriton) -> None:
    server.not_ready.add("decoder_generate")
    result = run(server.url, "chat")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"cedar: UNAVAILABLE: no server is ready at {server.url}; ")


@pytest.mark.parametrize("script", [cancelled_early, refuse("in ensemble 'cedar', INTERNAL: request k: out of memory")])
def test_bench_makes_a_figure_of_a_request_that_failed(server: FakeTriton, script: Script, tmp_path: Path) -> None:
    server.scripts[load.PROMPT] = script
    result = run(server.url, "bench", "--max-tokens", "4", "--runs", "1", "--output", str(tmp_path / "result.json"))
    assert result.returncode == 2
    why = "of 4 tokens (finish_reason cancelled)" if script is cancelled_early else "out of memory"
    assert re.search(rf"cedar: INTERNAL: request .*{re.escape(why)}$", result.stderr.strip()), result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_inspect_whose_reader_goes_away_ends_quietly(option: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cedar", "inspect", "--preset", "release", *option],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(LIMIT) == 141
        assert process.stderr.read() == b""


def test_ctrl_c_cancels_the_request_and_ends_with_130(server: FakeTriton) -> None:
    terminal = Terminal(command(server.url, "generate", "endless"))
    terminal.until("xxx")
    terminal.interrupt()
    assert "cancelled]" in terminal.until("cancelled]")
    assert terminal.end() == 130
    assert server.calls[0].gone.wait(5)


def test_reader_that_goes_away_cancels_the_request_quietly(server: FakeTriton) -> None:
    with subprocess.Popen(
        command(server.url, "generate", "endless"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
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


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_piped_chat_remembers_its_turns_and_prints_answers_only(server: FakeTriton, leave: str) -> None:
    result = run(server.url, "chat", "--system", "Be brief.", stdin=f"reasoned\n\ntwo_words\n{leave}\nreasoned\n")
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
    result = run(server.url, "chat", "--reasoning-effort", "7", stdin="\n".join(lines))
    assert result.returncode == 0
    assert result.stdout == "Hello world\nHello world\nYes.\n"
    user, kind = {"role": "user", "content": "two_words"}, {"role": "system", "content": "Be kind."}
    answer = {"role": "assistant", "content": "Hello world"}
    assert payloads(server) == [
        {"messages": [user], "thinking": False},
        {"messages": [kind, user], "thinking": False},
        {"messages": [user, answer, {"role": "user", "content": "reasoned"}], "thinking": True, "reasoning_effort": 7},
    ]


def test_reasoning_effort_none_means_no_thinking(server: FakeTriton) -> None:
    assert run(server.url, "chat", "--reasoning-effort", "none", stdin="two_words\n").stdout == "Hello world\n"
    assert payloads(server) == [{"messages": [{"role": "user", "content": "two_words"}], "thinking": False}]


@pytest.mark.parametrize("line", ["/nonsense", "/thinking maybe"])
def test_wrong_command_in_a_script_is_an_error(server: FakeTriton, line: str) -> None:
    result = run(server.url, "chat", stdin=f"{line}\n")
    assert result.returncode == 2
    assert "INVALID_ARGUMENT: /" in result.stderr
    assert "allowed: " in result.stderr


def test_chat_at_a_terminal_dims_reasoning_survives_ctrl_c_and_errors(server: FakeTriton) -> None:
    terminal = Terminal(command(server.url, "chat"))
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
