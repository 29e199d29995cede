# SPDX-License-Identifier: Apache-2.0
"""The engine service in this process, in front of the real engine with a runner whose steps the test lets through."""

from __future__ import annotations

import asyncio
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cedar.config.engine import EngineConfig
from cedar.engine.admission import ModelFacts
from cedar.engine.engine import Engine
from cedar.engine.loop import EngineThread
from cedar.engine.request import DecoderReplay, GenerationRequest, SamplingParams
from cedar.engine.work import MemoryUsage, Prompt, StepResult, StepWork
from cedar.errors import CedarError
from cedar.service.client import EngineClient
from cedar.service.life import Presence
from cedar.service.metrics import EngineMetrics
from cedar.service.server import EngineService, Serving, start_server
from cedar.v1 import engine_pb2 as pb

VOCAB, EOS = 64, 1
PATIENCE_S = 20.0
"""Deadline of every wait in these tests: long, since it is only met by a failing one."""


def next_token(token_id: int) -> int:
    """The runner's model: counts from 2 to 61 and starts again, so a lost or doubled token shows."""
    return 2 + (token_id - 1) % 60


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    ids = [prompt[-1]]
    for _ in range(count):
        ids.append(next_token(ids[-1]))
    return ids[1:]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


@dataclass(eq=False)
class Memory:
    num_computed: int = 0
    num_cached: int = 0
    num_replayed: int = 0
    last: int = 0


class GatedRunner:
    """Steps run freely while `gate` is set. ``pause_s``: at least so long a step. What a closed sequence computed stays
    cached, for nobody."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.vocab_size, self.max_model_len, self.page_tokens = VOCAB, 1 << 20, 16
        self.gate = threading.Event()
        self.gate.set()
        self.pause_s = pause_s
        self.open_memories: list[Memory] = []
        self.tokens_cached = 0

    def open(self, prompt: Prompt, num_tokens: int) -> Memory:
        self.open_memories.append(memory := Memory())
        return memory

    def gains(self, leader: Memory, seq: Memory, prompt: Prompt, num_tokens: int) -> bool:
        return False

    def finds_more(self, seq: Memory, prompt: Prompt) -> bool:
        return False

    def reserve(self, seq: Memory, num_tokens: int) -> bool:
        return True

    def close(self, seq: Memory, *, forget: bool = False) -> None:
        self.open_memories.remove(seq)
        self.tokens_cached += 0 if forget else seq.num_computed

    def clear_cache(self) -> int:
        dropped, self.tokens_cached = self.tokens_cached, 0
        return dropped

    def fits(self, num_tokens: int, decoder_replay: DecoderReplay) -> bool:
        return True

    def usage(self) -> MemoryUsage:
        held = len(self.open_memories)
        return MemoryUsage(1000, held, 1000, held, held, 7.0, bytes_cached=self.tokens_cached)

    def step(self, work: StepWork) -> StepResult:
        assert self.gate.wait(PATIENCE_S), "the test left the gate closed"
        if self.pause_s:
            time.sleep(self.pause_s)
        for prefill in work.prefills:
            prefill.seq.num_computed += len(prefill.token_ids)
            prefill.seq.last = prefill.token_ids[-1]
        for decode in work.decodes:
            decode.seq.num_computed += 1
        rows = [self._logits(tail.seq.last) for tail in work.tails]
        rows += [self._logits(decode.token_id) for decode in work.decodes]
        return StepResult(torch.stack(rows) if rows else None)

    def _logits(self, token_id: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next_token(token_id)), VOCAB).float() * 9


class ServiceThread:
    """`EngineService` on an event loop of its own thread. Not loaded until `load`."""

    def __init__(self, config: EngineConfig, address: str, runner: GatedRunner) -> None:
        self.config, self.address, self.runner = config, address, runner
        self.metrics = EngineMetrics()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._start())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    async def _start(self) -> None:
        self.presence = Presence()
        self.service = EngineService(self.config, self.metrics, self.presence)
        self.server, self.address = await start_server(self.service, self.address)
        self._pulse = asyncio.create_task(self.service.pulse())

    def load(self) -> EngineThread:
        facts = ModelFacts(eos_token_id=EOS, num_valid_ids=VOCAB, window=8, halo=20)
        engine = Engine(self.runner, self.config, facts, recorder=self.metrics)
        self.engine = EngineThread(engine, self.service.hub.publish)
        self.engine.start()
        self.run(self.service.accept(Serving(self.engine, "fake", self.runner.max_model_len, VOCAB, "by hand")))
        return self.engine

    def stop(self) -> None:
        self.runner.gate.set()
        if hasattr(self, "engine"):
            assert self.engine.stop(PATIENCE_S)
        self._pulse.cancel()
        self.run(self.server.stop(0.2))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)


@contextmanager
def service(*, loaded: bool = True, pause_s: float = 0.0, **settings) -> Iterator[ServiceThread]:
    directory = Path(tempfile.mkdtemp(prefix="cedar-test-"))  # not tmp_path: a socket's path must stay short
    config = EngineConfig(**{"max_num_batched_tokens": 32, "max_num_seqs": 16, **settings})
    thread = ServiceThread(config, f"unix:{directory}/engine.sock", GatedRunner(pause_s))
    try:
        if loaded:
            thread.load()
        yield thread
    finally:
        thread.stop()
        shutil.rmtree(directory)


def request(key: str, prompt: Sequence[int] = (5, 6, 7), timeout_ms: int = 0, **sampling) -> GenerationRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling})
    return GenerationRequest(key=key, input_ids=tuple(prompt), sampling=params, timeout_ms=timeout_ms)


@dataclass
class Encoding:
    """The callbacks of one `encode`."""

    progress: list[pb.EncodeProgress] = field(default_factory=list)
    results: list[pb.EncodeProgress | CedarError] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def on_done(self, result: pb.EncodeProgress | CedarError) -> None:
        self.results.append(result)
        self.done.set()

    def wait(self) -> pb.EncodeProgress | CedarError:
        assert self.done.wait(PATIENCE_S), "encode never ended"
        assert len(self.results) == 1, "two terminal callbacks"
        return self.results[0]


@dataclass
class Stream:
    """The callbacks of one `attach`; ``pause_s``: a slow consumer."""

    pause_s: float = 0.0
    messages: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    seen: list[pb.SequenceTokens] = field(default_factory=list)

    def on_tokens(self, message: pb.SequenceTokens) -> None:
        if self.pause_s:
            time.sleep(self.pause_s)
        self.messages.put(message)

    def next(self, timeout: float = PATIENCE_S) -> pb.SequenceTokens:
        message = self.messages.get(timeout=timeout)
        assert not (self.seen and self.seen[-1].finish_reason), "a message after the last"
        self.seen.append(message)
        return message

    def end(self) -> pb.SequenceTokens:
        while not (message := self.next()).finish_reason:
            pass
        return message

    @property
    def tokens(self) -> list[int]:
        return [token for message in self.seen for token in message.token_ids]


def encode(client: EngineClient, wanted: GenerationRequest) -> str:
    """The handle of an encoded request."""
    encoding = Encoding()
    client.encode(wanted, encoding.progress.append, encoding.on_done)
    result = encoding.wait()
    assert isinstance(result, pb.EncodeProgress), result
    assert result.ready
    return result.handle
