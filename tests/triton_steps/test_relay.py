# SPDX-License-Identifier: Apache-2.0
"""Engine metrics into a registry that can only be incremented, set and observed."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cedar.errors import unavailable
from cedar.triton.relay import MetricsRelay, Mirror


class Family:
    """Keeps what Triton's metric objects keep; as there, a family made again under its name is the same one."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    all: ClassVar[dict[str, Family]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        known = Family.all.get(name)
        self.kind = kind
        self.metrics: dict[tuple[Any, ...], Value] = known.metrics if known else {}
        Family.all[name] = self

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Value:
        assert (buckets is not None) == (self.kind == "histogram")
        return self.metrics.setdefault(tuple(sorted(labels.items())), Value(buckets or []))


class Value:
    def __init__(self, bounds: list[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def increment(self, amount: float) -> None:
        assert amount > 0
        self.total += amount

    def set(self, value: float) -> None:
        self.total = value

    def value(self) -> float:
        return self.total

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


def found(name: str, **labels: str) -> Value:
    return Family.all[name].metrics[tuple(sorted(labels.items()))]


class Engine:
    """An engine's own registry; a new one is a restarted engine."""

    pids = itertools.count(1)

    def __init__(self) -> None:
        self.pid = next(Engine.pids)
        self.registry = CollectorRegistry()
        self.tokens = Counter("cedar_generation_tokens_total", "t", registry=self.registry)
        self.ended = Counter("cedar_request_success_total", "t", ("finished_reason",), registry=self.registry)
        self.running = Gauge("cedar_num_requests_running", "t", registry=self.registry)
        self.ttft = Histogram("cedar_time_to_first_token_seconds", "t", registry=self.registry, buckets=(0.1, 1.0, 10.0))
        self.other = Counter("python_gc_total", "t", registry=self.registry)

    def seen_by(self, mirror: Mirror) -> None:
        mirror.update(generate_latest(self.registry).decode(), self.pid)


@pytest.fixture
def mirror() -> Mirror:
    Family.all.clear()
    return Mirror(Family)


def test_counters_and_gauges_are_not_the_engine_s(mirror: Mirror) -> None:
    engine = Engine()
    for step in range(3):
        engine.tokens.inc(5)
        engine.ended.labels("stop").inc()
        engine.running.set(step)
        engine.seen_by(mirror)
    engine.seen_by(mirror)
    assert found("cedar_generation_tokens_total").total == 15
    assert found("cedar_request_success_total", finished_reason="stop").total == 3
    assert found("cedar_num_requests_running").total == 2
    assert not [name for name in Family.all if not name.startswith("cedar_") or name.endswith("_created")]


def test_a_restarted_engine_resets_counters(mirror: Mirror) -> None:
    for _ in range(2):
        engine = Engine()
        engine.tokens.inc(5)
        engine.ttft.observe(0.5)
        engine.seen_by(mirror)
    assert found("cedar_generation_tokens_total").total == 10
    assert found("cedar_time_to_first_token_seconds").counts == [0, 2, 0, 0]


def test_a_restarted_relay_counts_twice(mirror: Mirror) -> None:
    """A killed step leaves its metrics in the server."""
    engine = Engine()
    engine.tokens.inc(5)
    engine.ttft.observe(0.5)
    engine.seen_by(mirror)
    engine.tokens.inc(2)
    again = Mirror(Family)
    engine.seen_by(again)
    engine.ttft.observe(0.5)
    engine.seen_by(again)
    assert found("cedar_generation_tokens_total").total == 7
    assert found("cedar_time_to_first_token_seconds").counts == [0, 2, 0, 0]


def test_a_lost_engine_still_runs_requests(mirror: Mirror) -> None:
    engine = Engine()
    engine.running.set(4)
    engine.tokens.inc(5)
    engine.seen_by(mirror)
    mirror.engine_lost()
    assert found("cedar_num_requests_running").total == 0
    assert found("cedar_generation_tokens_total").total == 5


@given(st.lists(st.lists(st.floats(0.0, 50.0), max_size=6), min_size=1, max_size=5))
def test_a_histogram_loses_counts_or_its_sum(batches: list[list[float]]) -> None:
    Family.all.clear()
    mirror, engine = Mirror(Family), Engine()
    truth = Value([0.1, 1.0, 10.0])
    for batch in batches:
        for value in batch:
            engine.ttft.observe(value)
            truth.observe(value)
        engine.seen_by(mirror)
    copy = found("cedar_time_to_first_token_seconds")
    assert copy.counts == truth.counts
    assert math.isclose(copy.total, truth.total, rel_tol=1e-9, abs_tol=1e-9)


class Looks:
    """An engine's client that only says when it is asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def status(self, include_metrics: bool) -> Any:
        self.asked.set()
        raise unavailable("of the test")


def test_two_relays_of_one_server_touch_its_metrics_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedar.triton.relay.INTERVAL_S", 0.02)
    old_client, new_client = Looks(), Looks()
    old, new = MetricsRelay(old_client, Family), MetricsRelay(new_client, Family)  # type: ignore[arg-type]
    old.start()
    assert old_client.asked.wait(5)
    new.start()
    assert not new_client.asked.wait(0.5)
    old.stop()
    assert new_client.asked.wait(5)
    new.stop()
