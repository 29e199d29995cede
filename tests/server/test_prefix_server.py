# SPDX-License-Identifier: Apache-2.0
"""The prefix cache through a real server: what a request is told to have found, who may find it, and how it is emptied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cedar_server import Answer, Client, Server, eventually

from cedar.service.client import EngineClient

PAGE, W = 64, 128
"""The default page_tokens; the embedded model's window."""
KV_BYTES = 280
"""Of a token of that model."""
SNAPSHOTS = 256
"""Distance of snapshots with encoder replay off."""
RELAY_S = 15
"""The adapters relay the engine's metrics into Triton's endpoint every few seconds."""
COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "replayed_tokens_total")


def cache_command(server: Server, *arguments: str) -> str:
    """``cedar cache …`` as an operator runs it."""
    triton = server.triton()
    assert triton is not None
    command = [sys.executable, "-m", "cedar", "cache", *arguments, "--server", str(triton.pid)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CEDAR_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def clear(server: Server) -> None:
    """As the command, without a process of its own."""
    client = EngineClient(server.engine_directory().address)
    try:
        client.clear_cache()
    finally:
        client.close()


@pytest.fixture(autouse=True)
def empty(server: Server) -> Iterator[None]:
    """Each test begins with an empty cache and ends with nothing held."""
    clear(server)
    yield
    eventually(lambda: server.status().sequences_held == 0, 10, "an idle server")


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens of no other test or seed."""
    return [20 + (seed * 97 + position * position * 31 + position * 7) % 400 for position in range(length)]


def ask(client: Client, ids: Sequence[int], **settings: Any) -> Answer:
    """Greedy tokens. ``settings``: sampling_parameters."""
    wanted = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **settings}
    answer = client.run(input_ids=list(ids), sampling_parameters=json.dumps(wanted))
    assert (answer.error, len(answer.ids)) == ("", wanted["max_tokens"])
    return answer


def found(answer: Answer) -> tuple[int, int]:
    """(cached tokens, replayed tokens), which every response must tell alike."""
    counts = set(zip(answer.all("cached_tokens"), answer.all("replayed_tokens"), strict=True))
    assert len(counts) == 1
    return counts.pop()


def longest(length: int, rows: int = 1) -> int:
    """Tokens of the whole pages before the last ``rows`` tokens."""
    return (length - rows) // PAGE * PAGE


@pytest.mark.parametrize("length", [1, 64, 65, 129, 192, 193, 300, 1000])
def test_an_identical_prompt_finds_less_than_its_whole_pages(client: Client, length: int) -> None:
    """Or something within the window, all of which would have to run again."""
    ids = prompt(length, length)
    first, second = ask(client, ids), ask(client, ids)
    assert found(first) == (0, 0)
    hit = longest(length)
    assert found(second) == ((hit, W) if hit > W else (0, 0))
    assert first.last("num_input_tokens") == second.last("num_input_tokens") == length


def test_a_prompt_finds_more_than_it_shares(client: Client) -> None:
    ids = prompt(400, 1)
    ask(client, ids)
    assert found(ask(client, ids[:200] + prompt(200, 2)))[0] == 192
    assert found(ask(client, [ids[0] + 1, *ids[1:]])) == (0, 0)


def test_prompts_that_come_together_compute_their_beginning_more_than_once(client: Client) -> None:
    beginning = prompt(600, 13)
    answers = [client.submit(input_ids=beginning + prompt(30, 14 + n), max_tokens=2, ignore_eos=True) for n in range(6)]
    client.wait(lambda: all(answer.done for answer in answers))
    assert [answer.error for answer in answers] == [""] * 6
    first, *others = sorted(map(found, answers))
    assert first == (0, 0)
    assert set(others) <= {(512, W), (576, W)}  # what the first step computed is found by those that came during it


def test_what_was_generated_is_not_found_by_the_next_turn(client: Client) -> None:
    ids = prompt(180, 3)
    turn = ask(client, ids, max_tokens=60)
    assert found(ask(client, ids + turn.ids + prompt(20, 4))) == (192, W)


def test_a_snapshot_that_nobody_made_is_found_or_one_that_was_made_is_not(client: Client) -> None:
    ids = prompt(600, 5)
    ask(client, ids)
    assert found(ask(client, ids, encoder_replay="off")) == (0, 0)
    assert found(ask(client, ids, encoder_replay="off")) == (longest(600, W), 0)
    shared = ids[:400] + prompt(200, 6)
    assert found(ask(client, shared, encoder_replay="off")) == (SNAPSHOTS, 0)
    assert found(ask(client, ids)) == (longest(600), W)


def test_a_snapshot_without_the_decoder_layers_serves_a_request_that_runs_them_all(client: Client) -> None:
    ids = prompt(600, 7)
    ask(client, ids, encoder_replay="off", decoder_replay="bounded")
    assert found(ask(client, ids, encoder_replay="off", decoder_replay="off")) == (0, 0)
    assert found(ask(client, ids, encoder_replay="off", decoder_replay="off")) == (longest(600), 0)


def test_a_tenant_finds_or_clears_away_what_another_has_cached(client: Client) -> None:
    ids = prompt(300, 8)
    ask(client, ids, cache_salt="red")
    assert found(ask(client, ids, cache_salt="blue")) == (0, 0)
    assert found(ask(client, ids)) == (0, 0)
    for salt in ("red", "blue", ""):
        assert found(ask(client, ids, cache_salt=salt)) == (256, W)


def entries(answer: Answer) -> tuple[list[Any], list[Any]]:
    """Log-probabilities of the prompt and of the output, however many tokens a response carries."""
    parts = [json.loads(part) for part in answer.all("logprobs")]
    return parts[0]["prompt"], [entry for part in parts for entry in part["tokens"]]


def test_prompt_logprobs_are_those_of_a_prefix_hit(client: Client) -> None:
    ids = prompt(300, 9)
    cold = ask(client, ids, prompt_logprobs=1)
    assert found(cold) == (0, 0)
    again = ask(client, ids, prompt_logprobs=1)
    assert found(again) == (0, 0)
    assert len(json.loads(again.all("logprobs")[0])["prompt"]) == 300
    assert entries(again) == entries(cold)
    assert found(ask(client, ids)) == (256, W)


def test_a_cleared_cache_still_gives_hits_or_the_count_is_wrong(server: Server, client: Client) -> None:
    ids = prompt(300, 10)
    ask(client, ids)
    assert found(ask(client, ids)) == (256, W)
    # 300 prompt tokens and 3 of the output are computed: 4 whole pages
    assert cache_command(server, "clear") == "256 tokens dropped\n"
    assert server.status().kv_bytes_cached == 0
    assert found(ask(client, ids)) == (0, 0)
    assert found(ask(client, ids)) == (256, W)


def test_clearing_takes_from_a_running_request_what_it_uses(server: Server, client: Client) -> None:
    ids = prompt(300, 11)
    alone = ask(client, ids, max_tokens=60)
    wanted = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "cache_salt": "running"}
    running = client.submit(input_ids=ids, sampling_parameters=json.dumps(wanted))
    client.wait(lambda: len(running.ids) > 5)
    clear(server)
    assert server.status().sequences_held == 1, "it ended before the cache was cleared"
    client.wait(lambda: running.done)
    assert (running.error, running.ids) == ("", alone.ids)


def test_the_metrics_tell_other_counts_than_the_answers(server: Server, client: Client) -> None:
    before = json.loads(cache_command(server, "stats", "--json"))
    ids = prompt(300, 12)
    answers = [ask(client, ids) for _ in range(3)]
    after = json.loads(cache_command(server, "stats", "--json"))
    change = {name: after[name] - before[name] for name in ("prefix_cache_queries", "prefix_cache_hits", "replayed_tokens")}
    assert change == {"prefix_cache_queries": 900, "prefix_cache_hits": 512, "replayed_tokens": 2 * W}
    assert [sum(counts) for counts in zip(*map(found, answers), strict=True)] == [512, 2 * W]
    expected = [float(after[name.removesuffix("_total")]) for name in COUNTERS]
    eventually(lambda: [server.metric(f"cedar_{name}") for name in COUNTERS] == expected, RELAY_S, f"metrics {expected}")
    assert server.metric("cedar_kv_bytes_per_token") == KV_BYTES
    assert after["kv_bytes_cached"] == 4 * PAGE * KV_BYTES
