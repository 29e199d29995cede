# SPDX-License-Identifier: Apache-2.0
"""The engine on a real network, with everything that its layers gave back, and the run that each result must be equal to."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fake_runner import ROW_NS, STEP_NS, Bench, Counts, FakeClock, request

from cedar.cache.store import CacheSizes, KVCache
from cedar.config.engine import EngineConfig
from cedar.engine.admission import ModelFacts
from cedar.engine.budget import cache_formats
from cedar.engine.engine import Engine
from cedar.engine.memory import ModelSequence
from cedar.engine.replay import boundary_rows
from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason, GenerationRequest
from cedar.engine.runner import ModelRunner
from cedar.engine.work import StepResult, StepWork
from cedar.text.tokenizer import load_tokenizer
from golden_support import GOLDEN, decode, load_runner, open_sequence, prefill, tail

PAGE = 16
TOLERANCE = 2e-3
MARGIN = 0.05
"""Two tokens closer than this may change places by rounding."""
LONGEST_COMPARED = 10
"""Positions of one pass that are compared: with decoder-side replay a cold run decodes them one by one."""
TOP_ID = 370
"""Every id from 3 to this one is a token of both checkpoints."""
MODES = [(encoder, decoder) for encoder in EncoderReplay for decoder in DecoderReplay]


@dataclass
class Pass:
    """One encoding of a sequence and what followed: the hit it began with, and float32 [vocab] of positions from its tail on."""

    mode: DecoderReplay
    hit: int
    replay_start: int
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    rows: int = 0
    """Positions that were run before the tail."""


class WatchedRunner(ModelRunner):
    """Remembers the passes of every sequence, by its list of ids; ``fail_in`` counts the steps down to one that fails."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock: FakeClock | None = None
        self.fail_in = 0
        self.forget()

    def forget(self) -> None:
        self.passes: dict[int, list[Pass]] = {}
        self._lists: list[Sequence[int]] = []  # alive, so that their ids stay theirs
        self._running: dict[int, Pass] = {}

    def step(self, work: StepWork) -> StepResult:
        rows = sum(len(item.token_ids) for item in work.prefills) + len(work.tails) + len(work.decodes)
        if self.clock is not None:
            self.clock.now += STEP_NS + ROW_NS * rows
        for item in work.prefills:
            self._pass_of(item.seq).rows += len(item.token_ids)
        if self.fail_in:
            self.fail_in -= 1
            if not self.fail_in:
                return self._half_a_step(work)
        result = super().step(work)
        for row, item in enumerate([*work.tails, *work.decodes]):
            assert result.logits is not None
            self._pass_of(item.seq).logits[item.seq.num_computed - 1] = result.logits[row].numpy().copy()
        return result

    def _half_a_step(self, work: StepWork) -> StepResult:
        """The layers have run, and nothing was told to the caches: the worst moment for a step to fail in."""
        advance, ModelSequence.advance = ModelSequence.advance, _fail  # type: ignore[method-assign, assignment]
        try:
            super().step(work)
        finally:
            ModelSequence.advance = advance  # type: ignore[method-assign]
        raise ArithmeticError("injected")  # a step of tails alone advances nobody

    def _pass_of(self, seq: Any) -> Pass:
        if id(seq) not in self._running:
            ids = seq.prompt.chain.token_ids
            self._lists.append(ids)
            self._running[id(seq)] = Pass(seq.mode, seq.num_cached, seq.replay_start)
            self.passes.setdefault(id(ids), []).append(self._running[id(seq)])
        return self._running[id(seq)]

    def close(self, seq: Any, **options: Any) -> None:
        self._running.pop(id(seq), None)
        super().close(seq, **options)


def _fail(*_: Any) -> None:
    raise ArithmeticError("injected")


def settings(name: str = "tiny-a", **changes: Any) -> EngineConfig:
    """Float32, no cache quantisers, both replays off, pages of 16 tokens."""
    values: dict[str, Any] = {
        "model": str(GOLDEN / name / "checkpoint"),
        "device": "cpu",
        "dtype": "float32",
        "fake_quant": False,
        "cpu_threads": 1,
        "max_model_len": 2048,
        "kv_cache_bytes": 1 << 25,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "page_tokens": PAGE,
        "encoder_replay": "off",
        "decoder_replay": "off",
    }
    return EngineConfig(**{**values, **changes})


@functools.cache
def watched_runner(config: EngineConfig) -> WatchedRunner:
    runner = WatchedRunner.load(config)
    assert isinstance(runner, WatchedRunner)
    return runner


@functools.cache
def facts(model: str) -> ModelFacts:
    return ModelFacts.of(load_runner(name_of(model), "fp32_noquant").config, len(load_tokenizer(model)))


def name_of(model: str) -> str:
    return model.split("/")[-2]


@dataclass
class Lab(Bench):
    """`Bench` on a checkpoint. Its clock passes in steps only."""

    config: EngineConfig = field(default_factory=settings)

    @property
    def name(self) -> str:
        return name_of(self.config.model)

    @property
    def watched(self) -> WatchedRunner:
        runner: Any = self.runner
        return runner

    def add(self, ids: Sequence[int], **options: Any) -> str:
        """Queue a greedy request of these ids that no end token ends."""
        self.serial = getattr(self, "serial", 0) + 1
        return self.engine.add(ask(f"r{self.serial}", ids, **options))

    def start(self, ids: Sequence[int], **options: Any) -> str:
        """As `add`, and somebody listens from the beginning."""
        handle = self.add(ids, **options)
        self.engine.attach(handle)
        return handle

    def ids(self, handle: str) -> list[int]:
        """Prompt and output of a live sequence."""
        return self.engine._live[handle].seq.ids

    def ask(self, ids: Sequence[int], **options: Any) -> Answer:
        """Run one request to its end, alone."""
        handle = self.add(ids, **options)
        known = self.ids(handle)
        self.run()
        end = self.ends[handle]
        assert end.finish_reason is FinishReason.LENGTH, end.error
        return Answer(known, len(ids), self.watched.passes[id(known)], end.cached_tokens, end.replayed_tokens)

    def assert_empty(self) -> None:
        """Nothing is live, and nothing is held."""
        usage = self.watched.usage()
        assert self.engine.num_live == 0
        assert (usage.bytes_used, usage.pages_used, usage.sequences) == (0, 0, 0)
        cache = self.watched.cache
        assert cache._pages.num_available == cache.sizes.num_pages
        assert cache._slots.num_in_use == 0


@dataclass
class Answer:
    """What one request got. ``ids``: prompt and output. cached, replayed: tokens, as the request was told."""

    ids: list[int]
    num_prompt: int
    passes: list[Pass]
    cached: int
    replayed: int

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.num_prompt :]


def tight_runner(
    name: str,
    *,
    pages: int,
    slots: int,
    variant: str = "fp32_noquant",
    prefix_cache: bool = True,
    kind: type[ModelRunner] | None = None,
) -> Any:
    """A runner with just so many pages and slots, and boundary rows for as many sequences in every mode."""
    base = load_runner(name, variant)
    known = base.cache.sizes
    boundary = slots * max(map(base._seam.bytes, DecoderReplay))
    used = (pages + 1) * known.page_bytes + (slots + 1) * known.slot_bytes + boundary
    sizes = CacheSizes(used, PAGE, known.page_bytes, known.slot_bytes, boundary, pages, slots)
    formats = cache_formats(base.config, base.model.dtype, fake_quant=variant != "fp32_noquant")
    cache = KVCache(base.config, formats, sizes, base._device)
    hasher = base._batches._hasher
    return (kind or WatchedRunner)(
        base.model, hasher, cache, base._device, base._threads, max_model_len=base.max_model_len, prefix_cache=prefix_cache
    )


def make_lab(config: EngineConfig, runner: WatchedRunner | None = None, *, keep: bool = False) -> Lab:
    """An engine with an empty cache; keep: with what the last engine on this runner left behind."""
    if runner is None:
        runner = watched_runner(_memory_settings(config))
        if runner.usage().bytes_used:  # a test failed on it
            watched_runner.cache_clear()
            runner = watched_runner(_memory_settings(config))
    clock, counts = FakeClock(), Counts()
    if not keep:
        runner.clear_cache()
    runner.forget()
    runner.clock, runner.fail_in = clock, 0
    engine = Engine(runner, config, facts(config.model), recorder=counts, clock=clock.clock())
    return Lab(engine, runner, clock, counts, config=config)  # type: ignore[arg-type]


def _memory_settings(config: EngineConfig) -> EngineConfig:
    """Engines that differ only in how they schedule share a runner."""
    return EngineConfig(**{**vars(config), "max_num_batched_tokens": 1, "max_waiting": 1})


def ask(key: str, ids: Sequence[int], **options: Any) -> GenerationRequest:
    return request(key, ids, **{"ignore_eos": True, **options})


def text(seed: int, length: int) -> list[int]:
    """Token ids that no other seed begins with."""
    draw = random.Random(seed)
    return [draw.randrange(3, TOP_ID) for _ in range(length)]


def kept_rows(name: str, mode: DecoderReplay) -> int:
    """Rows of a prompt that the decoder half runs on, at least the last one."""
    return max(1, boundary_rows(load_runner(name, "fp32_noquant").config)[mode])


# what a result must be equal to


def reference(name: str, ids: Sequence[int], end: int, mode: DecoderReplay, hit: int = 0) -> np.ndarray:
    """Logits of positions end - 1 … len(ids) - 1, float32 [n, vocab]: a cold run whose prompt was ids[:end], in one chunk.

    OFF and EXACT: everything is one chunk through all layers. hit: the prefix is encoded exactly, and a bounded replay follows.
    """
    runner = load_runner(name, "fp32_noquant")
    bounded = mode is DecoderReplay.BOUNDED
    seq = open_sequence(runner, mode if bounded else DecoderReplay.OFF, len(ids))
    try:
        if hit:
            prefill(runner, seq, ids[:hit], last=False)
            runner.begin_replay(seq, hit, ids[:hit])
        start = seq.num_computed
        rows = prefill(runner, seq, ids[:end] if bounded else ids)
        if rows is not None:
            return rows[end - 1 - start :]
        return np.stack([tail(runner, seq), *[decode(runner, seq, token) for token in ids[end:]]])
    finally:
        runner.close(seq)


def assert_equal_to_cold(name: str, ids: list[int], passes: list[Pass], *, replayed: bool = False) -> int:
    """Every logit vector that a sequence got is that of a cold run, and every token the best one of it.

    replayed: a hit is followed by a bounded replay; else it must not show. Returns how many vectors were compared.
    """
    compared = 0
    for one in passes:
        if not one.logits:
            continue
        first, last = min(one.logits), max(one.logits)
        assert sorted(one.logits) == list(range(first, last + 1)), "a position is missing"
        last = min(last, first + LONGEST_COMPARED - 1)
        expected = reference(name, ids[: last + 1], first + 1, one.mode, one.hit if replayed else 0)
        actual = np.stack([one.logits[position] for position in range(first, last + 1)])
        error = np.abs(actual - expected).max()
        assert error <= TOLERANCE, f"{one.mode}, hit {one.hit}, positions {first}..{last} of {len(ids)}: {error}"
        assert_greedy(expected, ids, first, name)
        compared += len(actual)
    return compared


def assert_greedy(expected: np.ndarray, ids: Sequence[int], first: int, name: str) -> None:
    """The token after each position ``first`` … is the best one, where it leads clearly."""
    valid = expected[:, : facts(str(GOLDEN / name / "checkpoint")).num_valid_ids]
    ranked = np.sort(valid, axis=1)
    for row, position in enumerate(range(first, min(first + len(valid), len(ids) - 1))):
        if ranked[row, -1] - ranked[row, -2] >= MARGIN:
            assert ids[position + 1] == valid[row].argmax(), f"token {position + 1}"


def all_rings(runner: ModelRunner) -> list[torch.Tensor]:
    """The memory of what is private to slots, one tensor [slots + 1, …] per layer or source."""
    config, slots = runner.config, runner.cache.sizes.num_slots + 1
    rings = [runner.cache.window(layer).rows.view(slots, -1) for layer in range(config.num_hidden_layers)]
    return rings + [
        runner.cache.open_rows(source) for source in config.kv_source_layer_ids if config.compress_ratios[source] == 2
    ]


def all_pages(runner: ModelRunner) -> list[torch.Tensor]:
    """The memory of pages, one tensor [pages + 1, …] per source and kind."""
    pages = runner.cache.sizes.num_pages + 1
    pools = [
        pool
        for source in runner.config.kv_source_layer_ids
        for pool in (runner.cache.kv(source), runner.cache.index_keys(source))
    ]
    return [pool.rows.view(pages, -1) for pool in pools]


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def spoil(memory: torch.Tensor, rows: Sequence[int], byte: int = 0xFF) -> None:
    """Fill rows with what no reader may see: NaN, or a byte; 0xFF is NaN in every packed format."""
    if memory.dtype == torch.uint8:
        memory[list(rows)] = byte
    else:
        memory[list(rows)] = torch.nan


def spoil_unused(runner: ModelRunner, byte: int = 0xFF) -> None:
    """Everything that no open sequence, no name and no snapshot refers to."""
    cache = runner.cache
    for memory in all_pages(runner):
        spoil(memory, cache._pages._free, byte)
    for memory in all_rings(runner):
        spoil(memory, cache._slots._free, byte)
