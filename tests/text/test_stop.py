# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.text.stop import StopMatcher, StopResult

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=5)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Whole-text search: (text before the match that is complete first, that stop string)."""
    found = [(text.find(stop) + len(stop), index) for index, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    end, index = min(found)
    return text[: end - len(stops[index])], stops[index]


@given(text=st.text("abc", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_stream_cut_anyhow_equals_a_search_of_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, emitted, matched = StopMatcher(stops), "", None
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for a, b in itertools.pairwise(borders):
        result = matcher.push(text[a:b])
        emitted += result.emit
        if result.matched:
            matched = result.matched
            assert emitted + matched + result.rest + text[b:] == text
            break
    assert (emitted + matcher.finish(), matched) == naive(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_what_may_become_a_stop_string_is_held_back_and_nothing_else(text: str, stops: list[str]) -> None:
    matcher, emitted = StopMatcher(stops), ""
    for position, character in enumerate(text, start=1):
        result = matcher.push(character)
        emitted += result.emit
        if result.matched:
            return
        held = text[len(emitted) : position]
        prefixes = [stop[:n] for stop in stops for n in range(len(stop)) if text[:position].endswith(stop[:n])]
        assert len(held) == max(map(len, prefixes), default=0)


def test_stop_string_across_three_pieces_is_never_emitted() -> None:
    matcher = StopMatcher(["</end>"])
    assert [matcher.push(part).emit for part in ("text<", "/en", "d> more")] == ["text", "", ""]


def test_prefix_that_turns_out_to_be_text_is_released() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST").emit == "a "
    assert matcher.push("ART").emit == "START"
    assert matcher.push(" ST").emit == " "
    assert matcher.finish() == "ST"


def test_first_of_the_list_wins_when_one_character_completes_several() -> None:
    assert StopMatcher(["bc", "abc"]).push("abc") == StopResult("a", "bc")
    assert StopMatcher(["abc", "bc"]).push("abc") == StopResult("", "abc")


def test_shorter_stop_string_does_not_wait_for_a_longer_one() -> None:
    assert StopMatcher(["abcd", "b"]).push("xab") == StopResult("xa", "b")


def test_nothing_is_emitted_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == StopResult("a", "x", "b")
    assert matcher.push("more") == StopResult("", "x", "more")
    assert matcher.finish() == ""


def test_no_stop_strings_pass_everything_at_once() -> None:
    assert StopMatcher([]).push("text") == StopResult("text")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
