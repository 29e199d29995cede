# SPDX-License-Identifier: Apache-2.0
"""The ways to serve that are compared, and what each got right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from perf.quality.serving import Answer, Cell, Question, is_right, shift

from cedar.engine.request import DecoderReplay, EncoderReplay

OFF = Cell("off", EncoderReplay.OFF, DecoderReplay.OFF)
"""What the others are compared with: nothing bounded, nothing cached."""
EXACT = Cell("exact", EncoderReplay.OFF, DecoderReplay.EXACT)
"""The same function as off."""
SMALL_CHUNK = 256
"""Tokens of a step, those of other sequences included: a prompt of 1,024 is cut in four or more."""
CHANGED = 1e-4
"""More than the library on a CPU makes of another batch (nothing). Elsewhere rounding makes more: it moves what is quantised."""
CELLS = (
    OFF,
    Cell("both", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=0.75),
    Cell("decoder", EncoderReplay.OFF, DecoderReplay.BOUNDED),
    Cell("encoder", EncoderReplay.BOUNDED, DecoderReplay.OFF, hit=0.75),
    EXACT,
    Cell("both, late hit", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=1.0),
    Cell("both, early hit", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=0.6),
    Cell("both, small chunks", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED, hit=0.75, chunk=SMALL_CHUNK),
    Cell("decoder, small chunks", EncoderReplay.OFF, DecoderReplay.BOUNDED, chunk=SMALL_CHUNK),
    Cell("off, reference operations", EncoderReplay.OFF, DecoderReplay.OFF, ops="reference"),
    Cell("off, FP8 global KV", EncoderReplay.OFF, DecoderReplay.OFF, global_kv="fp8"),
)


@dataclass
class Marks:
    """Answers of one cell. right, shifts: by task, in the order of the items; shifts: of the first logits from those of off.
    Tokens, chunks and seconds are sums."""

    right: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    shifts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    chunks: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, questions: Sequence[Question], base: Sequence[Answer], own: Sequence[Answer], seconds: float = 0.0) -> Marks:
        """Of a block. base: the answers of off to the same questions."""
        marks = cls(seconds=seconds)
        for question, reference, answer in zip(questions, base, own, strict=True):
            marks.right[question.kind].append(is_right(question, answer))
            marks.shifts[question.kind].append(shift(reference, answer))
            marks.prompt_tokens += len(question.prompt)
            marks.cached_tokens += answer.cached_tokens
            marks.replayed_tokens += answer.replayed_tokens
            marks.chunks += answer.chunks
        return marks

    @classmethod
    def joined(cls, parts: Iterable[Marks]) -> Marks:
        """Of several blocks, in their order."""
        whole = cls()
        for part in parts:
            for task, values in part.right.items():
                whole.right[task] += values
                whole.shifts[task] += part.shifts[task]
            whole.prompt_tokens += part.prompt_tokens
            whole.cached_tokens += part.cached_tokens
            whole.replayed_tokens += part.replayed_tokens
            whole.chunks += part.chunks
            whole.seconds += part.seconds
        return whole

    @property
    def shift(self) -> float:
        """Median over all items."""
        return median(value for values in self.shifts.values() for value in values)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: right and wrong are 1 and 0 in a text."""
        right = {task: "".join("01"[value] for value in values) for task, values in self.right.items()}
        shifts = {task: [float(f"{value:.3g}") for value in values] for task, values in self.shifts.items()}
        return vars(self) | {"right": right, "shifts": shifts}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Marks:
        """The inverse."""
        return cls(**data | {"right": {task: [bit == "1" for bit in bits] for task, bits in data["right"].items()}})
