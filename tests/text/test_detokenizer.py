# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from cedar.text.detokenizer import IncrementalDetokenizer
from cedar.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 620), max_size=40)


@given(ids=IDS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_stream_cut_anyhow_equals_the_whole_text(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    parts = [stream.push(ids[a:b]) for a, b in itertools.pairwise(borders)]
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<｜�"), max_size=30))
def test_valid_text_shows_whole_characters_only(tokenizer: Tokenizer, text: str) -> None:
    stream, seen = IncrementalDetokenizer(tokenizer), ""
    for token_id in tokenizer.encode(text):
        seen += stream.push([token_id])
        assert text.startswith(seen)
    assert (seen, stream.finish()) == (text, "")


def test_character_that_spans_tokens_comes_once_it_is_whole(base_tokenizer: Tokenizer) -> None:
    ids = base_tokenizer.encode("𝄞")
    assert len(ids) == 4
    stream = IncrementalDetokenizer(base_tokenizer)
    assert [stream.push([i]) for i in ids] == ["", "", "", "𝄞"]


def test_output_that_ends_inside_a_character_is_not_lost(base_tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(base_tokenizer)
    assert stream.push(base_tokenizer.encode("a𝄞")[:-1]) == "a"
    assert stream.finish() == "�"


def test_cost_per_token_does_not_grow_with_the_text(base_tokenizer: Tokenizer) -> None:
    ids = base_tokenizer.encode("the quick brown fox ") * 200

    def seconds(stream: IncrementalDetokenizer) -> float:
        start = time.process_time()
        for token_id in ids:
            stream.push([token_id])
        return time.process_time() - start

    fresh = min(seconds(IncrementalDetokenizer(base_tokenizer)) for _ in range(3))
    grown = IncrementalDetokenizer(base_tokenizer)
    for _ in range(100):
        grown.push(ids)
    assert min(seconds(grown) for _ in range(3)) < 5 * fresh
