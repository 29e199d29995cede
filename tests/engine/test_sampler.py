# SPDX-License-Identifier: Apache-2.0
"""The sampler against a slow, obvious one, and the promises it makes about seeds, ties, masks and log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.engine.logprobs import prompt_logprobs, token_logprobs, top_ids
from cedar.engine.request import SamplingParams
from cedar.engine.sampler import Sampler, SamplingState, draw

VOCAB, VALID = 30, 27


def state(prompt: tuple[int, ...] = (3, 4, 4), end_ids: tuple[int, ...] = (1,), seed: int = 7, **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**params), prompt, frozenset(end_ids), seed)


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """Rounded to a grid, so that ties are common."""
    values = np.random.Generator(np.random.PCG64(seed)).standard_normal((rows, vocab)) * 2
    return torch.tensor(np.round(values * 4) / 4, dtype=torch.float32)


def reference_distribution(
    row: list[float], params: SamplingParams, prompt: list[int], output: list[int], banned: set[int]
) -> dict[int, float]:
    """id -> probability, in the order in which a draw walks through them."""
    logits = {}
    for token_id, value in enumerate(row[:VALID]):
        if token_id in prompt or token_id in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = output.count(token_id)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if token_id not in banned:
            logits[token_id] = value
    best = max(logits.values())
    if params.greedy:
        return {min(i for i, v in logits.items() if v == best): 1.0}
    weights = {i: math.exp((v - best) / params.temperature) for i, v in logits.items()}
    weights = {i: w for i, w in weights.items() if w >= params.min_p}
    if params.top_k or params.top_p < 1.0:
        ranked = sorted(weights, key=lambda i: (-weights[i], i))[: params.top_k or VALID]
        total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
        for i in ranked:
            if mass >= params.top_p * total:
                break
            kept.append(i)
            mass += weights[i]
        weights = {i: weights[i] for i in kept}
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()}


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.05, 0.37, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, -0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.8]),
    min_tokens=st.sampled_from([0, 2, 4]),
    max_tokens=st.just(100),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(any_params, st.integers(0, 2**64 - 1), st.lists(st.integers(0, VALID - 1), max_size=6)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
)
def test_batched_sampling_is_the_obvious_sampling(rows: list[tuple[SamplingParams, int, list[int]]], seed: int) -> None:
    """Four tokens per row: each is the first whose cumulated reference probability exceeds the row's next uniform number."""
    sampler = Sampler(VALID)
    states = [SamplingState(params, prompt, frozenset({1, 2}), row_seed) for params, row_seed, prompt in rows]
    outputs: list[list[int]] = [[] for _ in rows]
    uniforms = [np.random.Generator(np.random.PCG64(row_seed)) for _, row_seed, _ in rows]
    for step in range(4):
        logits = random_logits(len(rows), seed * 10 + step)
        untouched = logits.clone()
        samples = sampler.sample(logits, states)
        assert torch.equal(logits, untouched)
        for i, (params, _, prompt) in enumerate(rows):
            banned = {1, 2} if step < params.min_tokens else set()
            sample = samples[i]
            assert sample is not None
            uniform = 0.0 if params.greedy else float(uniforms[i].random())
            # a mass that reaches top_p but for float32's rounding may end one token earlier or later
            cuts = [params.model_copy(update={"top_p": min(1.0, params.top_p * factor)}) for factor in (1.0, 1 - 1e-5, 1 + 1e-5)]
            odds = [reference_distribution(logits[i].tolist(), cut, prompt, outputs[i], banned) for cut in cuts]
            assert any(_is_draw(sample.token_id, each, uniform) for each in odds), (sample.token_id, uniform, odds)
            outputs[i].append(sample.token_id)


def _is_draw(token_id: int, odds: dict[int, float], uniform: float) -> bool:
    low = 0.0
    for candidate, probability in odds.items():
        if candidate == token_id:
            return low - 1e-6 <= uniform <= low + probability + 1e-6
        low += probability
    return False


def test_tokens_do_not_depend_on_batch_mates() -> None:
    sampler = Sampler(VALID)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
        {"temperature": 0.0},
        {"temperature": 0.9, "min_p": 0.1, "presence_penalty": 0.5, "min_tokens": 3, "max_tokens": 99},
    ]
    logits = [random_logits(len(kinds), step) for step in range(20)]
    together = [state(seed=i, **kind) for i, kind in enumerate(kinds)]
    batched = [[s.token_id for s in sampler.sample(step, together)] for step in logits]
    for i, kind in enumerate(kinds):
        alone = state(seed=i, **kind)
        assert [sampler.sample(step[i : i + 1], [alone])[0].token_id for step in logits] == [row[i] for row in batched]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_a_seed_repeats_and_all_64_bits_of_it_count(seed: int) -> None:
    def tokens(s: int) -> list[int]:
        one = state(seed=s, temperature=1.5)
        return [Sampler(VALID).sample(random_logits(1, step), [one])[0].token_id for step in range(30)]

    assert tokens(seed) == tokens(seed)
    assert tokens(seed) != tokens(seed ^ 1)
    assert tokens(seed) != tokens(seed ^ 2**40)


def test_frequencies_follow_the_distribution() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9)
    row = random_logits(1, 5)
    odds = reference_distribution(row[0].tolist(), params, [], [], set())
    count = 20_000
    uniforms = np.random.Generator(np.random.PCG64(3)).random(count)
    drawn = Counter(draw(row[:, :VALID].repeat(count, 1), [params] * count, uniforms.tolist()))
    assert set(drawn) == set(odds)
    for token_id, probability in odds.items():
        assert abs(drawn[token_id] / count - probability) < 4 * math.sqrt(probability / count) + 1e-3


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-40}, {"temperature": 1e-6}])
def test_extreme_settings_give_the_best_token(uniform: float, params: dict[str, Any]) -> None:
    row = torch.randn(1, VALID, generator=torch.Generator().manual_seed(1))
    assert draw(row, [SamplingParams(**params)], [uniform]) == [int(row.argmax())]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_masked_ids_are_not_drawn_at_the_ends_of_the_interval(uniform: float) -> None:
    row = torch.full((1, VALID), -torch.inf)
    row[0, [4, 9]] = 1.0
    assert draw(row, [SamplingParams()], [uniform])[0] in (4, 9)
    assert draw(row, [SamplingParams(top_p=0.999)], [uniform])[0] in (4, 9)


def test_top_k_with_ties_keeps_exactly_k_with_the_lowest_ids() -> None:
    row = torch.zeros(1, VALID)
    drawn = {draw(row, [SamplingParams(top_k=3)], [u])[0] for u in np.linspace(0, 0.999, 50)}
    assert drawn == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = torch.full((1, VALID), -torch.inf)
    row[0, [2, 3, 5, 7]] = 0.0
    drawn = {draw(row, [SamplingParams(top_p=0.5)], [u])[0] for u in np.linspace(0, 0.999, 50)}
    assert drawn == {2, 3}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [5, 9, 20]] = 3.0
    plain, shaped = state(temperature=0.0), state(temperature=0.0, repetition_penalty=1.0001)
    assert [s.token_id for s in Sampler(VALID).sample(logits, [plain, shaped])] == [5, 5]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 5.0}, {"temperature": 1.0, "top_k": 4}])
def test_padding_of_the_head_never_comes(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, VALID:] = 50.0
    one = state(logprobs=20, **params)
    for _ in range(50):
        sample = Sampler(VALID).sample(logits, [one])[0]
        assert sample.token_id < VALID
        assert all(token_id < VALID for token_id, _ in sample.logprobs.top)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5, "logprobs": 2}])
def test_a_broken_row_is_reported_and_its_batch_mates_are_not_touched(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3, 1)
    good = [s.token_id for s in Sampler(VALID).sample(logits, [state(**params) for _ in range(3)])]
    logits[1, 11] = bad
    samples = Sampler(VALID).sample(logits, [state(**params) for _ in range(3)])
    assert samples[1] is None
    assert [samples[0].token_id, samples[2].token_id] == [good[0], good[2]]


def test_end_ids_come_only_after_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 2], logits[0, 3] = 9.0, 8.0, 7.0
    one = state(end_ids=(1, 2), temperature=0.0, min_tokens=3, max_tokens=9)
    assert [Sampler(VALID).sample(logits, [one])[0].token_id for _ in range(5)] == [3, 3, 3, 1, 1]


def test_penalties_count_prompt_and_output_as_promised() -> None:
    """Repetition: prompt and output. Presence and frequency: the output alone."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5], logits[0, 6] = 4.0, 3.5, 3.4
    assert Sampler(VALID).sample(logits, [state((3,), temperature=0.0, repetition_penalty=2.0)])[0].token_id == 5
    assert Sampler(VALID).sample(logits, [state((3,), temperature=0.0, presence_penalty=2.0)])[0].token_id == 3
    one = state((3,), temperature=0.0, presence_penalty=0.3)  # once, however often
    assert [Sampler(VALID).sample(logits, [one])[0].token_id for _ in range(4)] == [3, 3, 3, 3]
    one = state((3,), temperature=0.0, frequency_penalty=0.3)
    assert [Sampler(VALID).sample(logits, [one])[0].token_id for _ in range(5)] == [3, 3, 5, 3, 6]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(1, 4)
    one = state(temperature=0.3, top_k=2, repetition_penalty=1.7, logprobs=5, min_tokens=2, max_tokens=4)
    sample = Sampler(VALID).sample(logits, [one])[0]
    expected = torch.log_softmax(logits[0, :VALID].double(), 0)
    assert sample.logprobs.token_id == sample.token_id
    assert sample.logprobs.logprob == pytest.approx(float(expected[sample.token_id]), abs=1e-6)
    ranked = sorted(range(VALID), key=lambda i: (-float(logits[0, i]), i))[:5]
    assert [token_id for token_id, _ in sample.logprobs.top] == ranked
    assert [p for _, p in sample.logprobs.top] == pytest.approx([float(expected[i]) for i in ranked], abs=1e-6)


def test_rows_with_different_numbers_of_alternatives_keep_their_own() -> None:
    logits = random_logits(4, 8)
    counts = [0, 3, None, 3]
    samples = Sampler(VALID).sample(logits, [state(temperature=0.0, logprobs=count) for count in counts])
    assert [None if s.logprobs is None else len(s.logprobs.top) for s in samples] == counts
    for row, sample in enumerate(samples):
        if sample.logprobs is not None:
            assert sample.logprobs == token_logprobs(logits[row : row + 1], [sample.token_id], counts[row], VALID)[0]


def test_probabilities_of_all_existing_ids_sum_to_one() -> None:
    records = token_logprobs(random_logits(70, 2), [0] * 70, VALID, VALID)
    assert len(records) == 70  # more rows than are done at once
    for record in records:
        assert math.fsum(math.exp(p) for _, p in record.top) == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-30, -1e-30, 1.0, 3.25, 1e30, -1e30]), min_size=1, max_size=12), st.data()
)
def test_top_ids_order_by_value_then_id(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(values)))
    row = torch.tensor([values], dtype=torch.float32)
    expected = sorted(range(len(values)), key=lambda i: (-float(row[0, i]), i))[:count]
    assert top_ids(row, count)[0].tolist() == expected


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
def test_prompt_logprobs_are_the_same_for_every_chunking(chunk: int) -> None:
    prompt = [5, 6, 7, 5, 8, 9, 1, 2, 3, 4]
    logits = random_logits(len(prompt), 6)
    records = []
    for start in range(0, len(prompt), chunk):
        records += prompt_logprobs(logits[start : start + chunk], prompt, start, 2, VALID)
    assert [record.token_id for record in records] == prompt
    assert records[0].logprob is None
    assert records[0].top == ()
    expected = torch.log_softmax(logits[:, :VALID].double(), 1)
    for position, record in enumerate(records[1:], start=1):
        assert record.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-6)
        assert len(record.top) == 2
