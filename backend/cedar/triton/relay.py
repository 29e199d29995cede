# SPDX-License-Identifier: Apache-2.0
"""Mirrors the engine's metrics into Triton's own endpoint.

The engine is the source of truth. Triton's counters can only be incremented and its histograms only observe values, so
what is mirrored is the change since the last look.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cedar.errors import CedarError
from cedar.service.client import EngineClient

PREFIX = "cedar_"
INTERVAL_S = 1.0
STOP_TIMEOUT_S = 3.0
Labels = tuple[tuple[str, str], ...]
log = logging.getLogger("cedar.triton.relay")


class Mirror:
    """Triton metrics that follow Prometheus text. Not thread-safe. ``factory``: `pb_utils.MetricFamily`.

    Metrics of a killed step stay in the server, and a family made again under its name is the old one. Counters tell
    their value, so they go on exactly; histograms do not, so they go on from the first look.
    """

    def __init__(self, factory: Any) -> None:
        self._factory = factory
        self._families: dict[str, _Family] = {}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._engine: int | None = None
        self._counters: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], _Histogram] = {}
        self._inherited = False

    def update(self, text: str, engine: int) -> None:
        """Follow one snapshot of the engine; ``engine``: its process, another one starts from zero."""
        first = self._engine is None
        if engine != self._engine:
            self._engine = engine
            self._counters.clear()
            self._histograms.clear()
        families = [f for f in text_string_to_metric_families(text) if _is_ours(f.name)]
        for family in families:
            for sample in family.samples:
                if family.type == "counter" and sample.name.endswith("_total"):
                    self._follow_counter(family, sample.name, _key(sample.labels), sample.value, first)
                elif family.type == "gauge":
                    self._metric(sample.name, family, _key(sample.labels)).set(sample.value)
        for family in families:
            if family.type == "histogram":
                self._follow_histograms(family, first)

    def engine_lost(self) -> None:
        """No engine: nothing runs and nothing is held."""
        for (name, _), metric in self._metrics.items():
            if self._families[name].kind == "gauge":
                metric.set(0.0)

    def _follow_counter(self, family: Metric, name: str, labels: Labels, value: float, first: bool) -> None:
        metric = self._metric(name, family, labels)
        before = self._counters.get((name, labels), 0.0)
        if first and (left := metric.value()) > 0:
            self._inherited = True
            before = left if left <= value else 0.0
        if value > before:
            metric.increment(value - before)
        self._counters[name, labels] = value

    def _follow_histograms(self, family: Metric, first: bool) -> None:
        parts: dict[Labels, dict[float, float]] = {}
        sums: dict[Labels, float] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                others = {name: value for name, value in sample.labels.items() if name != "le"}
                parts.setdefault(_key(others), {})[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith("_sum"):
                sums[_key(sample.labels)] = sample.value
        for labels, buckets in parts.items():
            bounds = sorted(buckets)
            metric = self._metric(family.name, family, labels, [b for b in bounds if math.isfinite(b)])
            now = _Histogram(bounds, [buckets[b] for b in bounds], sums.get(labels, 0.0))
            if not (first and self._inherited):
                for value in now.since(self._histograms.get((family.name, labels))):
                    metric.observe(value)
            self._histograms[family.name, labels] = now

    def _metric(self, name: str, family: Metric, labels: Labels, buckets: list[float] | None = None) -> Any:
        key = (name, labels)
        if key not in self._metrics:
            if name not in self._families:
                self._families[name] = _Family(self._factory, name, family)
            self._metrics[key] = self._families[name].metric(dict(labels), buckets)
        return self._metrics[key]

    def close(self) -> None:
        """Give the metrics back, before their families: the server insists on that order."""
        self._metrics.clear()
        self._families.clear()


class _Family:
    def __init__(self, factory: Any, name: str, family: Metric) -> None:
        self.kind = family.type
        kind = getattr(factory, self.kind.upper())
        self._family = factory(name=name, description=family.documentation, kind=kind)

    def metric(self, labels: dict[str, str], buckets: list[float] | None) -> Any:
        if buckets is None:
            return self._family.Metric(labels=labels)
        return self._family.Metric(labels=labels, buckets=buckets)


class _Histogram:
    """A snapshot: upper bounds (the last is infinite), cumulative counts, sum."""

    def __init__(self, bounds: list[float], cumulative: list[float], total: float) -> None:
        self._bounds = bounds
        self._counts = [int(b - a) for a, b in zip([0.0, *cumulative], cumulative, strict=False)]
        self._sum = total

    def since(self, before: _Histogram | None) -> Iterable[float]:
        """Values whose observation turns ``before`` into this one: as many per bucket, and with the same sum.

        Inside its bucket each value stands at the same share t of the width, chosen so that the sum comes out.
        """
        counts, total = self._counts, self._sum
        if before is not None:
            counts = [now - old for now, old in zip(counts, before._counts, strict=True)]
            total -= before._sum
        if not any(counts):
            return
        lows = [0.0, *self._bounds[:-1]]
        base = sum(count * low for count, low in zip(counts, lows, strict=True))
        finite = self._bounds[:-1]
        width = sum(count * (high - low) for count, low, high in zip(counts, lows, finite, strict=False))
        over = counts[-1]
        # what lies beyond the last bound takes the rest of the sum; it has no upper bound
        share = min(max((total - base) / width, 0.0), 0.5 if over else 1.0) if width else 0.0
        for count, low, high in zip(counts, lows, finite, strict=False):
            value = min(max(low + share * (high - low), math.nextafter(low, math.inf)), high)
            yield from (value for _ in range(count))
        if over:
            last = finite[-1] if finite else 0.0
            rest = (total - base - share * width) / over + last
            yield from (max(rest, math.nextafter(last, math.inf)) for _ in range(over))


def _is_ours(name: str) -> bool:
    return name.startswith(PREFIX) and not name.endswith("_created")


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


class MetricsRelay:
    """The one thread of a server that touches its metrics."""

    def __init__(self, client: EngineClient, factory: Any) -> None:
        self._client = client
        self._factory = factory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cedar-metrics", daemon=True)

    def start(self) -> None:
        """Begin; the first look is at once."""
        self._thread.start()

    def _run(self) -> None:
        with self._turn() as ours:
            if ours:
                self._relay()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Alone among the server's processes: while `deliver` is replaced, old and new live side by side, and two that touch
        the metrics crash the server. An abstract socket's name is free again when its process ends, however it ends."""
        name = f"\0cedar-metrics-{os.getuid()}-{os.getppid()}"
        with socket.socket(socket.AF_UNIX) as holder:
            while True:
                try:
                    holder.bind(name)
                except OSError:
                    if self._stop.wait(INTERVAL_S):
                        yield False
                        return
                else:
                    yield True
                    return

    def _relay(self) -> None:
        # also made and given back on this thread
        mirror = Mirror(self._factory)
        while True:
            try:
                status = self._client.status(include_metrics=True)
                mirror.update(status.metrics.decode(), status.pid)
            except CedarError:
                mirror.engine_lost()
            except Exception:
                log.exception("metrics could not be relayed")
            if self._stop.wait(INTERVAL_S):
                mirror.close()
                return

    def stop(self) -> None:
        """Returns when the thread has given its metrics back."""
        self._stop.set()
        self._thread.join(STOP_TIMEOUT_S)
