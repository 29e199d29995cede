# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark measures: one provider of one operation at one size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Peak = Literal["bf16", "fp8", "tf32"]
OURS = "cedar"
"""Name of the library's own row; every other name is a peer."""
EVICTING_BYTES = 256 << 20
"""Rotated inputs together are at least this, four times an H200's L2: a call finds nothing of its inputs there."""
MOST_SETS = 24

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    build: makes the inputs on the GPU and returns ``call``; ``call(i)`` launches the operation on input set ``i % sets`` on the
    current stream, without synchronising, so that it can be captured in a CUDA graph. It raises `Unavailable` where this machine
    lacks the provider, and whatever else is an error of the row. The inputs live as long as ``call`` does.
    floor_bytes: the fewest bytes that a call moves through the device's memory. floor_flops: its operations on units of ``peak``.
    host_timed: ``call`` works on the host too, so that a graph would leave that out: the host's clock times it, copies included.
    check: the largest relative error against the reference, computed once, outside of the timing; optional.
    """

    op: str
    name: str
    facts: dict[str, int | str]
    build: Callable[[], Callable[[int], None]]
    floor_bytes: float
    floor_flops: float = 0.0
    peak: Peak = "bf16"
    sets: int = 1
    note: str = ""
    host_timed: bool = False
    check: Callable[[], float] | None = field(default=None, compare=False)

    @property
    def rows(self) -> int:
        """Tokens of a call, the fact ``T``."""
        return int(self.facts["T"])


class Unavailable(Exception):
    """The provider of a row is not on this machine; the text says what is missing."""


def sets_for(bytes_per_set: float) -> int:
    """How many input sets to rotate over so that L2 is cold, from 1 to `MOST_SETS`.

    Where that many small sets still fit into L2 the benchmark evicts it between replays.
    """
    return max(1, min(MOST_SETS, math.ceil(EVICTING_BYTES / max(1.0, bytes_per_set))))


def rotate(make: Callable[[int], T], sets: int, run: Callable[[T], Any]) -> Callable[[int], None]:
    """``call`` of a case: input sets ``make(0..sets-1)``, each handed to ``run`` in turn. make(i) seeds with i."""
    inputs = [make(number) for number in range(sets)]

    def call(number: int) -> None:
        run(inputs[number % sets])

    return call


def token_counts(counts: list[int] | None, default: tuple[int, ...] = (1, 8, 48, 128, 512, 4096)) -> Iterator[int]:
    """The T of a table's columns: those asked for, or the default ones."""
    yield from counts or default
