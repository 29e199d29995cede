# SPDX-License-Identifier: Apache-2.0
"""Text of one output and where a stop string ends it. The engine asks for the end, the front for the text: one rule for both."""

from __future__ import annotations

from collections.abc import Sequence

from cedar.text.detokenizer import IncrementalDetokenizer
from cedar.text.stop import StopMatcher, StopResult
from cedar.text.tokenizer import Tokenizer


class OutputText:
    """Whole characters, without stop strings. The text of the first ``min_tokens`` tokens takes no part in a match."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._ignored = min_tokens

    def push(self, token_id: int) -> StopResult:
        """What one more token adds; ``matched`` once the text holds a stop string, whatever tokens it spans."""
        text = self._detokenizer.push((token_id,))
        if self._ignored > 0:
            self._ignored -= 1
            return StopResult(text)
        return self._matcher.push(text)

    def finish(self) -> str:
        """The held-back rest, when the output ends without a stop string."""
        return self._matcher.finish() + self._detokenizer.finish()
