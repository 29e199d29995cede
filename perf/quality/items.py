# SPDX-License-Identifier: Apache-2.0
"""Held-out items as questions, in blocks. An item depends on the seed, its task and its number alone."""

from __future__ import annotations

from pathlib import Path

from perf.quality.corpus import Corpus
from perf.quality.data import Encoder, draw_for
from perf.quality.serving import Question
from perf.quality.tasks import TASKS, Draw, Item, after_notes, recall_at

from cedar.text.tokenizer import load_tokenizer

LATER = ("copy", "arithmetic", "word_problem", "chain", "program", "tool_call")
NOTES_TOKENS = 420
LEAST_TOKENS = 320
"""Of a long prompt: two windows and more."""
DISTANCES = (256, 512, 1024, 1600)
SIZE = 160
LONG_TASKS = (*LATER, *(f"recall_{distance}" for distance in DISTANCES))


class Sets:
    """Items of the evaluation split: half of them with reasoning."""

    def __init__(self, model: Path, corpus: Corpus, seed: int) -> None:
        self.encoder = Encoder(load_tokenizer(model))
        self.corpus = corpus
        self._seed = seed

    def alone(self, numbers: range) -> list[Question]:
        """Short prompts, where bounded replay changes nothing: what the model can do."""
        return [self._question(kind, n, TASKS[kind](self._draw(kind, n), SIZE)) for kind in LATER for n in numbers]

    def long(self, numbers: range) -> list[Question]:
        """Prompts of several windows: each task after a page of notes, and recall over controlled distances."""
        found = []
        for kind in LATER:
            for n in numbers:
                draw = self._draw(f"later {kind}", n)
                while True:  # notes may be of any length, and a short prompt leaves replay nothing to change
                    question = self._question(kind, n, after_notes(draw, TASKS[kind](draw, SIZE), NOTES_TOKENS))
                    if len(question.prompt) >= LEAST_TOKENS:
                        break
                found.append(question)
        for distance in DISTANCES:
            for n in numbers:
                item = recall_at(
                    self._draw(f"recall {distance}", n), distance, lambda text: len(self.encoder.tokenizer.encode(text))
                )
                found.append(self._question(item.kind, n, item))
        return found

    def texts(self, count: int, length: int) -> list[list[int]]:
        """Token ids of passages of held-out text."""
        draw = self._draw("text", 0)
        found: list[list[int]] = []
        while len(found) < count:
            passage = self.corpus.passage(draw.random, 8 * length, held_out=True)
            ids = [self.encoder.tokenizer.bos_id, *self.encoder.tokenizer.encode(passage)]
            if len(ids) >= length:
                found.append(ids[:length])
        return found

    def _draw(self, name: str, number: int) -> Draw:
        return draw_for(f"{self._seed} {name} {number}", self.corpus)

    def _question(self, kind: str, number: int, item: Item) -> Question:
        thinking = number % 2 == 0
        prompt = self.encoder.prompt(item, thinking=thinking)
        return Question(kind, tuple(prompt), tuple(self.encoder.completion(item.turns[-1], thinking=thinking)))
