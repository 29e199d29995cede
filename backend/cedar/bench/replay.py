# SPDX-License-Identifier: Apache-2.0
"""Time to first token by replay mode, cold and on a prefix hit: the engine and its runner alone, without a server.

Every figure is a request that the engine really served: the time is from `Engine.add` to the step that gave the token, and the
rows are counted where layers are launched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cedar.bench.stats import summary
from cedar.config.engine import EngineConfig
from cedar.config.presets import preset
from cedar.engine.admission import ModelFacts
from cedar.engine.engine import Engine
from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason, GenerationRequest, SamplingParams
from cedar.engine.runner import ModelRunner
from cedar.errors import CedarError, ErrorCode, invalid
from cedar.model.make import make_checkpoint
from cedar.text.tokenizer import load_tokenizer

PRESET = "small"
NEW_TOKENS = 100
"""Tokens at the end of a prompt that its prefix hit does not share: no multiple of pages or snapshots, which hits end at."""
LEAST_PROMPT_TOKENS = 512
"""Short prompts say nothing: each window is a large part of them."""
MODES = {
    "both sides": (EncoderReplay.BOUNDED, DecoderReplay.BOUNDED),
    "decoder side": (EncoderReplay.OFF, DecoderReplay.BOUNDED),
    "encoder side": (EncoderReplay.BOUNDED, DecoderReplay.OFF),
    "off": (EncoderReplay.OFF, DecoderReplay.OFF),
}
PREFIXES = ("cold", "hit")


@dataclass(frozen=True)
class Served:
    """One request up to its first token. Rows that ran: through each layer, and through the cut layer's KV projection."""

    ttft_s: float
    cached_tokens: int
    replayed_tokens: int
    layer_rows: tuple[int, ...]
    source_rows: int


class ReplayBench:
    """An engine with one request at a time."""

    def __init__(self, settings: EngineConfig) -> None:
        self.runner = ModelRunner.load(settings)
        config = self.runner.config
        facts = ModelFacts.of(config, len(load_tokenizer(Path(settings.model))))
        self._engine = Engine(self.runner, settings, facts)
        self._ids = np.delete(np.arange(facts.num_valid_ids), [config.image_token_id, config.eos_token_id])
        self._random = np.random.Generator(np.random.PCG64(0))
        self._served = 0

    def measure(self, prompt_tokens: int, runs: int, done: Callable[[], object] = lambda: None) -> list[dict[str, Any]]:
        """One row per mode and prefix. The modes take turns, so that what else the machine does falls on all of them."""
        self._warm_up()
        found: dict[tuple[str, str], list[Served]] = {(mode, prefix): [] for mode in MODES for prefix in PREFIXES}
        for _ in range(runs):
            prompt, end = self._random.choice(self._ids, prompt_tokens), self._random.choice(self._ids, NEW_TOKENS)
            hit = np.concatenate([prompt[:-NEW_TOKENS], end])
            for mode in MODES:
                self.runner.clear_cache()
                found[mode, "cold"].append(self.serve(prompt, mode))
                found[mode, "hit"].append(self.serve(hit, mode))
                done()
        return [self._row(mode, prefix, prompt_tokens, served) for (mode, prefix), served in found.items()]

    def serve(self, prompt: np.ndarray[Any, np.dtype[np.int64]], mode: str) -> Served:
        """Run one request to its first token, which is its last. Raises `CedarError` if it ends in any other way."""
        encoder, decoder = MODES[mode]
        self._served += 1
        request = GenerationRequest(
            key=f"{mode} {self._served}",
            input_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            encoder_replay=encoder,
            decoder_replay=decoder,
        )
        work = self.runner.model.work
        layers, source = list(work.layers), work.source_rows
        start = time.perf_counter()
        self._engine.attach(self._engine.add(request))
        while self._engine.num_live:
            updates = self._engine.step()
        ttft = time.perf_counter() - start
        (last,) = updates
        if last.finish_reason is not FinishReason.LENGTH:
            raise last.error or CedarError(ErrorCode.INTERNAL, f"request_key {request.key}: ended as {last.finish_reason}")
        rows = tuple(after - before for after, before in zip(work.layers, layers, strict=True))
        return Served(ttft, last.cached_tokens, last.replayed_tokens, rows, work.source_rows - source)

    def _warm_up(self) -> None:
        """First-use costs belong to no mode."""
        for mode in MODES:
            self.serve(self._random.choice(self._ids, LEAST_PROMPT_TOKENS), mode)

    def _row(self, mode: str, prefix: str, prompt_tokens: int, served: list[Served]) -> dict[str, Any]:
        """The runs of one case. What is counted must be the same in all of them, and a hit must have been one."""
        counted = {(run.cached_tokens, run.replayed_tokens, run.layer_rows, run.source_rows) for run in served}
        if len(counted) > 1:
            raise CedarError(ErrorCode.INTERNAL, f"{mode}, {prefix}: the runs did different work: {sorted(counted)}")
        ((cached, replayed, layer_rows, source_rows),) = counted
        if (prefix == "hit") != bool(cached):
            raise CedarError(ErrorCode.INTERNAL, f"{mode}, {prefix}: {cached} tokens came from the prefix cache")
        encoder, decoder = MODES[mode]
        return {
            "replay": mode,
            "encoder_replay": encoder.value,
            "decoder_replay": decoder.value,
            "prefix": prefix,
            "cached_tokens": cached,
            "replayed_tokens": replayed,
            "rows_x_layers": sum(layer_rows),
            "full_work_percent": round(100 * sum(layer_rows) / (prompt_tokens * len(layer_rows)), 2),
            "source_rows": source_rows,
            "ttft_ms": summary((run.ttft_s for run in served), 1e3),
        }


def measure(
    model: str, prompt_tokens: int, runs: int, done: Callable[[], object] = lambda: None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was measured, and one row per mode and prefix. model: a checkpoint directory; empty: a fresh one of preset `PRESET`.

    The environment's settings hold (threads, budget, page size); the replay modes are the requests' own.
    """
    with _checkpoint(model) as directory:
        settings = EngineConfig.load({"model": str(directory)})
        bench = ReplayBench(settings)
        longest = bench.runner.max_model_len - 1
        if not LEAST_PROMPT_TOKENS <= prompt_tokens <= longest:
            raise invalid("--prompt-tokens", f"is {prompt_tokens}", f"{LEAST_PROMPT_TOKENS} to {longest}")
        config = bench.runner.config
        measured = {
            "model": model or PRESET,
            "device": str(next(bench.runner.model.parameters()).device),
            "cpu_threads": settings.cpu_threads or len(os.sched_getaffinity(0)),
            "dtype": str(bench.runner.model.dtype).removeprefix("torch."),
            "layers": config.num_hidden_layers,
            "cut": config.cut,
            "sliding_window": config.sliding_window,
            "prompt_tokens": prompt_tokens,
            "shared_tokens": prompt_tokens - NEW_TOKENS,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "runs": runs,
        }
        return measured, bench.measure(prompt_tokens, runs, done)


@contextmanager
def _checkpoint(model: str) -> Iterator[Path]:
    if model:
        yield Path(model)
        return
    with TemporaryDirectory(prefix="cedar-bench-") as scratch:
        make_checkpoint(preset(PRESET), Path(scratch) / PRESET)
        yield Path(scratch) / PRESET
