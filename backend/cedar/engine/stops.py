# SPDX-License-Identifier: Apache-2.0
"""Does the text of an output contain a stop string? Only requests that have stop strings pay for detokenisation."""

from __future__ import annotations

from cedar.engine.request import SamplingParams
from cedar.text.detokenizer import IncrementalDetokenizer
from cedar.text.stop import StopMatcher
from cedar.text.tokenizer import Tokenizer


class StopChecker:
    """Follows one output. The text of its first ``min_tokens`` tokens takes no part in a match."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(params.stop)
        self._ignored = params.min_tokens

    def push(self, token_id: int) -> bool:
        """True when the text now holds a stop string, whatever tokens it spans."""
        text = self._detokenizer.push((token_id,))
        if self._ignored > 0:
            self._ignored -= 1
            return False
        return self._matcher.push(text).matched is not None
