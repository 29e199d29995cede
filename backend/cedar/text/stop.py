# SPDX-License-Identifier: Apache-2.0
"""Stop strings in a text stream, found wherever token borders fall."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """``emit``: text safe to send. ``matched``: the stop string that ended the stream. ``rest``: text after it."""

    emit: str
    matched: str | None = None
    rest: str = ""


class StopMatcher:
    """Passes text on up to the first stop string, holding back what may yet become one.

    First means completed first: generation ends at the earliest character at which any stop string is whole, so no token is
    spent on waiting for a longer one. Several completed by the same character: the first of the list. The outcome does not
    depend on how the text was cut. An Aho-Corasick automaton (Aho and Corasick, 1975): constant work per character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[int | None] = [None]
        self._fail = [0]
        self._stops = tuple(stops)
        for index, stop in enumerate(self._stops):
            self._insert(index, stop)
        self._link()
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Feed the next part of the stream. After a match nothing more is emitted."""
        if self._matched is not None:
            return StopResult("", self._matched, text)
        if not self._stops:
            return StopResult(text)
        for position, character in enumerate(text, start=1):
            self._state = self._step(self._state, character)
            found = self._found[self._state]
            if found is not None:
                self._matched = self._stops[found]
                seen = self._held + text[:position]
                self._held = ""
                return StopResult(seen[: len(seen) - len(self._matched)], self._matched, text[position:])
        seen = self._held + text
        cut = len(seen) - self._depth[self._state]
        self._held = seen[cut:]
        return StopResult(seen[:cut])

    def finish(self) -> str:
        """The held-back text, when the stream ends without a match."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def _insert(self, index: int, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
                self._fail.append(0)
            state = self._next[state][character]
        if self._found[state] is None:
            self._found[state] = index

    def _link(self) -> None:
        """Breadth first: a state falls back to the longest proper suffix that is also a prefix of some stop string."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                fail = self._step(self._fail[state], character)
                self._fail[child] = fail
                inherited = [index for index in (self._found[child], self._found[fail]) if index is not None]
                self._found[child] = min(inherited, default=None)
                queue.append(child)
