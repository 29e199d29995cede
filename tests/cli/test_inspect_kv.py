# SPDX-License-Identifier: Apache-2.0
"""`cedar inspect --kv`: the published sizes are what is allocated, and nothing that is allocated is left out."""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from cedar.cache.layout import LAYOUT_VERSION
from cedar.cache.store import KVCache
from cedar.cli import app
from cedar.cli.inspect_kv import describe_kv
from cedar.config.engine import EngineConfig
from cedar.config.model import ModelConfig
from cedar.config.presets import PRESETS, preset
from cedar.errors import CedarError

RELEASE = ModelConfig.from_dict(preset("release"))
RUNNER = CliRunner(env={name: "" for name in os.environ if name.startswith("CEDAR_")})


def report(*arguments: str) -> dict[str, Any]:
    result = RUNNER.invoke(app, ["inspect", "--kv", "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_release_takes_more_than_890_bytes_per_token_or_2_percent_of_pages() -> None:
    found = report("--preset", "release")
    assert found["tokens"] == 32768
    assert found["kv_bytes_per_token"] == 890
    parts = found["allocated_bytes"]
    growing = parts["global_kv"] + parts["index_keys"] + parts["block_table"]
    assert 890 * 32768 < growing <= 1.02 * 890 * 32768
    assert found["overhead_percent"] == pytest.approx(100 * (growing / (890 * 32768) - 1), abs=1e-3)
    assert sum(found["overhead_bytes"].values()) == growing - 890 * 32768


def test_the_release_takes_other_windows_seams_or_records() -> None:
    found = report("--preset", "release")
    assert round(found["window_bytes_per_sequence"] / 2**20, 2) == 2.58
    assert found["window_bytes_per_sequence"] == RELEASE.window_bytes_per_sequence
    assert found["records"] == {
        "layout_version": LAYOUT_VERSION,
        "window": 528,
        "global": 288,
        "index_key": 68,
        "index_key_block": 544,
    }
    row, streams = 4 * 4, 4 * 5120 * 2
    halo = 128 + 18 * 127
    assert found["seam_bytes"]["bfloat16"] == {
        "bounded": 128 * (streams + row) + (128 + 127) * 528,
        "exact": halo * (streams + row) + (halo + 127) * 528,
        "off": 5120 * 2,
    }
    table = 2**20 // 64 * 8
    assert found["snapshot_bytes"] == found["window_bytes_per_sequence"] + 3 * 4096 + table


@pytest.mark.parametrize("name", PRESETS)
def test_the_configuration_promises_other_sizes_than_the_pools_have(name: str) -> None:
    config = ModelConfig.from_dict(preset(name))
    found = describe_kv(config, EngineConfig())
    assert found["kv_bytes_per_token"] == config.kv_bytes_per_token
    assert found["window_bytes_per_sequence"] == config.window_bytes_per_sequence


def tensors() -> dict[int, torch.Tensor]:
    """All that are alive."""
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if type(thing) is torch.Tensor}


def test_something_that_is_allocated_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KVCache] = []
    measured = KVCache.allocated
    monkeypatch.setattr(KVCache, "allocated", lambda cache: made.append(cache) or measured(cache))
    before = tensors()
    found = describe_kv(RELEASE, EngineConfig())
    new = [tensor for key, tensor in tensors().items() if key not in before]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in new}
    assert len(storages) > RELEASE.num_hidden_layers
    assert sum(storages.values()) == sum(found["allocated_bytes"].values())


def test_reporting_takes_the_memory_that_it_reports() -> None:
    before = psutil.Process().memory_info().rss
    found = describe_kv(RELEASE, EngineConfig(), tokens=1 << 20)
    grown = psutil.Process().memory_info().rss - before
    assert sum(found["allocated_bytes"].values()) > 900e6
    assert grown < 100e6


def test_a_token_more_than_a_page_costs_nothing() -> None:
    one, two = (describe_kv(RELEASE, EngineConfig(), tokens=tokens) for tokens in (64, 65))
    assert (one["overhead_bytes"]["last_page"], two["overhead_bytes"]["last_page"]) == (0, 63 * 890)
    assert two["allocated_bytes"]["global_kv"] > one["allocated_bytes"]["global_kv"]


def test_a_budget_buys_more_than_its_bytes() -> None:
    budget = 10**9
    found = report("--preset", "release", "--kv-cache-bytes", str(budget))
    bought = found["budget"]
    assert bought["kv_cache_bytes"] == budget
    assert 1 <= bought["sequences"] <= 64
    assert bought["snapshots"] == 0
    held = bought["tokens"] * 890 + bought["sequences"] * found["snapshot_bytes"] + bought["boundary_bytes"]
    null = 64 * 890 + found["snapshot_bytes"]
    assert budget - 64 * 890 < held + null <= budget
    assert bought["sequences_of_this_length"] == min(bought["sequences"], bought["tokens"] // 32768) > 1


def test_no_snapshots_are_bought_without_encoder_replay() -> None:
    settings = EngineConfig(kv_cache_bytes=10**9, encoder_replay="off", max_num_seqs=4)
    bought = describe_kv(RELEASE, settings)["budget"]
    assert bought["sequences"] == 4
    assert bought["snapshots"] > 100


def test_the_tables_lack_a_number() -> None:
    result = RUNNER.invoke(app, ["inspect", "--kv", "--preset", "release", "--kv-cache-bytes", "20000000000"])
    assert result.exit_code == 0, result.output
    for text in ("890 B", "1.09 %", "2.58 MiB", "544 B", "5.38 MB", "23,639,040", "20.00 GB", "layout version 1"):
        assert text in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv", "--preset", "tiny", "--tokens", "16385"], "--tokens: is 16385; allowed: 1 to 16384"),
        (["--kv", "--preset", "tiny", "--tokens", "0"], "--tokens: is 0"),
        (["--kv", "--preset", "tiny", "--kv-cache-bytes", "-1"], "kv_cache_bytes: is -1"),
        (["--kv", "--preset", "tiny", "--kv-cache-bytes", "1000"], "kv_cache_bytes: is 1000; allowed: at least"),
        (["--kv"], "DIRECTORY: give a checkpoint directory or --preset"),
        (["--preset", "tiny", "--tokens", "5"], "--tokens: is given without --kv"),
        (["--preset", "tiny", "--kv-cache-bytes", "5"], "--kv-cache-bytes: is given without --kv"),
    ],
)
def test_a_bad_argument_is_not_named(arguments: list[str], message: str) -> None:
    error = RUNNER.invoke(app, ["inspect", *arguments]).exception
    assert isinstance(error, CedarError)
    assert message in error.message
