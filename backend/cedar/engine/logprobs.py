# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens: natural log-softmax of raw logits, and the best alternatives in a defined order.

The softmax is over the ids that exist: rows of the head beyond the tokenizer are padding and stand for no token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cedar.engine.updates import TokenLogprobs

_ROWS_AT_ONCE = 64
"""Rows of log-probabilities that exist at one time: a chunk's worth over a large vocabulary would double the logits' memory."""


def top_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest values of each row, best first; equal values in the order of the ids.

    values: float32 [rows, vocab], finite. Returns int64 [rows, count]. (`torch.topk` leaves the order of equal values
    open: so value and id are packed into one integer. An IEEE float orders like its bits once a negative one's are flipped.)
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are one value
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(values.shape[1], device=values.device)
    keys = ordered * 2**32 + (2**32 - 1 - ids)
    return 2**32 - 1 - keys.topk(count, dim=1).values % 2**32


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int, num_valid_ids: int) -> list[TokenLogprobs]:
    """The chosen token's log-probability and the ``count`` best of each row.

    logits: float32 [rows, vocab], raw; token_ids: [rows], below ``num_valid_ids``.
    """
    records = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        chosen_ids = token_ids[first : first + _ROWS_AT_ONCE]
        values = torch.log_softmax(logits[first : first + len(chosen_ids), :num_valid_ids], dim=1)
        chosen = values.gather(1, torch.tensor(chosen_ids, device=values.device)[:, None])[:, 0].tolist()
        ids = top_ids(values, min(count, num_valid_ids))
        tops = zip(ids.tolist(), values.gather(1, ids).tolist(), strict=True)
        records += [
            TokenLogprobs(token_id, logprob, tuple(zip(*top, strict=True)))
            for token_id, logprob, top in zip(chosen_ids, chosen, tops, strict=True)
        ]
    return records


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], start: int, count: int, num_valid_ids: int
) -> list[TokenLogprobs]:
    """Records of the prompt tokens that one chunk predicts, plus the absent one of the first token.

    logits: float32 [rows, vocab] of positions [start, start + rows); row i predicts position start + i + 1. token_ids: the
    whole prompt; the last position predicts no prompt token.
    """
    records = [TokenLogprobs(token_ids[0], None)] if start == 0 else []
    targets = token_ids[start + 1 : start + 1 + logits.shape[0]]
    return records + token_logprobs(logits, targets, count, num_valid_ids)
