# SPDX-License-Identifier: Apache-2.0
"""Text of a token stream as it grows."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from cedar.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns tokens into text at once, but never into part of a character.

    A character may span tokens; its bytes are held back until it is whole. The pieces joined equal
    `Tokenizer.decode` of all ids, so U+FFFD appears only for bytes that cannot be UTF-8. Constant work per token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` completed; empty while a character is incomplete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        """What was held back when no token follows: U+FFFD if the output ends inside a character, else nothing."""
        return self._decoder.decode(b"", True)
