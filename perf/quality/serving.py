# SPDX-License-Identifier: Apache-2.0
"""Items answered by the engine: requests of many items at once, in one replay mode, with or without a prefix hit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cedar.config.engine import EngineConfig
from cedar.engine.admission import ModelFacts
from cedar.engine.engine import Engine
from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason, GenerationRequest, SamplingParams
from cedar.engine.runner import ModelRunner
from cedar.errors import CedarError, ErrorCode
from cedar.text.tokenizer import load_tokenizer

TOP = 5
EXTRA_TOKENS = 4
"""A right answer ends; a wrong one may go on this much longer than the right one."""


GROUPS = 8
"""Items whose prefixes are cached at one time, in sequences that run at one time."""


@dataclass(frozen=True)
class Question:
    """One item as the engine sees it: the prompt's ids, and the ids that are the right answer, the end token last."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """One way to serve. hit: share of the prompt whose pages are cached beforehand (0: a cold prompt). chunk: tokens of a step;
    0: as many as the measurement allows."""

    name: str
    encoder: EncoderReplay
    decoder: DecoderReplay
    hit: float = 0.0
    chunk: int = 0


@dataclass
class Answer:
    """token_ids as generated. first: log-probabilities of the best ids in the place of the first, best first."""

    token_ids: list[int] = field(default_factory=list)
    first: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0
    replayed_tokens: int = 0


class Server:
    """An engine in this process. One `Server` for each chunk size and arithmetic."""

    def __init__(self, model: Path, *, device: str, dtype: str, chunk: int, sequences: int, cache_bytes: int) -> None:
        settings = EngineConfig.load(
            {
                "model": str(model),
                "device": device,
                "dtype": dtype,
                "max_num_batched_tokens": chunk,
                "max_num_seqs": sequences,
                "max_waiting": 1 << 20,
                "kv_cache_bytes": cache_bytes,
            }
        )
        self.runner = ModelRunner.load(settings)
        self._engine = Engine(self.runner, settings, ModelFacts.of(self.runner.config, len(load_tokenizer(model))))
        self._sequences = sequences

    def answer(self, questions: Sequence[Question], cell: Cell, done: Callable[[], object] = lambda: None) -> list[Answer]:
        """Greedy answers in the order of the questions. Items never share cached pages: each has a salt of its own."""
        answers: list[Answer] = []
        for start in range(0, len(questions), GROUPS * self._sequences):
            group = questions[start : start + GROUPS * self._sequences]
            self.runner.clear_cache()
            if cell.hit:
                prefixes = (q.prompt[: self._hit(len(q.prompt), cell.hit)] for q in group)
                self._run(
                    (f"prefix {n}", prefix, 1, Cell("prefix", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED), n)
                    for n, prefix in enumerate(prefixes)
                    if prefix
                )
            requests = ((f"item {n}", q.prompt, len(q.answer) + EXTRA_TOKENS, cell, n) for n, q in enumerate(group))
            answers += self._run(requests)
            for _ in group:
                done()
        return answers

    def _hit(self, length: int, share: float) -> int:
        """Whole pages that leave at least the last token."""
        page = self.runner.page_tokens
        return min(round(length * share), length - 1) // page * page

    def _run(self, requests: Iterable[tuple[str, tuple[int, ...], int, Cell, int]]) -> list[Answer]:
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
            handle = self._engine.add(request)
            self._engine.attach(handle)
            answers[handle] = Answer()
        while self._engine.num_live:
            for update in self._engine.step():
                answer = answers[update.handle]
                if update.logprobs and not answer.token_ids:
                    answer.first = update.logprobs[0].top
                answer.token_ids += update.token_ids
                answer.cached_tokens, answer.replayed_tokens = update.cached_tokens, update.replayed_tokens
                if update.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                    raise update.error or CedarError(ErrorCode.INTERNAL, f"a request ended as {update.finish_reason}")
        return list(answers.values())


def is_right(question: Question, answer: Answer) -> bool:
    """Exactly the right ids, and then the end."""
    return tuple(answer.token_ids) == question.answer


def is_changed(one: Answer, other: Answer) -> bool:
    """Do the logits of the first token differ? Its best id alone may have probability 1 in both."""
    ids = [{token for token, _ in answer.first} for answer in (one, other)]
    return ids[0] != ids[1] or any(abs(a - b) > 1e-4 for (_, a), (_, b) in zip(one.first, other.first, strict=True))
