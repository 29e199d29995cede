# SPDX-License-Identifier: Apache-2.0
"""The engine's metrics as events. The service plugs a Prometheus registry in; the engine knows only this interface."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cedar.engine.work import MemoryUsage


class Metric(StrEnum):
    """Names without the ``cedar_`` prefix (contract: README, "Metrics")."""

    # gauges, set after every step
    RUNNING = "num_requests_running"
    WAITING = "num_requests_waiting"
    KV_USAGE = "kv_cache_usage_ratio"
    KV_BYTES_PER_TOKEN = "kv_bytes_per_token"
    # counters
    PREFIX_QUERIES = "prefix_cache_queries_total"
    PREFIX_HITS = "prefix_cache_hits_total"
    REPLAYED_TOKENS = "replayed_tokens_total"
    PROMPT_TOKENS = "prompt_tokens_total"
    GENERATION_TOKENS = "generation_tokens_total"
    SUCCESS = "request_success_total"
    PREEMPTIONS = "preemptions_total"
    # histograms
    TTFT = "time_to_first_token_seconds"
    INTER_TOKEN = "inter_token_latency_seconds"
    E2E = "e2e_request_latency_seconds"
    QUEUE_TIME = "request_queue_time_seconds"
    PREFILL_TIME = "request_prefill_time_seconds"
    DECODE_TIME = "request_decode_time_seconds"
    REQUEST_PROMPT_TOKENS = "request_prompt_tokens"
    REQUEST_GENERATION_TOKENS = "request_generation_tokens"


class Recorder(Protocol):
    """Where metrics go. Called on the engine's thread between steps, so it must be quick and must not raise."""

    def count(self, metric: Metric, amount: int = 1, *, finished_reason: str | None = None) -> None:
        """Add to a counter; ``finished_reason`` is the one label, of `Metric.SUCCESS` alone."""

    def observe(self, metric: Metric, value: float) -> None:
        """One observation of a histogram: seconds or tokens, by the metric's name."""

    def gauge(self, metric: Metric, value: float) -> None:
        """Set a gauge."""


class NullRecorder:
    """Records nothing: an engine without metrics (`cedar score`, tests)."""

    def count(self, metric: Metric, amount: int = 1, *, finished_reason: str | None = None) -> None:
        """See `Recorder`."""

    def observe(self, metric: Metric, value: float) -> None:
        """See `Recorder`."""

    def gauge(self, metric: Metric, value: float) -> None:
        """See `Recorder`."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for `Status`: ``num_running`` sequences hold memory, ``num_waiting`` do not (yet, or not any more)."""

    num_running: int
    num_waiting: int
    draining: bool
    usage: MemoryUsage
