# SPDX-License-Identifier: Apache-2.0
"""The embedded model as it is shipped: whole, small, as it is trained, and with every mechanism of the release."""

from __future__ import annotations

import json

import pytest
from perf.quality.settings import complete_config
from tokenizers import Tokenizer

from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.errors import CedarError
from cedar.model import embedded
from cedar.model.checkpoint import CheckpointReader
from cedar.model.embedded import embedded_model_dir
from cedar.model.layout import expected_tensors
from cedar.text.tokenizer import load_tokenizer

MOST_BYTES = 40_000_000


def test_a_tensor_is_missing_or_has_another_form() -> None:
    reader = CheckpointReader(embedded_model_dir())
    reader.verify()
    assert reader.entries.keys() == expected_tensors(reader.config).keys()


def test_it_outgrows_a_clone_or_comes_without_its_card() -> None:
    files = {file.name: file.stat().st_size for file in embedded_model_dir().iterdir()}
    assert sum(files.values()) <= MOST_BYTES
    assert files["README.md"] > 1000


def test_it_lacks_a_mechanism_of_the_release() -> None:
    config, release = ModelConfig.load(embedded_model_dir()), ModelConfig.from_dict(preset("release"))
    assert {layer.mode for layer in config.layers} == {layer.mode for layer in release.layers}
    assert set(config.compress_ratios) == set(release.compress_ratios)
    assert config.sliding_window == release.sliding_window == 128
    assert (len(config.engram_layer_ids), config.hc_mult) == (len(release.engram_layer_ids), release.hc_mult)
    assert config.max_position_embeddings == 16384


def test_it_is_not_of_the_configuration_that_is_trained() -> None:
    directory = embedded_model_dir()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert json.loads((directory / "config.json").read_text()) == complete_config(tokenizer)
    assert len(load_tokenizer(directory)) == ModelConfig.load(directory).vocab_size


def test_an_installation_without_it_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NAME", "cedar-huge")
    with pytest.raises(CedarError, match=r"model: .*no cedar-huge; allowed: a checkpoint directory"):
        embedded_model_dir()
