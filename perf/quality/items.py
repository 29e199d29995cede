# SPDX-License-Identifier: Apache-2.0
"""Held-out items as questions, in blocks. An item depends on the seed, its task and its number alone, and no two of a task are
alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from perf.quality.corpus import Corpus
from perf.quality.data import Encoder, draw_for
from perf.quality.serving import Question
from perf.quality.tasks import NEEDLE_FACTS, TASKS, Draw, Item, after_notes, draw_facts, recall_at

from cedar.errors import invalid
from cedar.text.tokenizer import load_tokenizer

LATER = ("copy", "arithmetic", "word_problem", "chain", "program", "tool_call")
NOTES_TOKENS = 420
LEAST_TOKENS = 320
"""Of a long prompt: two windows and more."""
DISTANCES = (256, 512, 1024, 1600)
SIZE = 160
MOST_DRAWS = 1000
"""Of one item; a task with so many that were drawn before has no others, or hardly."""
T = TypeVar("T")
LONG_TASKS = (*LATER, *(f"recall_{distance}" for distance in DISTANCES))


class Distinct(Generic[T]):
    """Things by number, each drawn from a source of its own: again, until its key is new. So a thing depends on those before it,
    and they are drawn first."""

    def __init__(self, name: str, source: Callable[[int], Draw], make: Callable[[Draw], T], key: Callable[[T], str]) -> None:
        self._name, self._source, self._make, self._key = name, source, make, key
        self._found: list[T] = []
        self._keys: set[str] = set()

    def __getitem__(self, number: int) -> T:
        """Raises CedarError when there are not so many."""
        while len(self._found) <= number:
            self._found.append(self._new(self._source(len(self._found))))
        return self._found[number]

    def _new(self, draw: Draw) -> T:
        for _ in range(MOST_DRAWS):
            thing = self._make(draw)
            key = self._key(thing)
            if key not in self._keys:
                self._keys.add(key)
                return thing
        raise invalid("--items", f"is more than there are of {self._name}", f"at most {len(self._found)}, with this seed")


class Sets:
    """Items of the evaluation split: half of them with reasoning."""

    def __init__(self, model: Path, corpus: Corpus, seed: int) -> None:
        self.encoder = Encoder(load_tokenizer(model))
        self.corpus = corpus
        self._seed = seed
        self._items = {kind: Distinct(kind, partial(self._draw, kind), partial(_short, kind), self._text) for kind in LATER}
        needle = partial(draw_facts, count=NEEDLE_FACTS)
        self._facts = {
            distance: Distinct(name, partial(self._draw, name), needle, lambda facts: facts[0][0])
            for distance, name in ((distance, f"recall {distance}") for distance in DISTANCES)
        }

    def alone(self, numbers: range) -> list[Question]:
        """Short prompts, where bounded replay changes nothing: what the model can do."""
        return [self._question(kind, n, self._items[kind][n]) for kind in LATER for n in numbers]

    def long(self, numbers: range) -> list[Question]:
        """Prompts of several windows: each of the short items after a page of notes, and recall over controlled distances."""
        found = []
        for kind in LATER:
            for n in numbers:
                draw, item = self._draw(f"later {kind}", n), self._items[kind][n]
                while True:  # notes may be of any length, and a short prompt leaves replay nothing to change
                    question = self._question(kind, n, after_notes(draw, item, NOTES_TOKENS))
                    if len(question.prompt) >= LEAST_TOKENS:
                        break
                found.append(question)
        for distance, facts in self._facts.items():
            for n in numbers:
                draw = self._draw(f"around {distance}", n)
                item = recall_at(draw, facts[n], distance, lambda text: len(self.encoder.tokenizer.encode(text)))
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

    @staticmethod
    def _text(item: Item) -> str:
        """All that a prompt says."""
        return repr((item.tools, [turn.user for turn in item.turns]))

    def _draw(self, name: str, number: int) -> Draw:
        return draw_for(f"{self._seed} {name} {number}", self.corpus)

    def _question(self, kind: str, number: int, item: Item) -> Question:
        thinking = number % 2 == 0
        prompt = self.encoder.prompt(item, thinking=thinking)
        return Question(kind, tuple(prompt), tuple(self.encoder.completion(item.turns[-1], thinking=thinking)))


def _short(kind: str, draw: Draw) -> Item:
    return TASKS[kind](draw, SIZE)
