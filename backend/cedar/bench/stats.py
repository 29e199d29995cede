# SPDX-License-Identifier: Apache-2.0
"""One streamed completion as timings, and the statistics of many. Times are seconds unless a name says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class StreamTiming:
    """One finished request, as its client saw it. ``responses``: (arrival, tokens that it carried), in order; a response may
    carry several tokens, or none (text that was held back, a keep-alive, an empty final response)."""

    start: float
    responses: tuple[tuple[float, int], ...]
    num_input_tokens: int = 0

    @property
    def arrivals(self) -> list[tuple[float, int]]:
        """The responses that carried tokens."""
        return [(when, tokens) for when, tokens in self.responses if tokens]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.responses)

    @property
    def end(self) -> float:
        return self.responses[-1][0] if self.responses else self.start

    @property
    def latency(self) -> float:
        """Request to last response, whatever that carried."""
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        """Request to the first response that carried a token; None without one."""
        arrivals = self.arrivals
        return arrivals[0][0] - self.start if arrivals else None

    @property
    def inter_token_latency(self) -> float | None:
        """Mean time per token after the first response: (last - first) / (tokens - tokens of the first response), which is the
        usual (latency - TTFT) / (tokens - 1) when the first token comes alone. None when nothing follows the first response."""
        arrivals = self.arrivals
        after = self.tokens - arrivals[0][1] if arrivals else 0
        return (arrivals[-1][0] - arrivals[0][0]) / after if after else None

    @property
    def gaps(self) -> list[float]:
        """Times between neighbouring responses that carried tokens: what a reader sees as stutter."""
        times = [when for when, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]


def summary(values: Iterable[float | None], scale: float = 1.0) -> dict[str, Any] | None:
    """count, mean, min, p50, p90, p99, max of the values that are there, times ``scale``; None when there are none.
    Percentiles interpolate linearly."""
    known = np.asarray([value for value in values if value is not None], dtype=np.float64) * scale
    if not known.size:
        return None
    percentiles = np.percentile(known, PERCENTILES)
    out = {"count": int(known.size), "mean": float(known.mean()), "min": float(known.min()), "max": float(known.max())}
    out.update({f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)})
    return {key: value if key == "count" else round(value, 4) for key, value in out.items()}


def describe(streams: Sequence[StreamTiming]) -> dict[str, Any]:
    """The table row of one load level: latencies in ms, throughput over the span from the first request to the last response."""
    span = max(s.end for s in streams) - min(s.start for s in streams)
    tokens = sum(s.tokens for s in streams)
    return {
        "requests": len(streams),
        "duration_s": round(span, 4),
        "input_tokens": sum(s.num_input_tokens for s in streams),
        "output_tokens": tokens,
        "responses_with_tokens": sum(len(s.arrivals) for s in streams),
        "ttft_ms": summary((s.ttft for s in streams), 1e3),
        "inter_token_latency_ms": summary((s.inter_token_latency for s in streams), 1e3),
        "response_gap_ms": summary((gap for s in streams for gap in s.gaps), 1e3),
        "request_latency_ms": summary((s.latency for s in streams), 1e3),
        "tokens_per_s_per_request": summary(s.tokens / s.latency if s.latency > 0 else None for s in streams),
        "output_tokens_per_s": round(tokens / span, 3) if span > 0 else None,
        "requests_per_s": round(len(streams) / span, 4) if span > 0 else None,
    }
