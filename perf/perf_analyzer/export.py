# SPDX-License-Identifier: Apache-2.0
"""perf_analyzer's profile export to token timings.

An export is ``{"experiments": [{"requests": [{"timestamp", "request_inputs", "response_timestamps", "response_outputs"}]}]}``,
times in ns. A tensor of one element is written as that element, and one of no elements as a single element, too: the length of
``output_ids`` is not to be trusted, and tokens are counted by ``num_output_tokens`` alone. An empty final response (sent when a
model ends a stream without data) appears with no outputs at all and counts for nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cedar.bench.stats import StreamTiming


class ExportError(Exception):
    """The export is not what a finished run writes; the message says where."""


@dataclass(frozen=True)
class Request:
    """One request of an export."""

    timing: StreamTiming
    max_tokens: int
    finish_reason: str


def read(path: Path) -> list[Request]:
    """The requests of an export with one experiment. Raises `ExportError`."""
    try:
        data = json.loads(path.read_text())
        experiments = data["experiments"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{path.name} is not a profile export: {error!r}") from error
    if len(experiments) != 1:
        raise ExportError(f"{path.name} holds {len(experiments)} experiments, expected 1")
    requests = [_request(item, index) for index, item in enumerate(experiments[0]["requests"])]
    if not requests:
        raise ExportError(f"{path.name} holds no request")
    return requests


def _request(item: dict[str, Any], index: int) -> Request:
    where = f"request {index}"
    outputs, stamps = item["response_outputs"], item["response_timestamps"]
    if len(outputs) != len(stamps):
        raise ExportError(f"{where}: {len(stamps)} response_timestamps but {len(outputs)} response_outputs")
    data = [(stamp, output) for stamp, output in zip(stamps, outputs, strict=True) if output]
    if not data:
        raise ExportError(f"{where}: no response with data")
    counts = [_number(output, "num_output_tokens", f"{where}, response {i}") for i, (_, output) in enumerate(data)]
    responses = tuple((stamp / 1e9, count) for (stamp, _), count in zip(data, counts, strict=True))
    return Request(
        timing=StreamTiming(item["timestamp"] / 1e9, responses, _number(data[-1][1], "num_input_tokens", where)),
        max_tokens=_number(item["request_inputs"], "max_tokens", f"{where}, request_inputs"),
        finish_reason=str(data[-1][1].get("finish_reason", "")),
    )


def _number(tensors: dict[str, Any], name: str, where: str) -> int:
    value = tensors.get(name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ExportError(f"{where}: {name} is {value!r}, expected a count")
    return value
