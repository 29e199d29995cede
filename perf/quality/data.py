# SPDX-License-Identifier: Apache-2.0
"""Training sequences: documents of generated tasks and of text, packed into rows of `CONTEXT` tokens."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from perf.quality.corpus import Corpus
from perf.quality.settings import CONTEXT
from perf.quality.tasks import TASKS, Draw, Item, Turn

from cedar.text.chat import ASSISTANT, END_THINK, ChatDefaults, encode_messages
from cedar.text.dsml import ToolCall, render_calls
from cedar.text.tokenizer import Piece, Tokenizer, load_tokenizer

ALIGN = 8
"""Documents start at multiples of this: a pair of tokens that is compressed together, and a candidate block, is the same as
when the document is served alone."""
ROWS = 16
"""Rows of a shard, the unit that one worker makes."""
ANSWER, PROMPT, TEXT = 1.0, 0.05, 0.5
"""Weights of a token in the loss: said by the assistant; said to it; of a text."""
FULL_LENGTH_FROM = 0.35
"""Share of the training after which documents may fill a row; before that they grow from an eighth of it."""

MIXTURES = {
    "tasks": {
        "text": 0.20,
        "copy": 0.10,
        "arithmetic": 0.12,
        "word_problem": 0.07,
        "recall": 0.30,
        "chain": 0.07,
        "program": 0.07,
        "tool_call": 0.06,
        "small_talk": 0.01,
    },
    "conversations": {
        "text": 0.10,
        "copy": 0.07,
        "arithmetic": 0.07,
        "word_problem": 0.05,
        "recall": 0.35,
        "chain": 0.05,
        "program": 0.05,
        "tool_call": 0.05,
        "small_talk": 0.01,
        "conversation": 0.20,
    },
}
"""Share of the tokens by stage of the training. A kind is drawn as long as it is behind its share."""
LONG_STAGES = ("conversations",)
"""Stages whose documents may fill a row from the beginning, and are more often long."""


@dataclass(frozen=True)
class Rows:
    """[n, CONTEXT] each. doc_start: the first token of each token's document. weight: of predicting each token."""

    tokens: npt.NDArray[np.uint16]
    doc_start: npt.NDArray[np.int16]
    weight: npt.NDArray[np.float16]


class Encoder:
    """Items and texts to token ids and loss weights."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._defaults = ChatDefaults()
        self._assistant = tokenizer.token_id(ASSISTANT)

    def prompt(self, item: Item, *, thinking: bool) -> list[int]:
        """What a server makes of the conversation before its last answer."""
        messages: list[dict[str, Any]] = []
        for number, turn in enumerate(item.turns):
            calls = item.turns[number - 1].calls
            for index, result in enumerate(turn.results):
                messages.append({"role": "tool", "content": result, "tool_call_id": f"call{number - 1}_{index % len(calls)}"})
            if not turn.results:
                messages.append({"role": "user", "content": turn.user})
            if number < len(item.turns) - 1:
                messages.append(_assistant(turn, number, thinking))
        payload: dict[str, Any] = {"messages": messages, "thinking": thinking}
        if item.tools:
            payload["tools"] = item.tools
        return encode_messages(payload, self.tokenizer, self._defaults).input_ids

    def completion(self, turn: Turn, *, thinking: bool) -> list[int]:
        """What the model should say then, to the end of its turn."""
        pieces = [Piece(turn.reasoning), Piece(END_THINK, control=True)] if thinking else []
        pieces.append(Piece(_content(turn, thinking)))
        if turn.calls:
            pieces.append(Piece("\n\n"))
            pieces += render_calls(ToolCall(call["name"], call["arguments"]) for call in turn.calls)
        return self.tokenizer.encode_pieces([*pieces, Piece(self.tokenizer.eos_token, control=True)])

    def item(self, item: Item, *, thinking: bool) -> tuple[list[int], list[float]]:
        """Token ids of the whole conversation and the weight of predicting each."""
        ids = self.prompt(item, thinking=thinking) + self.completion(item.turns[-1], thinking=thinking)
        # an earlier turn whose reasoning is no longer shown is not an example of how to answer
        shown = [not thinking or not turn.reasoning or bool(item.tools) for turn in item.turns[:-1]] + [True]
        weights, saying, turn = [], -1, -1  # saying: tokens since the turn began; its first is the template's, not its own
        for token in ids:
            weights.append(ANSWER if saying >= 1 and shown[turn] else PROMPT)
            saying = saying + 1 if saying >= 0 else -1
            if token == self._assistant:
                saying, turn = 0, turn + 1
            elif token == self.tokenizer.eos_id:
                saying = -1
        return ids, weights


def _content(turn: Turn, thinking: bool) -> str:
    """Steps belong to the answer when there is no reasoning to put them in. A call needs no words."""
    if thinking or turn.calls or not turn.reasoning:
        return turn.answer
    return f"{turn.reasoning}\n{turn.answer}"


def _assistant(turn: Turn, number: int, thinking: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(turn, thinking), "reasoning_content": turn.reasoning}
    if turn.calls:
        message["tool_calls"] = [{"id": f"call{number}_{index}", "function": call} for index, call in enumerate(turn.calls)]
    return message


class Source:
    """Endless rows. Shard ``n`` is the same whoever makes it: it depends on the seed, ``n`` and the progress alone."""

    def __init__(self, data: Path, tokenizer: Path, seed: int, stage: str) -> None:
        """data: what `perf.quality.prepare` wrote; tokenizer: the same, or a checkpoint that training goes on from."""
        self.corpus = Corpus.load(data / "text.json.xz")
        self.encoder = Encoder(load_tokenizer(tokenizer))
        self.seed, self.stage = seed, stage
        texts = [self.encoder.tokenizer.encode(text) for text in self.corpus.train]
        self._text = np.array([token for text in texts for token in [*text, self.encoder.tokenizer.eos_id]], np.uint16)

    def shard(self, number: int, total: int) -> Rows:
        """Rows [number * ROWS, (number + 1) * ROWS) of a training of ``total`` shards."""
        draw = Draw(f"{self.seed}/{number}", held_out=False, text=self.corpus.passage)
        mixture, long = MIXTURES[self.stage], self.stage in LONG_STAGES
        longest = CONTEXT if long else int(CONTEXT * min(1.0, 0.125 + 0.875 * number / (FULL_LENGTH_FROM * total)))
        pack = _Packer(self.encoder.tokenizer.token_id("<｜▁pad▁｜>"))
        used = dict.fromkeys(mixture, 1)
        waiting: tuple[list[int], list[float]] | None = None
        while not pack.full:
            kind = min(mixture, key=lambda name: used[name] / mixture[name])
            if waiting is None and kind != "text":
                waiting = self._document(draw, kind, longest)
                used[kind] += len(waiting[0])
            if waiting is not None and pack.room >= len(waiting[0]):
                pack.add(*waiting)
                waiting = None
            else:
                ids = self._passage(draw, min(pack.room, longest if waiting is None else pack.room))
                used["text"] += len(ids)
                pack.add(ids, [TEXT] * len(ids))
        return pack.rows()

    def _document(self, draw: Draw, kind: str, longest: int) -> tuple[list[int], list[float]]:
        """One conversation of at most ``longest`` tokens."""
        while True:
            octave = draw.random.random()  # as many short as long ones; in a long stage, more of the long
            size = int(64 * (longest / 64) ** (octave**0.5 if self.stage in LONG_STAGES else octave))
            item = TASKS[kind](draw, size)
            thinking = draw.random.random() < 0.5
            if item.kind == "arithmetic" and thinking:
                item.turns = item.turns[-1:]  # earlier turns would be shown without their steps
            ids, weights = self.encoder.item(item, thinking=thinking)
            if len(ids) <= max(longest, CONTEXT // 2 if kind == "tool_call" else 0):
                return ids, weights

    def _passage(self, draw: Draw, length: int) -> list[int]:
        start = draw.random.randrange(len(self._text) - length)
        return [self.encoder.tokenizer.bos_id, *map(int, self._text[start : start + length - 1])][:length]


class _Packer:
    def __init__(self, pad: int) -> None:
        self._tokens = np.full((ROWS, CONTEXT), pad, np.uint16)
        self._start = np.zeros((ROWS, CONTEXT), np.int16)
        self._weight = np.zeros((ROWS, CONTEXT), np.float16)
        self._row = self._at = 0

    @property
    def full(self) -> bool:
        return self._row == ROWS

    @property
    def room(self) -> int:
        return CONTEXT - self._at

    def add(self, ids: list[int], weights: list[float]) -> None:
        at, end = self._at, self._at + len(ids)
        self._tokens[self._row, at:end] = ids
        self._weight[self._row, at:end] = weights
        self._weight[self._row, at] = 0  # nothing comes before it
        self._start[self._row, at:] = at
        self._at = -(-end // ALIGN) * ALIGN
        if self.room < 4 * ALIGN:
            self._row, self._at = self._row + 1, 0

    def rows(self) -> Rows:
        return Rows(self._tokens, self._start, self._weight)


_source: Source | None = None


def _work(total: int, number: int) -> Rows:
    assert _source is not None
    return _source.shard(number, total)


def shards(data: Path, tokenizer: Path, seed: int, stage: str, first: int, total: int, workers: int) -> Iterator[Rows]:
    """Shards ``first`` to ``total`` - 1 in order, made ahead of time by ``workers`` processes. Fork before using a GPU."""
    global _source
    _source = Source(data, tokenizer, seed, stage)
    if workers == 0:
        yield from (_source.shard(number, total) for number in range(first, total))
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(partial(_work, total), range(first, total), chunksize=1)


def draw_for(split_seed: int | str, corpus: Corpus) -> Draw:
    """Choices of the evaluation split."""

    def text(source: random.Random, characters: int) -> str:
        return corpus.passage(source, characters, held_out=True)

    return Draw(f"eval/{split_seed}", held_out=True, text=text)
