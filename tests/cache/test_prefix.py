# SPDX-License-Identifier: Apache-2.0
"""Names of pages: two texts that share one, one text that changes its own, and tenants that find each other's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.cache.prefix import TokenChain

TOKENS = st.lists(st.integers(0, 1), max_size=24)


def digests(chain: TokenChain) -> list[bytes]:
    return [chain.digest(page) for page in range(chain.num_pages)]


def naive_common_pages(one: TokenChain, other: TokenChain) -> int:
    size, pages = one.page_tokens, 0
    while (pages + 1) * size <= min(len(one.token_ids), len(other.token_ids)) and (
        one.token_ids[: (pages + 1) * size] == other.token_ids[: (pages + 1) * size]
    ):
        pages += 1
    return pages


def test_names_change_between_versions() -> None:
    """blake2b of what is before (of the salt, personalised, at first) and of the tokens as little-endian int32."""
    assert [digest.hex() for digest in digests(TokenChain([1, 2, 3, 4, 129279, 0], "", 2))] == [
        "c208a7d66df89fd5cc830219cab6c1ac71e6b55de61b97e4f626cc2ee4eb2035",
        "fd6b7f67d20672828c5a631094208f819792faab650ca853b6cef2bbc1cb977d",
        "43cdf55ad041d6bf2df29abb4517559a6ef14ba990a717ce88b61a791b1c94c5",
    ]
    tenant = TokenChain([1, 2], "tenant-ä", 2)
    assert tenant.digest(0).hex() == "930fdc3c5c6ec716e1670d6a1c3fbf400160a29cd1f2ffeeea2b732e0a6fe473"


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_texts_share_a_name_or_one_text_has_two(ids: list[int], others: list[int], page_tokens: int) -> None:
    one, other = TokenChain(ids, "s", page_tokens), TokenChain(others, "s", page_tokens)
    for page in range(min(one.num_pages, other.num_pages)):
        end = (page + 1) * page_tokens
        assert (one.digest(page) == other.digest(page)) == (ids[:end] == others[:end])
    names = digests(one) + digests(other)[naive_common_pages(one, other) :]
    assert len(set(names)) == len(names)


@given(TOKENS, st.data(), st.integers(1, 5))
def test_common_pages_are_miscounted(ids: list[int], data: st.DataObject, page_tokens: int) -> None:
    others = ids[: data.draw(st.integers(0, len(ids)))] + data.draw(TOKENS)
    one, other = TokenChain(ids, "s", page_tokens), TokenChain(others, "s", page_tokens)
    assert one.common_pages(other) == naive_common_pages(one, other) == other.common_pages(one)


def test_common_pages_of_a_long_text_are_hashed_more_than_once() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counted.reads += 1
            return super().__getitem__(key)

    ids = [random.Random(3).randrange(129280) for _ in range(64 * 200)]
    one, other = TokenChain(Counted(ids), "", 64), TokenChain(Counted([*ids[: 64 * 150], 0, *ids[64 * 150 :]]), "", 64)
    assert one.common_pages(other) == 150
    assert Counted.reads <= 2 * 200
    assert one.common_pages(other) == 150
    assert Counted.reads <= 2 * 200


@pytest.mark.parametrize("salt", ["b", "a ", "A", "", "\0", "ä"])
def test_a_tenant_finds_what_another_cached(salt: str) -> None:
    ids = list(range(8))
    mine, theirs = TokenChain(ids, "a", 4), TokenChain(ids, salt, 4)
    assert not set(digests(mine)) & set(digests(theirs))
    assert mine.common_pages(theirs) == 0
    assert digests(mine) == digests(TokenChain(ids, "a", 4))


def test_a_salt_passes_for_tokens() -> None:
    """The root is a hash of its own kind: no salt equals the name that a first page gives to the second."""
    first = TokenChain([1, 2], "", 2).digest(0)
    assert TokenChain([3, 4], first.decode("latin-1"), 2).digest(0) != TokenChain([1, 2, 3, 4], "", 2).digest(1)


def test_pages_of_another_size_have_the_same_names() -> None:
    ids = list(range(16))
    names = [digest for size in (2, 4, 8, 16) for digest in digests(TokenChain(ids, "", size))]
    assert len(set(names)) == len(names)


def test_a_token_is_mistaken_for_several() -> None:
    """Ids are hashed with their full width: 1, 256 and 65536 differ from their digits in smaller units."""
    chains = [TokenChain(ids, "", 2) for ids in ([1, 0], [0, 1], [256, 0], [0, 256], [65536, 1], [1, 65536])]
    assert len({chain.digest(0) for chain in chains}) == len(chains)


@given(TOKENS, st.lists(st.integers(0, 20), max_size=8), st.integers(1, 5))
def test_a_growing_text_changes_its_names(ids: list[int], reads: list[int], page_tokens: int) -> None:
    growing: list[int] = []
    chain = TokenChain(growing, "", page_tokens)
    for token in ids:
        growing.append(token)
        assert chain.num_pages == len(growing) // page_tokens
        if chain.num_pages and len(growing) in reads:
            chain.digest(chain.num_pages - 1)
    assert digests(chain) == digests(TokenChain(ids, "", page_tokens))


def test_a_page_that_is_not_full_has_a_name() -> None:
    ids = list(range(11))
    chain = TokenChain(ids, "", 4)
    for page in (2, 3, -1):
        with pytest.raises(IndexError, match=rf"page {page} of 2 full ones"):
            chain.digest(page)
    chain.digest(1)
    with pytest.raises(IndexError, match="page -1 of 2"):
        chain.digest(-1)
    ids.append(11)
    assert chain.digest(2) == TokenChain(range(12), "", 4).digest(2)
    with pytest.raises(IndexError, match="page 0 of 0"):
        TokenChain([], "", 4).digest(0)
