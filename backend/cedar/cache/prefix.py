# SPDX-License-Identifier: Apache-2.0
"""Names of pages: what a page of the global cache holds follows from the tokens up to its end, and from nothing else.

So a page's name is a chained hash of these tokens. A *salt* (one per tenant) starts the chain: without it nobody can find, or
time, what others have cached. How a page was computed is no part of its name but of its entry in `cedar.cache.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

Digest = bytes


class TokenChain:
    """The names of one sequence's full pages, hashed when they are first asked for.

    token_ids is the sequence's own list, which only ever grows at its end.
    """

    def __init__(self, token_ids: Sequence[int], salt: str, page_tokens: int) -> None:
        self.token_ids = token_ids
        self.page_tokens = page_tokens
        self._root = blake2b(salt.encode(), digest_size=32, person=b"cedar pages").digest()
        self._digests: list[Digest] = []

    @property
    def num_pages(self) -> int:
        """Pages that the tokens fill."""
        return len(self.token_ids) // self.page_tokens

    def digest(self, page: int) -> Digest:
        """The name of the page number ``page``, 0 <= page < `num_pages`; else IndexError."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of {self.num_pages} full ones")
        while len(self._digests) <= page:
            start = len(self._digests) * self.page_tokens
            tokens = self.token_ids[start : start + self.page_tokens]
            before = self._digests[-1] if self._digests else self._root
            self._digests.append(blake2b(before + np.asarray(tokens, "<i4").tobytes(), digest_size=32).digest())
        return self._digests[page]

    def common_pages(self, other: TokenChain) -> int:
        """Leading full pages that both have. A name says everything before it, so this is a binary search."""
        low, high = 0, min(self.num_pages, other.num_pages)
        if not high or self.digest(0) != other.digest(0):
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.digest(middle - 1) == other.digest(middle - 1) else (low, middle - 1)
        return low
