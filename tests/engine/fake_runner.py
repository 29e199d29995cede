# SPDX-License-Identifier: Apache-2.0
"""A deterministic runner at the token boundary, with real memory limits and strict checks of the engine's promises.

Its "model": the logits after a prefix are random numbers seeded by that prefix, so a wrong, missing or repeated token
anywhere changes everything after it. Time passes on a fake clock, in proportion to the rows of a step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cedar.config.engine import EngineConfig
from cedar.engine.admission import ModelFacts
from cedar.engine.engine import Clock, Engine
from cedar.engine.request import DecoderReplay, FinishReason, GenerationRequest, SamplingParams
from cedar.engine.stats import Metric, NullRecorder, Recorder
from cedar.engine.updates import SequenceUpdate
from cedar.engine.work import MemoryUsage, Prompt, StepResult, StepWork

VOCAB = 48
EOS = 1
FACTS = ModelFacts(eos_token_id=EOS, num_valid_ids=40, window=8, halo=20, image_token_id=39)
STEP_NS, ROW_NS = 1_000_000, 100_000
UNIX_OFFSET_NS = 1_700_000_000 * 10**9


class FakeClock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 10**9

    def clock(self) -> Clock:
        return Clock(monotonic_ns=lambda: self.now, unix_ns=lambda: self.now + UNIX_OFFSET_NS)

    def pass_ms(self, milliseconds: float) -> None:
        self.now += int(milliseconds * 1e6)


def prefix_logits(ids: Sequence[int]) -> torch.Tensor:
    """float32 [VOCAB], a function of the whole prefix."""
    seed = zlib.crc32(np.asarray(ids, dtype=np.int32).tobytes())
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(VOCAB).astype(np.float32)) * 3


def no_eos(ids: Sequence[int]) -> torch.Tensor:
    """Like `prefix_logits`, but the output never ends by itself."""
    logits = prefix_logits(ids)
    logits[EOS] = -10.0
    return logits


def expected_tokens(prompt: Sequence[int], count: int, logits_of: Callable[[Sequence[int]], torch.Tensor] = no_eos) -> list[int]:
    """The greedy continuation, one token at a time, without an engine."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(ids)[: FACTS.num_valid_ids].argmax()))
    return ids[len(prompt) :]


@dataclass(eq=False)
class FakeMemory:
    decoder_replay: DecoderReplay
    num_computed: int = 0
    num_cached: int = 0
    num_replayed: int = 0
    pages: int = 0
    ids: list[int] = field(default_factory=list)
    encoded: bool = False
    tail_done: bool = False


class FakeRunner:
    """``pages`` of ``page_tokens`` tokens; every sequence also costs one page for its rings."""

    def __init__(self, clock: FakeClock, *, pages: int = 1000, page_tokens: int = 4, max_model_len: int = 4096) -> None:
        self.vocab_size = VOCAB
        self.max_model_len = max_model_len
        self.clock = clock
        self.pages_total = pages
        self.page_tokens = page_tokens
        self.memories: list[FakeMemory] = []
        self.steps: list[StepWork] = []
        self.rows: list[int] = []
        """Of each step, tails by what they keep."""
        self.logits_of: Callable[[Sequence[int]], torch.Tensor] = no_eos
        self.fail_with: Exception | None = None

    @property
    def pages_used(self) -> int:
        return sum(1 + memory.pages for memory in self.memories)

    def open(self, prompt: Prompt, num_tokens: int) -> FakeMemory | None:
        memory = FakeMemory(prompt.decoder_replay, pages=self._pages(num_tokens))
        if self.pages_used + 1 + memory.pages > self.pages_total:
            return None
        self.memories.append(memory)
        return memory

    def gains(self, leader: FakeMemory, seq: FakeMemory, prompt: Prompt, num_tokens: int) -> bool:
        return False

    def finds_more(self, seq: FakeMemory, prompt: Prompt) -> bool:
        return False

    def clear_cache(self) -> int:
        return 0

    def reserve(self, seq: FakeMemory, num_tokens: int) -> bool:
        assert seq in self.memories, "reserve on closed memory"
        need = max(0, self._pages(num_tokens) - seq.pages)
        if self.pages_used + need > self.pages_total:
            return False
        seq.pages += need
        return True

    def close(self, seq: FakeMemory, *, forget: bool = False) -> None:
        self.memories.remove(seq)  # ValueError when closed twice

    def fits(self, num_tokens: int, decoder_replay: DecoderReplay) -> bool:
        return 1 + self._pages(num_tokens) <= self.pages_total

    def usage(self) -> MemoryUsage:
        used = self.pages_used
        return MemoryUsage(self.pages_total * 100, used * 100, self.pages_total, used, len(self.memories), 25.0)

    def step(self, work: StepWork) -> StepResult:
        self.steps.append(work)
        self.rows.append(rows_of(work))
        self.clock.now += STEP_NS + ROW_NS * self.rows[-1]
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        owners = [item.seq for item in (*work.prefills, *work.tails, *work.decodes)]
        assert owners, "empty step"
        assert len(set(map(id, owners))) == len(owners), "a sequence appears twice"
        prompt_logits = {index: rows for index, item in enumerate(work.prefills) if (rows := self._prefill(item)) is not None}
        rows = [self._tail(item) for item in work.tails] + [self._decode(item) for item in work.decodes]
        return StepResult(torch.stack(rows) if rows else None, prompt_logits)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _extend(self, memory: FakeMemory, start: int, ids: Sequence[int]) -> None:
        assert memory in self.memories, "work on closed memory"
        assert start == memory.num_computed == len(memory.ids), "work does not continue where the sequence is"
        memory.ids += ids
        memory.num_computed += len(ids)
        assert memory.num_computed <= memory.pages * self.page_tokens, "pages were not reserved"

    def _prefill(self, item) -> torch.Tensor | None:
        assert item.token_ids, "empty chunk"
        assert not item.seq.encoded, "chunk after the last one"
        assert not item.all_logits or item.seq.decoder_replay is DecoderReplay.OFF
        self._extend(item.seq, item.start, item.token_ids)
        item.seq.encoded = item.last
        if not item.all_logits:
            return None
        return torch.stack([self.logits_of(item.seq.ids[: item.start + i + 1]) for i in range(len(item.token_ids))])

    def _tail(self, item) -> torch.Tensor:
        assert item.seq.encoded, "tail of a half encoded prompt"
        assert not item.seq.tail_done, "second tail"
        item.seq.tail_done = True
        return self.logits_of(item.seq.ids)

    def _decode(self, item) -> torch.Tensor:
        assert item.seq.tail_done, "decode before the tail"
        self._extend(item.seq, item.position, [item.token_id])
        return self.logits_of(item.seq.ids)


def rows_of(work: StepWork) -> int:
    """Of a step that is about to run."""
    tails = sum(tail_rows(item.seq) for item in work.tails)
    return sum(len(item.token_ids) for item in work.prefills) + tails + len(work.decodes)


def tail_rows(memory) -> int:
    limit = {DecoderReplay.BOUNDED: FACTS.window, DecoderReplay.EXACT: FACTS.halo, DecoderReplay.OFF: 1}
    return min(limit[memory.decoder_replay], len(memory.ids))


class Counts(NullRecorder):
    """Remembers what was recorded."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.gauges: dict[str, float] = {}
        self.observed: dict[str, list[float]] = {}

    def count(self, metric: Metric, amount: int = 1, *, finished_reason: str | None = None) -> None:
        name = metric.value + (f"{{{finished_reason}}}" if finished_reason else "")
        self.counters[name] = self.counters.get(name, 0) + amount

    def observe(self, metric: Metric, value: float) -> None:
        self.observed.setdefault(metric.value, []).append(value)

    def gauge(self, metric: Metric, value: float) -> None:
        self.gauges[metric.value] = value


@dataclass
class Bench:
    """An engine on a fake runner, and everything that it said."""

    engine: Engine
    runner: FakeRunner
    clock: FakeClock
    counts: Counts
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, SequenceUpdate] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    encoded: dict[str, list[int]] = field(default_factory=dict)
    updates: list[SequenceUpdate] = field(default_factory=list)

    def step(self) -> list[SequenceUpdate]:
        updates = self.engine.step()
        for update in updates:
            assert update.handle not in self.ends, "an update after the last one"
            self.updates.append(update)
            self.tokens.setdefault(update.handle, []).extend(update.token_ids)
            assert update.num_output_tokens == len(self.tokens[update.handle])
            if update.encoded_tokens:
                self.encoded.setdefault(update.handle, []).append(update.encoded_tokens)
            if update.ready:
                assert update.handle not in self.ready, "ready twice"
                self.ready.add(update.handle)
            if update.finish_reason is not None:
                self.ends[update.handle] = update
        return updates

    def run(self, *, attach: bool = True, limit: int = 5000) -> None:
        """Until nothing is live; attaches at once whatever is ready."""
        for _ in range(limit):
            if not self.engine.num_live and not self.engine.has_work():
                return
            if not self.engine.has_work():
                deadline = self.engine.next_deadline()
                assert deadline is not None, "live sequences, no work, no deadline: hangs for ever"
                self.clock.now = max(self.clock.now, deadline)
            for update in self.step():
                if attach and update.ready:
                    self.engine.attach(update.handle)
        raise AssertionError(f"{self.engine.num_live} sequences still live after {limit} steps")

    def until(self, condition: Callable[[], bool], limit: int = 200) -> None:
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError("condition not reached")


def make_bench(
    *,
    pages: int = 1000,
    facts: ModelFacts = FACTS,
    tokenizer=None,
    max_model_len: int = 4096,
    recorder: Recorder | None = None,
    **settings,
) -> Bench:
    clock, counts = FakeClock(), Counts()
    runner = FakeRunner(clock, pages=pages, max_model_len=max_model_len)
    config = EngineConfig(**{"max_num_batched_tokens": 32, "max_num_seqs": 8, **settings})
    config.validate()
    engine = Engine(runner, config, facts, tokenizer=tokenizer, recorder=recorder or counts, clock=clock.clock())
    return Bench(engine, runner, clock, counts)


def request(key: str, prompt: Sequence[int] | int = 5, **settings) -> GenerationRequest:
    """A greedy request; ``prompt`` may be a length. Settings go to the request or to its sampling, by name."""
    ids = (
        tuple(prompt)
        if not isinstance(prompt, int)
        else tuple(2 + (i * 7 + zlib.crc32(key.encode())) % 30 for i in range(prompt))
    )
    of_request = {name: settings.pop(name) for name in list(settings) if name in GenerationRequest.model_fields}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **settings})
    return GenerationRequest(key=key, input_ids=ids, sampling=sampling, **of_request)


def end_of(bench: Bench, **settings_: Any) -> tuple[list[int], FinishReason | None]:
    """The tokens and the end of one request that runs alone."""
    handle = bench.engine.add(request("r", **settings_))
    bench.run()
    assert bench.runner.pages_used == 0
    return bench.tokens[handle], bench.ends[handle].finish_reason


def script(*tokens: int, prompt: int = 5) -> Callable[[Any], torch.Tensor]:
    """Logits whose arg max is the next of ``tokens``, whatever came before."""

    def logits_of(ids: Any) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[tokens[min(max(len(ids) - prompt, 0), len(tokens) - 1)]] = 9.0
        return logits

    return logits_of
