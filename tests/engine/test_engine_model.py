# SPDX-License-Identifier: Apache-2.0
"""The engine on a real (tiny) network: batching, chunking and preemption do not change what a request gets.

Exact variant (float32, no cache quantisers). Rounding may depend on the batch, so outputs are compared up to the first step
at which the best token leads by less than 0.05.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cedar.config.engine import EngineConfig
from cedar.engine.admission import ModelFacts
from cedar.engine.engine import Engine
from cedar.engine.request import FinishReason, GenerationRequest, SamplingParams
from cedar.engine.runner import ModelRunner
from cedar.engine.updates import TokenLogprobs
from cedar.text.tokenizer import load_tokenizer

MODEL = Path(__file__).parents[1] / "data" / "golden" / "tiny-a" / "checkpoint"
SETTINGS = EngineConfig(
    model=str(MODEL),
    dtype="float32",
    fake_quant=False,
    max_model_len=1024,
    kv_cache_bytes=1 << 26,
    max_num_seqs=32,
    max_num_batched_tokens=128,
    page_tokens=16,
    cpu_threads=1,
    prefix_cache=False,  # hits are another matter: test_prefix_equivalence
)
MARGIN = 0.05
NEW_TOKENS = 16


@cache
def runner(kv_cache_bytes: int) -> ModelRunner:
    return ModelRunner.load(replace(SETTINGS, kv_cache_bytes=kv_cache_bytes))


@cache
def facts() -> ModelFacts:
    return ModelFacts.of(runner(SETTINGS.kv_cache_bytes).config, len(load_tokenizer(MODEL)))


@cache
def requests() -> tuple[GenerationRequest, ...]:
    """32 prompts of 1 to 300 tokens."""
    random = np.random.Generator(np.random.PCG64(1))
    lengths = [1, 2, 15, 16, 17, 300, *random.integers(1, 200, 26)]
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    return tuple(
        GenerationRequest(key=f"r{i}", input_ids=tuple(random.integers(3, 450, length).tolist()), sampling=sampling)
        for i, length in enumerate(lengths)
    )


def generate(settings: EngineConfig, prompts: tuple[GenerationRequest, ...]) -> tuple[list[list[TokenLogprobs]], int]:
    """Every request's tokens, and how many preemptions it took."""
    engine = Engine(runner(settings.kv_cache_bytes), settings, facts())
    handles = [engine.add(prompt) for prompt in prompts]
    tokens: dict[str, list[TokenLogprobs]] = {handle: [] for handle in handles}
    preemptions = 0
    while engine.num_live or engine.has_work():
        before = engine.stats().num_waiting
        for update in engine.step():
            tokens[update.handle] += update.logprobs
            if update.ready:
                engine.attach(update.handle)
            assert update.finish_reason in (None, FinishReason.LENGTH), update.error
        preemptions += max(0, engine.stats().num_waiting - before)
    assert engine.stats().usage.bytes_used == 0
    return [tokens[handle] for handle in handles], preemptions


@cache
def alone(decoder_replay: str, number: int) -> list[TokenLogprobs]:
    """What request ``number`` gets when nothing else runs."""
    return generate(replace(SETTINGS, decoder_replay=decoder_replay), requests()[number : number + 1])[0][0]


def assert_same(found: list[list[TokenLogprobs]], expected: list[list[TokenLogprobs]]) -> None:
    compared = 0
    for ours, reference in zip(found, expected, strict=True):
        assert len(ours) == len(reference) == NEW_TOKENS
        for step, (a, b) in enumerate(zip(ours, reference, strict=True)):
            if b.top[0][1] - b.top[1][1] < MARGIN:
                break
            assert a.token_id == b.token_id, f"step {step}"
            assert a.logprob == pytest.approx(b.logprob, abs=2e-3)
            compared += 1
    assert compared > len(found) * NEW_TOKENS / 3, "the margins leave too little to compare"


@pytest.mark.parametrize("decoder_replay", ["off", "bounded"])
def test_32_requests_together_get_what_each_gets_alone(decoder_replay: str) -> None:
    found, _ = generate(replace(SETTINGS, decoder_replay=decoder_replay), requests())
    assert_same(found, [alone(decoder_replay, number) for number in range(32)])


@pytest.mark.parametrize(("chunk", "count"), [(1, 5), (7, 6), (33, 8), (512, 8)])
def test_the_token_budget_does_not_change_the_output(chunk: int, count: int) -> None:
    found, _ = generate(replace(SETTINGS, decoder_replay="off", max_num_batched_tokens=chunk), requests()[:count])
    assert_same(found, [alone("off", number) for number in range(count)])


def test_exact_replay_is_the_full_run() -> None:
    found, _ = generate(replace(SETTINGS, decoder_replay="exact"), requests()[:12])
    assert_same(found, [alone("off", number) for number in range(12)])


def test_preempted_requests_continue_where_they_were() -> None:
    prompts = requests()[:12]
    tight = replace(SETTINGS, decoder_replay="off", kv_cache_bytes=9 << 16)  # pages for the longest alone, or some short ones
    found, preemptions = generate(tight, prompts)
    assert preemptions > 0
    assert_same(found, [alone("off", number) for number in range(12)])


def test_prompt_logprobs_are_the_full_runs_for_every_chunk_size() -> None:
    prompt = requests()[5]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    records = []
    for chunk in (7, 64, 512):
        settings = replace(SETTINGS, max_num_batched_tokens=chunk)
        engine = Engine(runner(settings.kv_cache_bytes), settings, facts())
        engine.add(GenerationRequest(key="p", input_ids=prompt.input_ids, sampling=sampling))
        found: list[TokenLogprobs] = []
        while engine.num_live or engine.has_work():
            for update in engine.step():
                found += update.prompt_logprobs
                if update.ready:
                    engine.attach(update.handle)
        records.append(found)
    for found in records:
        assert [record.token_id for record in found] == list(prompt.input_ids)
        assert [record.logprob for record in found[1:]] == pytest.approx([record.logprob for record in records[-1][1:]], abs=2e-3)


def test_greedy_output_is_the_golden_one(golden: Path) -> None:
    """Tokens and log-probabilities of the independent implementation, which ran every step as a full forward."""
    data = np.load(golden / "tiny-a" / "greedy.npz")
    names = sorted({name.rsplit("/", 1)[0] for name in data.files if name.startswith("fp32_noquant/")})
    assert names
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    prompts = tuple(
        GenerationRequest(key=name, input_ids=tuple(data[f"{name}/prompt_ids"].tolist()), sampling=sampling) for name in names
    )
    found, _ = generate(replace(SETTINGS, decoder_replay="off"), prompts)
    for name, ours in zip(names, found, strict=True):
        for step, record in enumerate(ours):
            if data[f"{name}/top1_margin"][step] < MARGIN:
                break
            assert record.token_id == data[f"{name}/new_ids"][step], f"{name} step {step}"
            assert record.logprob == pytest.approx(float(data[f"{name}/logprob"][step]), abs=2e-3)
