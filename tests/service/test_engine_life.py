# SPDX-License-Identifier: Apache-2.0
"""When an engine must end and when it must not: idleness, the owner's end, its own failure."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from service_support import PATIENCE_S, Stream, encode, request, until

import cedar.service.life as life
from cedar.errors import CedarError
from cedar.service.client import EngineClient
from cedar.service.life import Presence, wait_until_ended
from cedar.service.owner import Owner

FAILING_ENGINE = """
import sys, threading
sys.path.insert(0, {tests!r})
import cedar.service.main as main
from service_support import EOS, VOCAB, Engine, EngineThread, GatedRunner, ModelFacts, Serving

def load_engine(config, service, metrics):
    runner = GatedRunner(0.005)
    engine = EngineThread(Engine(runner, config, ModelFacts(EOS, VOCAB, 8, 20)), service.hub.publish)
    engine.start()
    def broken(_engine):
        raise KeyboardInterrupt("of the test")
    threading.Thread(target=lambda: (sys.stdin.readline(), engine.call(broken)), daemon=True).start()
    return Serving(engine, "fake", runner.max_model_len, VOCAB, "by hand")

main.load_engine = load_engine
main.main(["--address", sys.argv[1]])
"""


async def ends_within(waiting, seconds: float) -> bool:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return False
    return True


def test_idle_engine_stays_or_busy_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "GRACE_S", 0.5)

    async def scenario() -> None:
        presence = Presence()
        with presence.here():
            assert not await ends_within(presence.wait_until_left(), 1.5)
        left = time.monotonic()
        for _ in range(4):  # polls of an adapter that waits
            assert not await ends_within(presence.wait_until_left(), 0.3)
            with presence.here():
                pass
        assert time.monotonic() - left > 1.0
        assert await ends_within(presence.wait_until_left(), 5.0)

    asyncio.run(scenario())


def test_held_up_loop_is_taken_for_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "GRACE_S", 1.0)

    async def scenario() -> None:
        presence = Presence()
        waiting = asyncio.create_task(presence.wait_until_left())
        await asyncio.sleep(0)
        time.sleep(1.5)  # a model that loads holds the interpreter
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert await ends_within(waiting, 5.0)

    asyncio.run(scenario())


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_end_of_the_owner_is_not_seen(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:

        def refuse(pid: int) -> int:
            raise OSError("not in this sandbox")

        monkeypatch.setattr(os, "pidfd_open", refuse)

    async def scenario() -> None:
        process = subprocess.Popen(["sleep", "600"])
        owner = Owner.of(process.pid)
        assert not await ends_within(wait_until_ended(owner), 0.5)
        assert await ends_within(wait_until_ended(Owner(owner.pid, owner.start_time + 1)), 2.0), "another process of that number"
        process.kill()
        assert await ends_within(wait_until_ended(owner), 2.0)
        process.wait()
        assert await ends_within(wait_until_ended(owner), 2.0)

    asyncio.run(scenario())


def test_broken_engine_stays_and_takes_requests(short_directory: str) -> None:
    address = f"unix:{short_directory}/engine.sock"
    script = FAILING_ENGINE.format(tests=os.path.dirname(__file__))
    process = subprocess.Popen([sys.executable, "-c", script, address], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    client, stream = EngineClient(address), Stream()
    until(lambda: client.connected and client.status().state == "serving", "the engine serves")
    client.attach(encode(client, request("r", max_tokens=100_000)), stream.on_tokens)
    stream.next()
    process.stdin.close()
    assert stream.end().error_code == "INTERNAL"
    assert process.wait(PATIENCE_S) == 1
    until(lambda: not client.connected, "the client knows")
    with pytest.raises(CedarError):
        client.status()
    client.close()


def test_step_that_hangs_keeps_the_engine_up_for_ever(short_directory: str) -> None:
    address = f"unix:{short_directory}/engine.sock"
    script = FAILING_ENGINE.replace("GatedRunner(0.005)", "GatedRunner(3600.0)").format(tests=os.path.dirname(__file__))
    process = subprocess.Popen(
        [sys.executable, "-c", script, address],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CEDAR_STEP_TIMEOUT_MS": "500"},
    )
    client = EngineClient(address)
    until(lambda: client.connected and client.status().state == "serving", "the engine serves")
    done: list[object] = []
    client.encode(request("r"), lambda progress: None, done.append)
    assert process.wait(PATIENCE_S) == 1
    until(lambda: done, "the caller hears of it")
    assert isinstance(done[0], CedarError)
    client.close()
