# SPDX-License-Identifier: Apache-2.0
"""The engine's Prometheus metrics: vLLM's names and buckets behind the prefix ``cedar_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from cedar.engine.request import FinishReason
from cedar.engine.stats import Metric

_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_TOKENS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)

_GAUGES = {
    Metric.RUNNING: "Sequences that hold memory",
    Metric.WAITING: "Sequences that wait for memory",
    Metric.KV_USAGE: "Used share of the KV budget, 0 to 1",
    Metric.KV_BYTES_PER_TOKEN: "Bytes of global KV that one token takes over all layers",
}
_COUNTERS = {
    Metric.PREFIX_QUERIES: "Prompt tokens looked up in the prefix cache",
    Metric.PREFIX_HITS: "Prompt tokens found in the prefix cache",
    Metric.REPLAYED_TOKENS: "Tokens encoded again to rebuild windows after a prefix hit",
    Metric.PROMPT_TOKENS: "Prompt tokens of admitted requests",
    Metric.GENERATION_TOKENS: "Generated tokens",
    Metric.PREEMPTIONS: "Sequences whose memory was taken",
}
_HISTOGRAMS = {
    Metric.TTFT: ("Arrival to first token", _TTFT),
    Metric.INTER_TOKEN: ("Time between two tokens of a sequence", _INTER_TOKEN),
    Metric.E2E: ("Arrival to end", _LATENCY),
    Metric.QUEUE_TIME: ("Arrival to first prompt chunk", _LATENCY),
    Metric.PREFILL_TIME: ("First prompt chunk to first token", _LATENCY),
    Metric.DECODE_TIME: ("First to last token", _LATENCY),
    Metric.REQUEST_PROMPT_TOKENS: ("Prompt tokens of a request", _TOKENS),
    Metric.REQUEST_GENERATION_TOKENS: ("Generated tokens of a request", _TOKENS),
}


class EngineMetrics:
    """A registry of its own with every family, all present from the start; the engine's `Recorder`."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` series would double every family
        self.registry = CollectorRegistry()
        self._gauges = {m: Gauge(f"cedar_{m}", text, registry=self.registry) for m, text in _GAUGES.items()}
        self._counters = {m: Counter(f"cedar_{m}", text, registry=self.registry) for m, text in _COUNTERS.items()}
        self._histograms = {
            m: Histogram(f"cedar_{m}", text, registry=self.registry, buckets=buckets)
            for m, (text, buckets) in _HISTOGRAMS.items()
        }
        ended = Counter(f"cedar_{Metric.SUCCESS}", "Ended requests", ("finished_reason",), registry=self.registry)
        self._ended = {reason.value: ended.labels(reason.value) for reason in FinishReason}
        self._up = Gauge("cedar_engine_up", "1 while requests are accepted", registry=self.registry)

    def count(self, metric: Metric, amount: int = 1, *, finished_reason: str | None = None) -> None:
        """See `cedar.engine.stats.Recorder`."""
        counter = self._counters[metric] if finished_reason is None else self._ended[finished_reason]
        counter.inc(amount)

    def observe(self, metric: Metric, value: float) -> None:
        """See `cedar.engine.stats.Recorder`."""
        self._histograms[metric].observe(value)

    def gauge(self, metric: Metric, value: float) -> None:
        """See `cedar.engine.stats.Recorder`."""
        self._gauges[metric].set(value)

    def set_up(self, up: bool) -> None:
        """``cedar_engine_up``."""
        self._up.set(up)

    def text(self) -> bytes:
        """Every family in Prometheus text format."""
        return generate_latest(self.registry)
