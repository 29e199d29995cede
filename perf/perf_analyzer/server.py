# SPDX-License-Identifier: Apache-2.0
"""What the running server says about itself: readiness, version, and its token counters."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Any

import tritonclient.grpc as grpcclient
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

GENERATED = "cedar_generation_tokens_total"


class ServerError(Exception):
    """The server is not there, not ready, or says nothing about Cedar."""


def check(url: str, model: str) -> dict[str, Any]:
    """Name, version and extensions of a server on which ``model`` is ready. Raises `ServerError`."""
    try:
        with grpcclient.InferenceServerClient(url) as client:
            if not client.is_model_ready(model, client_timeout=10):
                raise ServerError(f"{url}: model {model!r} is not ready; start it with: make serve")
            facts: dict[str, Any] = client.get_server_metadata(as_json=True, client_timeout=10)
    except InferenceServerException as error:
        raise ServerError(f"{url}: {error.message()}; start a server with: make serve") from error
    return {"name": facts["name"], "version": facts["version"], "model": model}


def counters(url: str) -> dict[str, float]:
    """Every ``cedar_*`` counter and histogram total of a Prometheus page, summed over labels. Raises `ServerError`."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
    except (OSError, ValueError) as error:
        raise ServerError(f"{url}: {error}") from error
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("cedar_") and family.type in ("counter", "histogram"):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    out[sample.name] = out.get(sample.name, 0.0) + sample.value
    if GENERATED not in out:
        raise ServerError(f"{url}: no {GENERATED}; is this Cedar's metrics page?")
    return out


def settled(url: str, tokens: float, patience: float = 15.0) -> dict[str, float]:
    """The counters once they show ``tokens`` generated (or more), or as they are when patience ends.

    A relay feeds the page, so it lags: a reading taken too early would push tokens of one level into the next.
    """
    deadline = time.monotonic() + patience
    while True:
        now = counters(url)
        if now[GENERATED] >= tokens or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


def at_rest(url: str, quiet: float = 1.5, patience: float = 30.0) -> dict[str, float]:
    """The counters of a server that nobody uses: two readings, ``quiet`` seconds apart, that agree. Raises `ServerError`."""
    deadline = time.monotonic() + patience
    before = counters(url)
    while time.monotonic() < deadline:
        time.sleep(quiet)
        now = counters(url)
        if now[GENERATED] == before[GENERATED]:
            return now
        before = now
    raise ServerError(f"{url}: {GENERATED} keeps growing; the server must have no other traffic")


def growth(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """The counters that grew, and by how much."""
    change = {name: round(value - before.get(name, 0.0), 6) for name, value in now.items()}
    return {name: value for name, value in change.items() if value}
