# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints: complete, reproducible, readable by the strict loader and by `cedar inspect`."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from typer.testing import CliRunner

from cedar.cli import app
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.errors import CedarError
from cedar.model.checkpoint import INDEX, CheckpointReader, load_weights
from cedar.model.engram import EngramHasher, TokenMap
from cedar.model.layout import expected_tensors
from cedar.model.make import CONTROL_TOKENS, make_checkpoint, make_tokenizer
from cedar.model.transformer import Transformer

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("make") / "tiny"
    make_checkpoint(preset("tiny"), directory, seed=0, shards=3)
    return directory


def digest(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


def tensors(directory: Path) -> dict[str, bytes]:
    reader = CheckpointReader(directory)
    return {name: reader.read(name).view(torch.uint8).numpy().tobytes() for name in reader.entries}


@pytest.mark.parametrize("name", ["tiny", "tiny40"])
def test_a_made_checkpoint_is_complete(tmp_path: Path, name: str) -> None:
    config = make_checkpoint(preset(name), tmp_path / name)
    reader = CheckpointReader(tmp_path / name)
    reader.verify()
    assert reader.config == config
    assert reader.entries.keys() == expected_tensors(config).keys()


VARIANTS: dict[str, dict[str, Any]] = {
    "no Engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "no drafter": {"num_nextn_predict_layers": 0, "compress_ratios": [0, 0, *[2] * 4, *[1] * 6]},
    "two streams": {"hc_mult": 2},
    "sizes that are no powers of two": {"hidden_size": 96, "vocab_size": 300, "n_routed_experts": 5, "num_experts_per_tok": 3},
    "every layer compressed": {
        "compress_ratios": [1] * 12,
        "kv_source_layer_ids": [0, 4],
        "index_source_layer_ids": [0, 4, 8],
        "candidate_source_layer_id": 4,
        "engram_layer_ids": [0, 3],
        "num_nextn_predict_layers": 0,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_any_configuration_can_be_made_and_loaded(tmp_path: Path, name: str) -> None:
    config = preset("tiny")
    config["text_config"].update(VARIANTS[name])
    parsed = make_checkpoint(config, tmp_path / "x")
    model = Transformer(parsed, torch.float32)
    result = load_weights(model, tmp_path / "x")
    assert result.text_tensors == len(expected_tensors(parsed, drafter=False))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_the_directory_has_the_released_files(tiny: Path) -> None:
    names = {file.name for file in tiny.iterdir()}
    weights = {f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)}
    assert names == weights | {INDEX, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    index = json.loads((tiny / INDEX).read_text())
    assert set(index["weight_map"].values()) == weights
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in CheckpointReader(tiny).entries.values())


def test_other_readers_of_the_format_agree(tiny: Path) -> None:
    from safetensors import safe_open

    ours = CheckpointReader(tiny)
    for file, shard in ours.shards.items():
        with safe_open(tiny / file, "pt") as theirs:
            assert set(theirs.keys()) == set(shard.entries)
            for name in ("norm.weight", "layers.3.attn.attn_sink", "layers.0.ffn.experts.0.w2.weight", "mtp.1.norm.weight"):
                if name in shard.entries:
                    assert torch.equal(theirs.get_tensor(name).view(torch.uint8), ours.read(name).view(torch.uint8))


def test_the_seed_alone_decides_the_bytes(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(preset("tiny"), tmp_path / "same", seed=0, shards=3)
    assert digest(tmp_path / "same") == digest(tiny)
    make_checkpoint(preset("tiny"), tmp_path / "one", seed=0)
    assert tensors(tmp_path / "one") == tensors(tiny), "the number of shards changed a value"
    make_checkpoint(preset("tiny"), tmp_path / "other", seed=1, shards=3)
    other, first = tensors(tmp_path / "other"), tensors(tiny)
    assert sum(other[name] != first[name] for name in first if name.endswith("attn.wkv.weight")) == 14


def test_another_process_makes_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    code = "import sys; from cedar.config.presets import preset; from cedar.model.make import make_checkpoint; "
    code += "make_checkpoint(preset('tiny'), sys.argv[1], seed=0, shards=3)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert digest(tmp_path / "x") == digest(tiny)


def test_initial_values_are_what_tests_of_the_network_need(tiny: Path) -> None:
    reader = CheckpointReader(tiny)
    assert not reader.read("layers.5.attn.attn_sink").any()
    assert (reader.read("layers.5.attn.q_norm.weight") == 1).all()
    base = reader.read("layers.5.hc_ffn_base")
    assert not base[:8].any()
    assert torch.equal(base[8:].view(4, 4), 2 * torch.eye(4))
    assert 0.05 < reader.read("layers.5.ffn.gate.bias").std() < 0.2, "selection must differ from the order of the weights"
    head = reader.read("head.weight").float()
    control = len(CONTROL_TOKENS)
    assert not head[:control].any(), "a special token could win"
    logits = torch.nn.functional.rms_norm(torch.randn(500, 64, generator=torch.Generator().manual_seed(0)), (64,)) @ head.T
    best = logits.topk(2, dim=-1).values
    assert best.min() > 2
    assert ((best[:, 0] - best[:, 1]) > 0.05).float().mean() > 0.9, "greedy choices are not clear of rounding"


def test_the_configuration_follows_the_tokenizer(tiny: Path) -> None:
    config, tokenizer = ModelConfig.load(tiny), Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == list(range(11))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.engram_pad_token_id) == (0, 1, 2, 2)
    assert config.image_token_id == tokenizer.token_to_id("<｜deepseek_image｜>")
    assert config.dspark_noise_token_id == tokenizer.token_to_id("<｜System｜>")
    assert tokenizer.get_vocab_size() == config.vocab_size, "an id without a token could be generated"
    rows = EngramHasher(config, TokenMap(tokenizer)).rows(np.arange(512).reshape(-1, 4))
    assert [int(values.max()) < size for values, size in zip(rows.values(), config.engram_num_embeddings, strict=True)] == [
        True,
        True,
    ]


TOKENIZERS = {vocab: make_tokenizer(vocab) for vocab in (267, 512, 4096)}


@settings(max_examples=200, deadline=None)
@given(text=st.text(), vocab=st.sampled_from(sorted(TOKENIZERS)))
def test_any_text_comes_back_from_its_tokens(text: str, vocab: int) -> None:
    tokenizer = TOKENIZERS[vocab]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(len(CONTROL_TOKENS) <= token < vocab for token in ids) or any(token in text for token in CONTROL_TOKENS)


def test_control_tokens_are_read_by_their_spelling() -> None:
    text = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    ids = TOKENIZERS[512].encode(text, add_special_tokens=False).ids
    assert [ids[0], ids[1], ids[-2], ids[-1]] == [0, 4, 5, 7]
    assert TOKENIZERS[512].decode(ids, skip_special_tokens=False) == text


def test_unused_ids_are_placeholders_that_decode_to_nothing() -> None:
    tokenizer = TOKENIZERS[4096]
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.decode([4095]) == ""
    assert len(tokenizer.encode("the river and the tree", add_special_tokens=False).ids) == 5, "words of the corpus are tokens"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vocab_size": 200}, "vocab_size"),
        ({"vocab_size": "512"}, "vocab_size"),
        ({"head_dim": 40}, "head_dim"),
        ({"engram_n_heads": "2"}, "engram_n_heads"),
        ({"engram_layer_ids": [9]}, "engram_layer_ids"),
    ],
)
def test_an_impossible_configuration_leaves_nothing_behind(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    config = preset("tiny")
    config["text_config"].update(change)
    with pytest.raises(CedarError, match=field):
        make_checkpoint(config, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_fit_the_disk_is_refused_before_writing(tmp_path: Path) -> None:
    config = preset("tiny")
    config["text_config"].update(engram_vocab_size=2 * 10**9)
    with pytest.raises(CedarError, match="bytes free; allowed: a disk with"):
        make_checkpoint(config, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_the_old_checkpoint(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(preset("tiny"), tmp_path / "x", seed=5)
    before = digest(tmp_path / "x")

    def stop(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(preset("tiny"), tmp_path / "x", force=True, progress=stop)
    assert digest(tmp_path / "x") == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_make_tiny_then_inspect_then_load(tmp_path: Path) -> None:
    out = tmp_path / "made"
    made = RUNNER.invoke(app, ["make-tiny", "--out", str(out), "--seed", "3", "--shards", "2"])
    assert made.exit_code == 0, made.output
    assert "cedar serve --model" in made.output
    seen = RUNNER.invoke(app, ["inspect", str(out), "--json"])
    report = json.loads(seen.output)
    assert report["check"] == {
        "complete": True,
        "shards": 2,
        "text_tensors": 980,
        "text_bytes": CheckpointReader(out).verify().text_bytes,
        "skipped": {"drafter": {"tensors": 115, "bytes": report["parts"]["drafter"]["bytes"]}},
    }
    assert report["kv_bytes_per_token"] == 140
    assert [layer["mode"] for layer in report["layers"]].count("reindex") == 2
    tables = RUNNER.invoke(app, ["inspect", str(out)])
    assert tables.exit_code == 0, tables.output
    for text in ("candidate source", "routed experts", "140 B", "--act-quant", "Complete: 980 text tensors"):
        assert text in tables.output


def test_make_tiny_takes_a_configuration_file(tmp_path: Path) -> None:
    config = preset("tiny")
    config["text_config"]["hidden_size"] = 96
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = RUNNER.invoke(app, ["make-tiny", "--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "out")])
    assert made.exit_code == 0, made.output
    assert ModelConfig.load(tmp_path / "out").hidden_size == 96


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "preset: is 'huge'"),
        (["--preset", "tiny", "--config", "x"], "--preset: is given together with --config"),
        (["--config", "/nowhere/config.json"], "--config: /nowhere/config.json cannot be read"),
    ],
)
def test_make_tiny_names_a_bad_argument(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["make-tiny", "--out", str(tmp_path / "x"), *arguments])
    assert isinstance(result.exception, CedarError)
    assert message in result.exception.message


def test_make_tiny_does_not_overwrite_unless_told_and_never_other_files(tmp_path: Path) -> None:
    out = tmp_path / "x"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for arguments in ([], ["--force"]):
        result = RUNNER.invoke(app, ["make-tiny", "--out", str(out), *arguments])
        assert isinstance(result.exception, CedarError)
    assert (out / "thesis.txt").read_text() == "mine"
    (out / "thesis.txt").unlink()
    for arguments, code in (([], 0), ([], 1), (["--force", "--seed", "1"], 0)):
        assert RUNNER.invoke(app, ["make-tiny", "--out", str(out), *arguments]).exit_code == code


def test_inspect_counts_the_release_without_weights() -> None:
    result = RUNNER.invoke(app, ["inspect", "--preset", "release"])
    assert result.exit_code == 0, result.output
    for text in ("96,085 tensors", "890 B", "2.70 MB", "288.78 GB", "21-23"):
        assert text in result.output
    rows = dict([cell.strip() for cell in line.split("│")[1:3]] for line in result.output.splitlines() if line.count("│") == 4)
    counts = [rows[name] for name in ("all of these", "vision tower, not served", "a complete checkpoint")]
    assert counts == ["95,819", "266", "96,085"]


def test_inspect_of_a_broken_checkpoint_shows_the_tables_and_fails(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(preset("tiny"), tmp_path / "x", shards=3)
    (tmp_path / "x" / "model-00002-of-00003.safetensors").unlink()
    result = RUNNER.invoke(app, ["inspect", str(tmp_path / "x")])
    assert isinstance(result.exception, CedarError)
    assert "absent shards" in result.exception.message
    assert "Layer schedule" in result.output
    assert "Not a complete checkpoint" in result.output


@pytest.mark.parametrize("arguments", [[], ["/nowhere"], ["somewhere", "--preset", "tiny"]])
def test_inspect_names_a_bad_argument(arguments: list[str]) -> None:
    assert isinstance(RUNNER.invoke(app, ["inspect", *arguments]).exception, CedarError)
