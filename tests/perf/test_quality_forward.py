# SPDX-License-Identifier: Apache-2.0
"""The training forward is the engine's network: same logits, same quantisers, same hashes, same bytes after export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from perf.quality import fake
from perf.quality.hashing import EngramRows
from perf.quality.released import read_weights, write_weights
from perf.quality.train_model import TrainModel
from tokenizers import Tokenizer

from cedar.cache import formats
from cedar.config.engine import EngineConfig
from cedar.config.presets import preset
from cedar.engine.request import DecoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.score import score
from cedar.model.checkpoint import CheckpointReader
from cedar.model.engram import EngramHasher, TokenMap
from cedar.model.make import make_checkpoint
from cedar.model.quantize import dequantize_fp8_tiles, quantize_fp8_tiles

LENGTHS = (100, 60, 88)
"""Of documents of one row. The first is longer than the window, than top-k in both ratios and than the candidates."""
ROW = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "tiny"
    make_checkpoint(preset("tiny"), path, seed=3)
    return path


def _model(checkpoint: Path, *, fake_quant: bool, chunks: int) -> tuple[TrainModel, EngramRows, EngramHasher]:
    reader = CheckpointReader(checkpoint)
    model = TrainModel(reader.config, torch.float32, fake_quant=fake_quant, chunks=chunks)
    read_weights(model.weights, reader.read)
    token_map = TokenMap(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    hasher = EngramHasher(reader.config, token_map)
    return model, EngramRows(hasher, token_map, torch.device("cpu")), hasher


def _packed() -> tuple[list[list[int]], list[int], torch.Tensor, torch.Tensor]:
    """Documents, where each begins, and the row that holds them."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(11, 500, length).tolist() for length in LENGTHS]
    tokens, doc_start, starts, at = torch.zeros(1, ROW, dtype=torch.long), torch.zeros(1, ROW, dtype=torch.long), [], 0
    for document in documents:
        tokens[0, at : at + len(document)], doc_start[0, at:] = torch.tensor(document), at
        starts.append(at)
        at = -(-(at + len(document)) // 8) * 8
    return documents, starts, tokens, doc_start


def _engine(checkpoint: Path, *, fake_quant: bool) -> ModelRunner:
    settings = EngineConfig(
        model=str(checkpoint),
        ops="reference",
        device="cpu",
        dtype="float32",
        fake_quant=fake_quant,
        cpu_threads=1,
        kv_cache_bytes=1 << 27,
    )
    return ModelRunner.load(settings)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("fake_quant", [False, True])
def test_training_forward_computes_another_network_than_the_engine(checkpoint: Path, fake_quant: bool, chunks: int) -> None:
    """Each document of a packed row has the logits that the engine gives it alone, selection and candidates included."""
    runner = _engine(checkpoint, fake_quant=fake_quant)
    model, engram_rows, _ = _model(checkpoint, fake_quant=fake_quant, chunks=chunks)
    documents, starts, tokens, doc_start = _packed()
    with torch.no_grad():
        hidden, _, _ = model(tokens, doc_start, engram_rows(tokens, doc_start), sparse=True, weight_quant=False)
        logits = model.logits(hidden).numpy()
    for document, start in zip(documents, starts, strict=True):
        expected = score(runner, document, chunk_size=64, decoder_replay=DecoderReplay.OFF)
        np.testing.assert_allclose(logits[start : start + len(document)], expected, atol=1e-4, rtol=0)


def test_selection_or_candidates_do_nothing_in_the_training_forward(checkpoint: Path) -> None:
    """The comparison above would say nothing about them otherwise."""
    model, engram_rows, _ = _model(checkpoint, fake_quant=False, chunks=1)
    _, _, tokens, doc_start = _packed()

    def hidden(*, sparse: bool) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = model(tokens, doc_start, engram_rows(tokens, doc_start), sparse=sparse, weight_quant=False)[0]
        return out

    selected = hidden(sparse=True)
    assert (hidden(sparse=False) - selected).abs().max() > 1e-2
    model.config = model.config.model_copy(update={"candidate_topk_blocks": 1000})
    assert (hidden(sparse=True) - selected).abs().max() > 1e-3


def test_engram_rows_of_a_packed_row_depend_on_another_document(checkpoint: Path) -> None:
    _, engram_rows, hasher = _model(checkpoint, fake_quant=True, chunks=1)
    documents, starts, tokens, doc_start = _packed()
    found = engram_rows(tokens, doc_start)
    for document, start in zip(documents, starts, strict=True):
        ids = np.array(document)
        window = np.stack([np.r_[np.full(s, -1), ids[: len(ids) - s]] for s in range(hasher.ngram)], axis=1)
        for layer, rows in hasher.rows(window).items():
            np.testing.assert_array_equal(found[layer][start : start + len(ids)].numpy(), rows)


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4, 0.0])
def test_a_fake_quantiser_gives_what_packing_and_unpacking_does_not(size: float) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(480, 128, generator=random) * size * torch.randn(480, 1, generator=random).exp()
    assert torch.equal(fake.fp8_groups(x), formats.unpack_fp8(*formats.pack_fp8(x)))
    assert torch.equal(fake.mxfp4(x), formats.unpack_mxfp4(*formats.pack_mxfp4(x)))
    assert torch.equal(fake.nvfp4(x), formats.unpack_nvfp4(*formats.pack_nvfp4(x)))
    assert torch.equal(fake.fp8_tiles(x), dequantize_fp8_tiles(*quantize_fp8_tiles(x), torch.float32))


def test_export_writes_other_weights_than_the_last_phase_trained_with(checkpoint: Path, tmp_path: Path) -> None:
    """What the quantised phase sees is what a reader of the exported files gets, for every tensor."""
    model, _, _ = _model(checkpoint, fake_quant=True, chunks=1)
    random = torch.Generator().manual_seed(1)
    for _, value in model.weights.named():
        value.data.add_(torch.randn(value.shape, generator=random) * 0.1 * value.detach().abs().mean())
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    write_weights(model.weights, tmp_path, shard_bytes=1 << 20)
    reader = CheckpointReader(tmp_path)
    reader.verify()
    assert len(reader.shards) > 1
    again = TrainModel(reader.config).weights
    read_weights(again, reader.read)
    for name, value in again.named():
        torch.testing.assert_close(value.detach(), model.weights.stored(name), rtol=0, atol=0, msg=name)


def test_a_straight_through_quantiser_stops_the_gradient() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    out = fake.straight_through(x, fake.mxfp4(x.detach()))
    assert not torch.equal(out, x)
    (out * 3).sum().backward()
    assert x.grad is not None
    assert (x.grad == 3).all()
