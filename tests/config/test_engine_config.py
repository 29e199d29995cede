# SPDX-License-Identifier: Apache-2.0
"""Settings: the precedence of the four sources, and messages that name the setting."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from cedar.config.engine import EngineConfig, misspelt
from cedar.errors import CedarError, ErrorCode


def test_a_lower_source_wins_over_a_higher_one(tmp_path: Path) -> None:
    path = tmp_path / "cedar.yaml"
    path.write_text("max_num_seqs: 3\nmax_waiting: 3\nlease_ms: 3\n")
    env = {"CEDAR_CONFIG": str(path), "CEDAR_MAX_WAITING": "2", "CEDAR_LEASE_MS": "2"}
    config = EngineConfig.load({"lease_ms": 1, "tick_ms": None}, env)
    assert (config.max_num_seqs, config.max_waiting, config.lease_ms, config.tick_ms) == (3, 2, 1, EngineConfig().tick_ms)


def test_yaml_beside_the_model_repository_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "cedar.yaml").write_text("page_tokens: 32\n")
    assert EngineConfig.load({"model_repository": str(tmp_path / "models")}, {}).page_tokens == 32
    assert EngineConfig.load({}, {"CEDAR_MODEL_REPOSITORY": str(tmp_path / "models")}).page_tokens == 32


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("ON", True), ("false", False), ("0", False), ("no", False)]
)
def test_boolean_text_is_misread(text: str, value: bool) -> None:
    assert EngineConfig.load({}, {"CEDAR_SWA_BOUNDED_REPLAY": text}).swa_bounded_replay is value


def test_one_replay_side_switches_the_other_off() -> None:
    one = EngineConfig.load({"decoder_replay": "off"}, {})
    assert (one.encoder_replay_mode, one.decoder_replay_mode) == ("bounded", "off")
    both = EngineConfig.load({"swa_bounded_replay": False, "encoder_replay": "bounded"}, {})
    assert (both.encoder_replay_mode, both.decoder_replay_mode) == ("bounded", "off")


def test_child_processes_read_other_settings(tmp_path: Path) -> None:
    """Whatever their environment holds and whatever YAML they would find by themselves."""
    (tmp_path / "models").mkdir()
    (tmp_path / "cedar.yaml").write_text("encoder_replay: off\nmax_waiting: 7\n")
    repository = {"model_repository": str(tmp_path / "models")}
    given = {"fake_quant": False, "http_port": 9999, "kv_cache_share": 0.5, "model": "/m x"}
    for flags in (given, {**given, **repository, "encoder_replay": "", "max_waiting": 256}):
        config = EngineConfig.load(flags, {})
        assert EngineConfig.load({}, {"CEDAR_TICK_MS": "9", **config.as_env()}) == config


def test_yaml_decides_what_a_word_means(tmp_path: Path) -> None:
    """In YAML 1.1 ``off`` is a boolean and an empty value is null; here the setting decides."""
    path = tmp_path / "cedar.yaml"
    path.write_text("encoder_replay: off\nfake_quant: off\nmodel:\nmax_waiting: ~\nkv_cache_share: 0.5\nlease_ms: 70\n")
    config = EngineConfig.load({}, {}, path)
    assert (config.encoder_replay, config.fake_quant, config.model) == ("off", False, "")
    assert (config.max_waiting, config.kv_cache_share, config.lease_ms) == (EngineConfig().max_waiting, 0.5, 70)


@pytest.mark.parametrize(
    ("flags", "env", "names"),
    [
        ({"device": "tpu"}, {}, "device"),
        ({"max_num_seqs": 0}, {}, "max_num_seqs"),
        ({"kv_cache_share": 1.5}, {}, "kv_cache_share"),
        ({"page_tokens": 20}, {}, "page_tokens"),
        ({"http_port": 70000}, {}, "http_port"),
        ({"max_model_len": -1}, {}, "max_model_len"),
        ({"lease_ms": "soon"}, {}, "--lease-ms"),
        ({"lease_ms": 2**31}, {}, "lease_ms"),
        ({"nonsense": 1}, {}, "--nonsense"),
        ({}, {"CEDAR_TICK_MS": "often"}, "CEDAR_TICK_MS"),
        ({}, {"CEDAR_FAKE_QUANT": "maybe"}, "CEDAR_FAKE_QUANT"),
        ({}, {"CEDAR_CONFIG": "/does/not/exist.yaml"}, "CEDAR_CONFIG"),
    ],
)
def test_a_bad_setting_is_not_named(flags: dict[str, object], env: dict[str, str], names: str) -> None:
    with pytest.raises(CedarError) as caught:
        EngineConfig.load(flags, env)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert names in caught.value.message
    assert "allowed: " in caught.value.message


@pytest.mark.parametrize("text", ["- a\n", "max_num_seqs: [1]\n", "model: [a]\n", "unknown_key: 1\n", "a: b: c\n", "\udcff"])
def test_bad_yaml_does_not_name_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cedar.yaml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(CedarError, match=r"cedar\.yaml"):
        EngineConfig.load({}, {"CEDAR_CONFIG": str(path)})


def test_a_setting_has_no_help() -> None:
    assert all(field.metadata["help"] for field in fields(EngineConfig))


def test_yaml_beside_the_shipped_repository_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedar.config.engine.SHIPPED_REPOSITORY", tmp_path / "model_repository")
    (tmp_path / "cedar.yaml").write_text("page_tokens: 32\n")
    assert EngineConfig.load({}, {}).page_tokens == 32


def test_a_misspelt_variable_is_silent_or_a_foreign_one_is_blamed() -> None:
    env = {"CEDAR_LEESE_MS": "5", "CEDAR_LEASE_MS": "5", "CEDAR_SERVICE_HOST": "10.0.0.1", "CEDAR_URL": "h:1", "HOME": "/"}
    assert misspelt(env) == {"CEDAR_LEESE_MS": "CEDAR_LEASE_MS"}
