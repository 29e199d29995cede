# SPDX-License-Identifier: Apache-2.0
"""Items answered by the engine: requests of many items at once, in one replay mode, with or without a prefix hit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cedar.cache.store import page_bytes, slot_bytes
from cedar.config.engine import EngineConfig
from cedar.config.model import ModelConfig
from cedar.engine.admission import ModelFacts
from cedar.engine.budget import cache_formats
from cedar.engine.device import resolve_device, resolve_dtype
from cedar.engine.engine import Engine
from cedar.engine.replay import SeamSizes
from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason, GenerationRequest, SamplingParams
from cedar.engine.runner import ModelRunner
from cedar.errors import CedarError, ErrorCode
from cedar.text.tokenizer import load_tokenizer

TOP = 5
EXTRA_TOKENS = 4
"""A right answer ends; a wrong one may go on this much longer than the right one."""
ITEM_TOKENS = 2048
"""Prompt and answer of an item, as memory is planned: the context that the model was trained on."""
GROUPS = 8
"""Items whose prefixes are cached at one time, in sequences that run at one time, when not all can run at one time."""


@dataclass(frozen=True)
class Question:
    """One item as the engine sees it: the prompt's ids, and the ids that are the right answer, the end token last."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """One way to serve. hit: share of the prompt whose pages are cached beforehand (0: a cold prompt). chunk: tokens of a step;
    0: as many as the measurement allows. ops: provider of the operations; empty: as in all other cells. global_kv: as in
    `EngineConfig`."""

    name: str
    encoder: EncoderReplay
    decoder: DecoderReplay
    hit: float = 0.0
    chunk: int = 0
    ops: str = ""
    global_kv: str = "nvfp4"


PREFIX = Cell("prefix", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED)
"""How the pages that a hit finds are made."""


@dataclass
class Answer:
    """token_ids as generated. first: log-probabilities of the best ids in the place of the first, best first. chunks: steps that
    the engine cut the prompt's work into; on a hit, with those that its prefix took beforehand."""

    token_ids: list[int] = field(default_factory=list)
    first: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0
    replayed_tokens: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class Serving:
    """How a `Server` runs. device, dtype, ops, global_kv: as in `EngineConfig`. chunk: tokens of a step. sequences: items at one
    time, and in this replay mode all of them; items: whose prefixes are kept at one time. threads: of a CPU."""

    model: Path
    device: str
    dtype: str
    ops: str
    chunk: int
    sequences: int
    items: int
    decoder: DecoderReplay = DecoderReplay.EXACT
    global_kv: str = "nvfp4"
    threads: int = 1

    def settings(self) -> EngineConfig:
        settings = EngineConfig.load(
            {
                "model": str(self.model),
                "device": self.device,
                "dtype": self.dtype,
                "ops": self.ops,
                "global_kv": self.global_kv,
                "cpu_threads": self.threads,
                "max_num_batched_tokens": self.chunk,
                "max_num_seqs": self.sequences,
                "max_waiting": 1 << 20,
                "decoder_replay": self.decoder.value,  # its boundary rows, of every sequence, are part of the budget
            }
        )
        return replace(settings, kv_cache_bytes=self._cache_bytes(settings))

    def _cache_bytes(self, settings: EngineConfig) -> int:
        """What all ``sequences`` need to run at one time in any mode, and the pages of all ``items``."""
        config = ModelConfig.load(self.model)
        dtype = resolve_dtype(settings, resolve_device(settings))
        formats = cache_formats(config, dtype, fake_quant=settings.fake_quant, global_kv=self.global_kv)
        page, slot = (size(config, formats, settings.page_tokens) for size in (page_bytes, slot_bytes))
        private = self.sequences * (slot + SeamSizes.of(config, dtype, formats.window).bytes(self.decoder))
        pages = self.items * (ITEM_TOKENS // settings.page_tokens + 1) * page
        return private + max(private, pages) + 2 * (page + slot)  # no budget gives sequences more than half


class Server:
    """One runner in this process, with an engine for each chunk size."""

    def __init__(self, serving: Serving) -> None:
        self._settings, self.serving = serving.settings(), serving
        self.runner = ModelRunner.load(self._settings)
        self._facts = ModelFacts.of(self.runner.config, len(load_tokenizer(serving.model)))
        self._engines: dict[int, Engine] = {}

    def answer(self, questions: Sequence[Question], cell: Cell) -> list[Answer]:
        """Greedy answers in the order of the questions."""
        return self.answers(questions, [cell])[0]

    def answers(self, questions: Sequence[Question], cells: Sequence[Cell]) -> list[list[Answer]]:
        """Greedy answers by cell, in the order of the questions. All cells, of one chunk size, are served together: a step costs
        hardly more with more sequences. No two share cached pages: each has a salt of its own. Prefixes are cut as prompts
        are."""
        chunk = cells[0].chunk
        answers: list[Answer] = []
        tasks = [(question, cell) for question in questions for cell in cells]
        for start in range(0, len(tasks), self.serving.items):
            group = tasks[start : start + self.serving.items]
            self.runner.clear_cache()
            prefixes = {n: q.prompt[: self._hit(len(q.prompt), cell.hit)] for n, (q, cell) in enumerate(group) if cell.hit}
            prefixes = {n: prefix for n, prefix in prefixes.items() if prefix}
            made = self._run(((f"prefix {n}", prefix, 1, PREFIX, n) for n, prefix in prefixes.items()), chunk)
            requests = ((f"item {n}", q.prompt, len(q.answer) + EXTRA_TOKENS, cell, n) for n, (q, cell) in enumerate(group))
            answers += self._run(requests, chunk)
            self._check_hits(group, answers[start:])
            for n, prefix in zip(prefixes, made, strict=True):
                answers[start + n].chunks += prefix.chunks
        return [answers[number :: len(cells)] for number in range(len(cells))]

    def _check_hits(self, group: Sequence[tuple[Question, Cell]], answers: Sequence[Answer]) -> None:
        """A prefix that was evicted would make a cold prompt of a hit, and nobody would see it."""
        for (question, cell), answer in zip(group, answers, strict=True):
            hit = self._hit(len(question.prompt), cell.hit)
            expected = hit if hit > self.runner.config.sliding_window else 0
            if answer.cached_tokens != expected:
                problem = f"{cell.name}: {answer.cached_tokens} tokens of a prompt were cached instead of {expected}"
                raise CedarError(ErrorCode.INTERNAL, problem)

    def _hit(self, length: int, share: float) -> int:
        """Whole pages that leave at least the last token."""
        page = self.runner.page_tokens
        return min(round(length * share), length - 1) // page * page

    def _engine(self, chunk: int) -> Engine:
        """The runner has no part in how prompts are cut, so it serves every engine, one after another."""
        if chunk not in self._engines:
            settings = replace(self._settings, max_num_batched_tokens=chunk)
            self._engines[chunk] = Engine(self.runner, settings, self._facts)
        return self._engines[chunk]

    def _run(self, requests: Iterable[tuple[str, tuple[int, ...], int, Cell, int]], chunk: int) -> list[Answer]:
        engine = self._engine(chunk or self.serving.chunk)
        answers: dict[str, Answer] = {}
        for key, prompt, tokens, cell, salt in requests:
            request = GenerationRequest(
                key=key,
                input_ids=prompt,
                sampling=SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=TOP),
                encoder_replay=cell.encoder,
                decoder_replay=cell.decoder,
                cache_salt=str(salt),
            )
            handle = engine.add(request)
            engine.attach(handle)
            answers[handle] = Answer()
        while engine.num_live:
            for update in engine.step():
                answer = answers[update.handle]
                if update.logprobs and not answer.token_ids:
                    answer.first = update.logprobs[0].top
                answer.token_ids += update.token_ids
                answer.chunks += update.encoded_tokens > 0
                answer.cached_tokens, answer.replayed_tokens = update.cached_tokens, update.replayed_tokens
                if update.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                    raise update.error or CedarError(ErrorCode.INTERNAL, f"a request ended as {update.finish_reason}")
        return list(answers.values())


def is_right(question: Question, answer: Answer) -> bool:
    """Exactly the right ids, and then the end."""
    return tuple(answer.token_ids) == question.answer


def shift(one: Answer, other: Answer) -> float:
    """How far the first token's log-probabilities are apart: the largest difference over the best ids that both name."""
    first, second = dict(one.first), dict(other.first)
    return max((abs(first[token] - second[token]) for token in first.keys() & second.keys()), default=float("inf"))
