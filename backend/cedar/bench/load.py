# SPDX-License-Identifier: Apache-2.0
"""Concurrent streamed completions through `cedar_client`, as timings."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cedar.bench.stats import StreamTiming
from cedar.errors import CedarError, ErrorCode
from cedar_client import Client

# Otherwise gRPC lets all channels of a process share one connection.
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
PROMPT = "Write a short story about a cedar forest, a river and the people who live between them."


def stream(client: Client, max_tokens: int) -> StreamTiming:
    """One greedy completion of exactly ``max_tokens`` tokens, its prompt not in the cache.

    One that ends with another number of them (cancelled, drained, cut by a deadline) is an error and never a figure.
    """
    responses = []
    num_input_tokens, reason = 0, None
    start = time.perf_counter()
    salt = secrets.token_hex(8)
    request = client.generate(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, cache_salt=salt)
    for delta in request:
        responses.append((time.perf_counter(), delta.num_output_tokens))
        num_input_tokens, reason = delta.num_input_tokens, delta.finish_reason
    timing = StreamTiming(start, tuple(responses), num_input_tokens)
    if timing.tokens != max_tokens:
        ending = f"ended with {timing.tokens} of {max_tokens} tokens (finish_reason {reason})"
        raise CedarError(ErrorCode.INTERNAL, f"request {request.key} {ending}")
    return timing


def level(url: str, concurrency: int, runs: int, max_tokens: int, done: Callable[[], None]) -> list[StreamTiming]:
    """``concurrency`` clients, each with its own connection, one request after the other, ``runs`` each; ``done`` after each.
    The first request that fails ends the level with its error."""

    def worker(_: int) -> list[StreamTiming]:
        out = []
        with Client(url, channel_args=_OWN_CONNECTION) as client:
            for _ in range(runs):
                out.append(stream(client, max_tokens))
                done()
        return out

    with ThreadPoolExecutor(concurrency) as pool:
        return [timing for timings in pool.map(worker, range(concurrency)) for timing in timings]
