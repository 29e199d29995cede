# SPDX-License-Identifier: Apache-2.0
"""Metric names, types and buckets are a contract with dashboards: all present from the start, none doubled."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cedar.engine.stats import Metric
from cedar.service.metrics import EngineMetrics

CONTRACT = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "engine_up", "kv_bytes_per_token"],
    "counter": [
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "replayed_tokens_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "preemptions_total",
    ],
    "histogram": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ],
}


def families(metrics: EngineMetrics) -> dict[str, tuple[str, dict]]:
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        name = family.name + "_total" if family.type == "counter" else family.name
        samples = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}
        found[name] = (family.type, samples)
    return found


def test_family_is_missing_renamed_or_unknown() -> None:
    found = {(kind, name) for name, (kind, _) in families(EngineMetrics()).items()}
    assert found == {(kind, f"cedar_{name}") for kind, names in CONTRACT.items() for name in names}
    assert {metric.value for metric in Metric} | {"engine_up"} == {name for names in CONTRACT.values() for name in names}


def test_recorded_value_goes_elsewhere() -> None:
    metrics = EngineMetrics()
    metrics.gauge(Metric.KV_USAGE, 0.25)
    metrics.count(Metric.GENERATION_TOKENS, 3)
    metrics.count(Metric.SUCCESS, finished_reason="stop")
    metrics.observe(Metric.TTFT, 0.03)
    metrics.observe(Metric.REQUEST_PROMPT_TOKENS, 1500)
    metrics.set_up(True)
    found = families(metrics)
    assert found["cedar_kv_cache_usage_ratio"][1] == {("cedar_kv_cache_usage_ratio",): 0.25}
    assert found["cedar_generation_tokens_total"][1] == {("cedar_generation_tokens_total",): 3}
    ended = found["cedar_request_success_total"][1]
    assert {dict([key[1]])["finished_reason"]: value for key, value in ended.items()} == {
        "stop": 1,
        "length": 0,
        "cancelled": 0,
        "deadline": 0,
        "error": 0,
    }
    ttft = found["cedar_time_to_first_token_seconds"][1]
    assert ttft["cedar_time_to_first_token_seconds_bucket", ("le", "0.02")] == 0
    assert ttft["cedar_time_to_first_token_seconds_bucket", ("le", "0.04")] == 1
    prompt = found["cedar_request_prompt_tokens"][1]
    assert prompt["cedar_request_prompt_tokens_bucket", ("le", "1000.0")] == 0
    assert prompt["cedar_request_prompt_tokens_bucket", ("le", "2000.0")] == 1
    assert found["cedar_engine_up"][1] == {("cedar_engine_up",): 1}
