# SPDX-License-Identifier: Apache-2.0
"""Real engine processes on the small golden checkpoint: never two per owner, never one too long, never a silent end.

The owner is any process here; adapters are processes of their own, so that each can be killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_support import PATIENCE_S, Encoding, Stream, encode, request, until

import cedar.service.client as client_module
from cedar.config.engine import EngineConfig
from cedar.errors import CedarError, ErrorCode
from cedar.service.client import EngineClient
from cedar.service.directory import EngineDirectory
from cedar.service.owner import Owner
from cedar.service.process import ensure_engine

ADAPTER = Path(__file__).parent / "adapter_process.py"
START_S = 60.0


class House:
    """A private runtime directory, and every process that a test has started."""

    def __init__(self, root: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        # The kernel library would generate the longest text in less time than these tests need to interrupt it.
        self.config = EngineConfig(
            model=str(checkpoint), ops="reference", kv_cache_bytes=1 << 25, cpu_threads=1, engine_start_timeout_ms=60_000
        )
        self._started: list[subprocess.Popen[str]] = []
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def process(self, command: list[str], **options) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        self._started.append(process)
        return process

    def owner(self) -> subprocess.Popen[str]:
        return self.process(["sleep", "600"])

    def adapter(
        self, owner: int, config: EngineConfig | None = None, arguments: tuple[str, ...] = (), **env: str
    ) -> subprocess.Popen[str]:
        environment = {**os.environ, **(config or self.config).as_env(), **env}
        return self.process([sys.executable, str(ADAPTER), str(owner), *arguments], env=environment)

    def directory(self, owner: subprocess.Popen[str]) -> EngineDirectory:
        return EngineDirectory(self.root / "cedar" / Owner.of(owner.pid).key)

    def engines(self) -> list[int]:
        """Engine processes of this house: their command line names its directory."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            # "-I": the process between starter and engine, which ends at once
            if (
                b"cedar.service.main" in words
                and b"-I" not in words
                and any(word.startswith(os.fsencode(self.root)) for word in words)
            ):
                found.append(int(path.parent.name))
        return found

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                pipe.close()
        until(lambda: not self.engines(), "engines follow their owners")


@pytest.fixture
def house(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    root = Path(tempfile.mkdtemp(prefix="cedar-test-"))
    house = House(root, golden / "tiny-a" / "checkpoint", monkeypatch)
    yield house
    house.close()
    shutil.rmtree(root)


def answer(adapter: subprocess.Popen[str]) -> dict:
    return json.loads(adapter.stdout.readline())


def gone(pid: int) -> bool:
    try:
        return not Owner.of(pid).alive()
    except CedarError:
        return True


def leave(adapter: subprocess.Popen[str]) -> None:
    adapter.stdin.close()
    assert adapter.wait(PATIENCE_S) == 0


def test_four_adapters_at_once_start_one_engine_and_two_owners_share_none(house: House) -> None:
    owner, neighbour = house.owner(), house.owner()
    adapters = [house.adapter(owner.pid) for _ in range(4)] + [house.adapter(neighbour.pid)]
    answers = [answer(adapter) for adapter in adapters]
    pids = [found["pid"] for found in answers]
    assert len(set(pids[:4])) == 1
    assert sorted(house.engines()) == sorted({pids[0], pids[4]})
    assert len({found["address"] for found in answers}) == 2
    assert house.directory(owner).engine() == Owner.of(pids[0])
    assert Owner.of(pids[0]).pid != os.getpid()
    parent = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(") ")[2].split()[1]
    assert int(parent) not in [adapter.pid for adapter in adapters], "the engine is a child of its starter"


def test_kill_of_the_starter_while_it_loads_takes_the_engine_along(house: House) -> None:
    owner = house.owner()
    starter = house.adapter(owner.pid)
    until(lambda: bool(house.engines()), "an engine is started")
    [pid] = house.engines()
    starter.kill()
    assert answer(house.adapter(owner.pid))["pid"] == pid


def test_kill_of_an_adapter_leaves_its_sequence_running(house: House) -> None:
    owner = house.owner()
    client = EngineClient(ensure_engine(house.config, owner.pid))
    victim = house.adapter(owner.pid, arguments=("generate",))
    assert answer(victim)["pid"] == client.status().pid
    assert client.status().sequences_held == 1
    victim.kill()
    killed = time.monotonic()
    until(lambda: client.status().sequences_held == 0, "its memory is free")
    assert time.monotonic() - killed < 1.0
    client.close()


def test_kill_of_the_engine_leaves_requests_hanging_or_no_engine(house: House) -> None:
    owner = house.owner()
    address = ensure_engine(house.config, owner.pid)
    client = EngineClient(address)
    first = client.status().pid
    stream, encoding = Stream(), Encoding()
    client.attach(encode(client, request("r", max_tokens=4000, ignore_eos=True)), stream.on_tokens)
    stream.next()
    client.encode(request("q", [5] * 4000), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    assert stream.end().error_code == "UNAVAILABLE"
    error = encoding.wait()
    assert time.monotonic() - killed < 1.0
    assert isinstance(error, CedarError)
    assert error.code is ErrorCode.UNAVAILABLE
    assert not client.connected
    assert ensure_engine(house.config, owner.pid) == address
    again = Stream()
    client.attach(encode(client, request("r", max_tokens=5)), again.on_tokens)
    assert again.end().num_output_tokens >= 1
    assert client.status().pid != first
    assert len(house.engines()) == 1
    client.close()


def test_kill_of_the_owner_orphans_the_engine(house: House) -> None:
    owner, loading_owner = house.owner(), house.owner()
    client = EngineClient(ensure_engine(house.config, owner.pid))
    directory = house.directory(owner).path
    stream = Stream()
    client.attach(encode(client, request("r", max_tokens=4000, ignore_eos=True)), stream.on_tokens)
    stream.next()
    still_loading = house.adapter(loading_owner.pid)
    until(lambda: len(house.engines()) == 2, "the second engine is started")
    killed = time.monotonic()
    for process in (owner, loading_owner):
        process.kill()
    until(lambda: not house.engines(), "both engines have ended")
    assert time.monotonic() - killed < 5.0
    assert not directory.exists()
    assert stream.end().finish_reason == "error"
    assert "error" in answer(still_loading)
    owner.wait()
    with pytest.raises(CedarError, match="UNAVAILABLE: owner process"):
        ensure_engine(house.config, owner.pid)
    assert not house.engines()
    client.close()


def test_last_adapter_leaves_an_engine_behind_but_a_reload_keeps_it(house: House) -> None:
    owner = house.owner()
    first, second = house.adapter(owner.pid), house.adapter(owner.pid, arguments=("wait",))
    pid = answer(first)["pid"]
    leave(first)
    second.stdin.write("\n")  # the reload of the only model
    second.stdin.flush()
    assert answer(second)["pid"] == pid
    left = time.monotonic()
    leave(second)
    until(lambda: gone(pid), "the engine has ended")
    assert 4.0 < time.monotonic() - left < 10.0
    directory = house.directory(owner)
    assert not directory.socket.exists()
    assert not directory.pid_file.exists()
    assert answer(house.adapter(owner.pid))["pid"] != pid


def test_broken_checkpoint_hides_its_reason(house: House, tmp_path: Path) -> None:
    broken = tmp_path / "checkpoint"
    shutil.copytree(house.config.model, broken)
    config = json.loads((broken / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = -3
    (broken / "config.json").write_text(json.dumps(config))
    owner = house.owner()
    settings = EngineConfig(model=str(broken))
    adapters = [house.adapter(owner.pid, settings) for _ in range(3)]
    for adapter in adapters:
        error = answer(adapter)["error"]
        assert error.startswith("INVALID_ARGUMENT: ")
        assert "num_hidden_layers" in error
    assert len(house.engines()) == 1, "every adapter tried again"


def test_crash_while_starting_hides_its_last_words(house: House, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *-I*) exec {sys.executable} "$@";; esac\necho cannot find my libraries >&2\nexit 3\n'
    )
    python.chmod(0o755)
    error = answer(house.adapter(house.owner().pid, CEDAR_PYTHON=str(python)))["error"]
    assert error.startswith("INTERNAL: engine ended while starting")
    assert "cannot find my libraries" in error
    error = answer(house.adapter(house.owner().pid, CEDAR_PYTHON=str(tmp_path / "none")))["error"]
    assert error.startswith("INVALID_ARGUMENT: CEDAR_PYTHON")


def test_slow_load_is_waited_for_without_bound(house: House, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *-I*) exec {sys.executable} "$@";; esac\necho waiting for a disk >&2\nexec sleep 600\n'
    )
    python.chmod(0o755)
    owner = house.owner()
    settings = EngineConfig(engine_start_timeout_ms=1500)
    error = answer(house.adapter(owner.pid, settings, CEDAR_PYTHON=str(python)))["error"]
    assert error.startswith("UNAVAILABLE: engine not ready within 1500 ms (no answer)")
    assert "waiting for a disk" in error
    lock_holder = [pid for pid in Path("/proc").glob("[0-9]*/fd/*") if _links_to(pid, house.directory(owner).path / "lock")]
    assert len(lock_holder) == 1, "the engine in the making holds the lock"
    os.kill(int(lock_holder[0].parts[2]), signal.SIGKILL)


def _links_to(link: Path, target: Path) -> bool:
    try:
        return os.readlink(link) == str(target)
    except OSError:
        return False


def test_stale_files_of_a_killed_engine_block_or_mislead(house: House) -> None:
    owner = house.owner()
    directory = EngineDirectory.create(Owner.of(owner.pid))
    directory.socket.write_text("not a socket")
    directory.pid_file.write_text(f"{Owner.of(os.getpid()).key}\n")
    dead = subprocess.Popen(["true"])
    forgotten = EngineDirectory.create(Owner(dead.pid, 1))
    dead.wait()
    client = EngineClient(ensure_engine(house.config, owner.pid))
    assert directory.engine() == Owner.of(client.status().pid)
    assert not forgotten.path.exists(), "the directory of a dead owner stays"
    client.close()


def test_sigterm_cuts_the_running_stream(house: House) -> None:
    owner = house.owner()
    client = EngineClient(ensure_engine(house.config, owner.pid))
    pid = client.status().pid
    stream, late = Stream(), Encoding()
    client.attach(encode(client, request("r", max_tokens=150, ignore_eos=True)), stream.on_tokens)
    stream.next()
    os.kill(pid, signal.SIGTERM)
    until(lambda: client.status().state == "draining", "draining")
    client.encode(request("q"), late.progress.append, late.on_done)
    error = late.wait()
    assert isinstance(error, CedarError)
    assert error.code is ErrorCode.UNAVAILABLE
    assert (stream.end().finish_reason, len(stream.tokens)) == ("length", 150)
    until(lambda: gone(pid), "the drained engine has ended")
    ensure_engine(house.config, owner.pid)
    until(lambda: client.connected, "the client has reconnected")
    assert client.status().pid != pid
    client.close()


def test_stuck_engine_leaves_requests_hanging(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STALL_S", 2.5)
    client = EngineClient(ensure_engine(house.config, house.owner().pid))
    pid = client.status().pid
    stream, encoding = Stream(), Encoding()
    client.attach(encode(client, request("r", max_tokens=4000, ignore_eos=True)), stream.on_tokens)
    stream.next()
    client.encode(request("q", [5] * 4000), encoding.progress.append, encoding.on_done)
    until(lambda: bool(encoding.progress), "admission")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert stream.end().error_code == "UNAVAILABLE"
        assert isinstance(encoding.wait(), CedarError)
        with pytest.raises(CedarError, match="DEADLINE_EXCEEDED"):
            client.status(timeout_s=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: client.connected and client.status().sequences_held == 0, "the engine has freed what the client gave up")
    client.close()


def test_adapter_starts_an_engine_beside_an_external_one(house: House) -> None:
    address = f"unix:{house.root}/external.sock"
    command = [sys.executable, "-m", "cedar.service.main", "--address", address]
    settings = {**house.config.as_env(), "CEDAR_ENGINE_METRICS_PORT": str(_free_port())}
    external = house.process(command, env={**os.environ, **settings})
    found = answer(house.adapter(0, EngineConfig(engine_address=address)))
    assert (found["address"], found["pid"]) == (address, external.pid)
    assert not (house.root / "cedar").exists()
    with urllib.request.urlopen(f"http://127.0.0.1:{settings['CEDAR_ENGINE_METRICS_PORT']}/metrics", timeout=5) as response:
        assert b"cedar_engine_up 1.0" in response.read()
    external.terminate()
    assert external.wait(PATIENCE_S) == 0
    absent = EngineConfig(engine_address=f"unix:{house.root}/absent.sock", engine_start_timeout_ms=300)
    with pytest.raises(CedarError, match=r"UNAVAILABLE: engine at unix:.*CEDAR_ENGINE_ADDRESS"):
        ensure_engine(absent)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_owner_is_not_found_among_the_parents(house: House) -> None:
    server = house.root / "tritonserver"
    shutil.copy(shutil.which("sh"), server)
    adapter = f"{sys.executable} {ADAPTER} find; true"
    owner = house.process([str(server), "-c", adapter], env={**os.environ, **house.config.as_env()})
    found = answer(owner)
    assert found["address"] == house.directory(owner).address
    lost = answer(house.process([sys.executable, str(ADAPTER), "find"], env={**os.environ, **house.config.as_env()}))
    assert lost["error"].startswith("UNAVAILABLE: no parent of process")
