# SPDX-License-Identifier: Apache-2.0
"""Held-out items in the training forward: how often would greedy decoding say exactly the right thing?

Greedy decoding is right if and only if, given the right beginning, every next token is the most probable one; so one forward
over the whole conversation tells it. The figures of the README come from the engine (`perf.quality.eval`), not from here.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from perf.quality.corpus import Corpus
from perf.quality.data import ALIGN, PROMPT, ROWS, Encoder, Rows, draw_for
from perf.quality.settings import CONTEXT
from perf.quality.tasks import NEEDLE_FACTS, TASKS, Item, after_notes, draw_facts, recall_at

from cedar.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from perf.quality.train import Trainer

PER_KIND = 48
DISTANCES = (256, 512, 1024, 1600)


class Probe:
    """Callable: share of items answered exactly, by kind. Batches have the training's shape, and gradients are on: a compiled
    function is compiled anew for either."""

    def __init__(self, data: Path, tokenizer: Path, trainer: Trainer) -> None:
        encoder = Encoder(load_tokenizer(tokenizer))
        draw = draw_for("probe", Corpus.load(data / "text.json.xz"))
        items: list[Item] = [make(draw, 160) for make in TASKS.values() for _ in range(PER_KIND)]
        alone = [kind for kind in TASKS if kind not in ("recall", "small_talk", "conversation")]
        items += [_renamed(after_notes(draw, TASKS[kind](draw, 160), 300)) for kind in alone for _ in range(PER_KIND)]
        for distance in DISTANCES:
            items += [
                recall_at(draw, draw_facts(draw, NEEDLE_FACTS), distance, lambda text: len(encoder.tokenizer.encode(text)))
                for _ in range(PER_KIND)
            ]
        self._trainer = trainer
        self._batches: list[tuple[Rows, list[tuple[str, int, int, int]]]] = []
        documents = [(item.kind, *encoder.item(item, thinking=number % 2 == 0)) for number, item in enumerate(items)]
        while documents:
            documents = self._fill(documents)

    def _fill(self, documents: list[tuple[str, list[int], list[float]]]) -> list[tuple[str, list[int], list[float]]]:
        """One batch, as large as the training's, from the front of ``documents``; returns the others."""
        shape = (ROWS * self._trainer.plan.shards_per_step, CONTEXT)
        rows = Rows(np.zeros(shape, np.uint16), np.zeros(shape, np.int16), np.zeros(shape, np.float16))
        places: list[tuple[str, int, int, int]] = []
        row = at = 0
        while documents and row < shape[0]:
            kind, ids, weights = documents[0]
            if len(ids) > CONTEXT:
                documents = documents[1:]
                continue
            if at + len(ids) > CONTEXT:
                row, at = row + 1, 0
                continue
            end = at + len(ids)
            last = len(weights) - weights[::-1].index(PROMPT)  # the last answer begins there
            rows.tokens[row, at:end], rows.weight[row, at:end] = ids, weights
            rows.doc_start[row, at:] = at
            places.append((kind, row, at + last, end))
            at = -(-end // ALIGN) * ALIGN
            documents = documents[1:]
        self._batches.append((rows, places))
        return documents

    def __call__(self) -> dict[str, float]:
        found: dict[str, list[bool]] = defaultdict(list)
        trainer = self._trainer
        phase = trainer.plan.phase_at(trainer.step - 1)
        for rows, places in self._batches:
            tokens, doc_start, _ = trainer.move(rows)
            hidden, _, _ = trainer.hidden(tokens, doc_start, phase)
            best = trainer.model.logits(hidden.detach()).argmax(-1).view(tokens.shape)
            right = torch.nn.functional.pad(best[:, :-1] == tokens[:, 1:], (1, 0)).cpu().numpy()
            for kind, row, start, stop in places:
                found[kind].append(bool(right[row, start:stop].all()))
        return {kind: round(float(np.mean(values)), 3) for kind, values in found.items()}


def _renamed(item: Item) -> Item:
    item.kind += "_later"
    return item
