# SPDX-License-Identifier: Apache-2.0
"""Logits to tokens.

Order of operations per row (that of vLLM and Hugging Face): repetition penalty over prompt and output, frequency and
presence penalty over the output, mask of ids that may not come (padding of the head; end ids below ``min_tokens``), then
either arg max, or temperature, min-p, top-k, top-p and one draw. Equal values order by the lowest id, everywhere.

A draw inverts the cumulative distribution at one uniform number from the request's own generator, so it depends on nothing
but the row, the seed and how many tokens came before: not on batch-mates, the device, or the random numbers of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cedar.engine.logprobs import token_logprobs
from cedar.engine.request import SamplingParams
from cedar.engine.updates import TokenLogprobs

_SMALLEST_TEMPERATURE = 1e-30
"""Below it the division overflows float64; the distribution is the arg max long before."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; ``logprobs`` when asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


class SamplingState:
    """What sampling remembers of one request from token to token. Survives a preemption unchanged."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], end_ids: frozenset[int], seed: int) -> None:
        self.params = params
        # numpy's generator uses all 64 bits of a seed and gives a scalar at once; torch's CPU generator keeps 32 bits
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.end_ids = sorted(end_ids)
        self.num_output_tokens = 0
        self.penalised = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._prompt_ids = prompt_ids
        self._seen: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    @property
    def below_min_tokens(self) -> bool:
        """The next token must not be an end id."""
        return self.num_output_tokens < self.params.min_tokens and bool(self.end_ids)

    @property
    def plain_greedy(self) -> bool:
        """The next token is the arg max of the raw logits."""
        return self.params.greedy and not self.penalised and not self.below_min_tokens

    def append(self, token_id: int) -> None:
        """A token was chosen."""
        self.num_output_tokens += 1
        if self._seen is not None and self._output_counts is not None:
            self._seen[token_id] = True
            self._output_counts[token_id] += 1

    def penalise(self, row: torch.Tensor) -> None:
        """Apply the three penalties to ``row``, float32 [valid ids], in place.

        A logit of an id in prompt or output is divided by the repetition penalty when positive, multiplied when negative.
        """
        if self._seen is None or self._output_counts is None:
            self._output_counts = torch.zeros_like(row)
            self._seen = torch.zeros_like(row, dtype=torch.bool)
            self._seen[list(self._prompt_ids)] = True
        params = self.params
        if params.repetition_penalty != 1.0:
            punished = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row.copy_(torch.where(self._seen, punished, row))
        row -= params.frequency_penalty * self._output_counts
        row -= params.presence_penalty * (self._output_counts > 0)


class Sampler:
    """Samples one token per row. Ids >= ``num_valid_ids`` never come."""

    def __init__(self, num_valid_ids: int) -> None:
        self._num_valid_ids = num_valid_ids

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled | None]:
        """logits: float32 [rows, vocab], not changed. None for a row that is not finite. Appends each token to its state."""
        finite = logits.isfinite().all(dim=1).tolist()
        ids = logits[:, : self._num_valid_ids].argmax(dim=1).tolist()
        shaped = [row for row, state in enumerate(states) if finite[row] and not state.plain_greedy]
        if shaped:
            for row, token_id in zip(shaped, self._shape_and_choose(logits, shaped, states), strict=True):
                ids[row] = token_id
        records = self._logprobs(logits, ids, states)
        samples: list[Sampled | None] = []
        for row, state in enumerate(states):
            if finite[row]:
                state.append(ids[row])
                samples.append(Sampled(ids[row], records.get(row)))
            else:
                samples.append(None)
        return samples

    def _shape_and_choose(self, logits: torch.Tensor, rows: list[int], states: Sequence[SamplingState]) -> list[int]:
        values = logits[rows, : self._num_valid_ids]  # a copy
        chosen_states = [states[row] for row in rows]
        for value, state in zip(values, chosen_states, strict=True):
            if state.penalised:
                state.penalise(value)
            if state.below_min_tokens:
                value[state.end_ids] = -torch.inf
        ids: list[int] = values.argmax(dim=1).tolist()
        random = [i for i, state in enumerate(chosen_states) if not state.params.greedy]
        if random:
            draws = draw(
                values[random], [chosen_states[i].params for i in random], [chosen_states[i].random.random() for i in random]
            )
            for i, token_id in zip(random, draws, strict=True):
                ids[i] = token_id
        return ids

    def _logprobs(self, logits: torch.Tensor, ids: list[int], states: Sequence[SamplingState]) -> dict[int, TokenLogprobs]:
        """By row. Rows that ask for the same number of alternatives are done together."""
        by_count: dict[int, list[int]] = {}
        for row, state in enumerate(states):
            if state.params.logprobs is not None:
                by_count.setdefault(state.params.logprobs, []).append(row)
        records: dict[int, TokenLogprobs] = {}
        for count, rows in by_count.items():
            found = token_logprobs(logits[rows], [ids[row] for row in rows], count, self._num_valid_ids)
            records.update(zip(rows, found, strict=True))
        return records


def draw(values: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """One token per row from the filtered distribution, at a given uniform number in [0, 1).

    values: float32 [rows, vocab], -inf for ids that may not come. Probabilities are float64: over a large vocabulary a
    float32 sum is off by more than the smallest probabilities. min-p keeps ids at least ``min_p`` times as likely as
    the best; top-k the k best of these; top-p the smallest best set whose share reaches ``top_p``.
    """

    def column(numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=values.device)[:, None]

    scaled = values.double()
    scaled -= scaled.amax(dim=1, keepdim=True)
    scaled /= column([max(p.temperature, _SMALLEST_TEMPERATURE) for p in params])
    weights = scaled.exp()
    weights *= weights >= column([p.min_p for p in params])
    sorts = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    order = None
    if sorts:
        order = torch.arange(values.shape[1], device=values.device).repeat(len(params), 1)
        best, ids = weights[sorts].sort(dim=1, descending=True, stable=True)
        ranks = order[0]
        best *= ranks < column([params[i].top_k or values.shape[1] for i in sorts])
        before = best.cumsum(dim=1) - best
        best *= before < column([params[i].top_p for i in sorts]) * best.sum(dim=1, keepdim=True)
        weights[sorts], order[sorts] = best, ids
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    targets = torch.minimum(column(uniforms) * total, torch.nextafter(total, torch.zeros_like(total)))
    places = torch.searchsorted(
        cumulative, targets, right=True
    )  # the first id whose sum is above the target: never a weight of 0
    return (places if order is None else order.gather(1, places))[:, 0].tolist()
