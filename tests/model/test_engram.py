# SPDX-License-Identifier: Apache-2.0
"""Token map, hashes and injection against the independent implementation and the published rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer

from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.errors import CedarError
from cedar.model.checkpoint import CheckpointReader
from cedar.model.engram import Engram, EngramHasher, TokenMap

NAMES = ["tiny-a", "tiny-b"]


def token_map(golden: Path, name: str) -> TokenMap:
    return TokenMap(Tokenizer.from_file(str(golden / name / "checkpoint" / "tokenizer.json")))


def hasher(golden: Path, name: str) -> EngramHasher:
    return EngramHasher(ModelConfig.load(golden / name / "checkpoint"), token_map(golden, name))


def units(golden: Path, name: str) -> dict[str, npt.NDArray[Any]]:
    return dict(np.load(golden / name / "units_engram.npz"))


def windows(ids: npt.NDArray[Any], n: int, fill: int) -> npt.NDArray[np.int64]:
    """[B, S] -> [B * S, n]: column s is the id s places back."""
    back = [np.pad(ids[:, : ids.shape[1] - s], ((0, 0), (s, 0)), constant_values=fill) for s in range(n)]
    return np.stack(back, -1, dtype=np.int64).reshape(-1, n)


def release_hasher(golden: Path) -> EngramHasher:
    """The released tokenizer is not ours to ship: an identity map of its size hashes already compressed ids."""
    identity = token_map(golden, "tiny-a")
    identity.ids, identity.size = np.arange(99092), 99092
    return EngramHasher(ModelConfig.from_dict(preset("release")), identity)


@pytest.mark.parametrize("name", NAMES)
def test_token_map_equals_the_golden_one(golden: Path, name: str) -> None:
    expected, mapped = units(golden, name), token_map(golden, name)
    assert np.array_equal(mapped.ids, expected["token_map"])
    assert mapped.size == ModelConfig.load(golden / name / "checkpoint").engram_compressed_vocab_size
    assert hasher(golden, name).pad == expected["pad_compressed_id"]


@pytest.mark.parametrize("name", NAMES)
def test_hash_constants_equal_the_golden_ones(golden: Path, name: str) -> None:
    ours, expected = hasher(golden, name), units(golden, name)
    for key in ("multipliers", "primes", "offsets"):
        assert np.array_equal(getattr(ours, key), expected[key])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_hashes_equal_the_golden_ones(golden: Path, name: str, masked: bool) -> None:
    ours, expected = hasher(golden, name), units(golden, name)
    ids = np.where(expected["token_mask"], expected["ids"], -1) if masked else expected["ids"]
    rows = ours.rows(windows(ids, ours.ngram, fill=-1))
    wanted = expected["hash_ids_masked" if masked else "hash_ids"]
    for place, layer in enumerate(ours.layers):
        assert np.array_equal(rows[layer].reshape(wanted[:, :, place].shape), wanted[:, :, place])


def test_release_constants_and_hashes_equal_the_golden_ones(golden: Path) -> None:
    ours, expected = release_hasher(golden), np.load(golden / "units_engram_release.npz")
    for key in ("multipliers", "primes", "offsets"):
        assert np.array_equal(getattr(ours, key), expected[key])
    rows = ours.hash(windows(expected["compressed_ids"], 4, fill=int(expected["pad_compressed_id"])))
    for place, layer in enumerate((1, 14)):
        assert np.array_equal(rows[layer], expected["hash_ids"][:, :, place].reshape(rows[layer].shape))


def test_release_rows_are_the_published_ones(golden: Path) -> None:
    ours = release_hasher(golden)
    assert ours.multipliers[0].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert ours.multipliers[1].tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    rows = ours.hash(windows(np.array([[5, 17, 99091, 42, 7]]), 4, fill=2))
    columns = (0, 7, 8, 15, 16, 23)
    expected = {
        (1, 0): [5412672, 127351390, 143494632, 247008214, 256353435, 372009279],
        (1, 4): [10635489, 123477372, 133503831, 251094404, 270906346, 369350854],
        (14, 0): [6939818, 119840903, 131576092, 243164617, 268363546, 382274687],
        (14, 4): [11305274, 123883017, 129105832, 250983343, 265479817, 383942274],
    }
    for (layer, position), values in expected.items():
        assert rows[layer][position, columns].tolist() == values


def test_rows_stay_inside_their_columns_buckets(golden: Path) -> None:
    ours = hasher(golden, "tiny-a")
    ids = np.random.default_rng(0).integers(0, 500, (4, 500))
    for place, rows in enumerate(ours.rows(windows(ids, ours.ngram, fill=-1)).values()):
        assert (rows >= ours.offsets[place]).all()
        assert (rows < ours.offsets[place] + ours.primes[place]).all()
        assert rows.max() < ModelConfig.load(golden / "tiny-a" / "checkpoint").engram_num_embeddings[place]


def test_nothing_is_seen_behind_a_missing_token(golden: Path) -> None:
    ours = hasher(golden, "tiny-a")
    pad = ours.pad
    first, second = ours.compress(np.array([[7, -1, 9, 11], [7, 8, 9, -1]]))
    assert first.tolist() == [ours.compress(np.array([[7]]))[0, 0], pad, pad, pad]
    assert second.tolist()[3] == pad
    assert pad not in second.tolist()[:3]


def test_an_id_without_a_token_hashes_as_padding(golden: Path) -> None:
    ours = hasher(golden, "tiny-a")
    assert ours.compress(np.array([[505, 7, 511, 9]]))[0].tolist()[::2] == [ours.pad, ours.pad]


def test_a_tokenizer_of_another_size_is_refused_by_field(golden: Path) -> None:
    config = ModelConfig.load(golden / "tiny-a" / "checkpoint")
    with pytest.raises(CedarError, match=r"engram_compressed_vocab_size: is 356; allowed: 321"):
        EngramHasher(config, token_map(golden, "tiny-b"))


def test_padding_beyond_the_tokenizer_is_refused_by_field(golden: Path) -> None:
    """The embedding may be larger than the tokenizer, so the config alone does not show it."""
    config, mapped = ModelConfig.load(golden / "tiny-a" / "checkpoint"), token_map(golden, "tiny-a")
    last = len(mapped.ids) - 1
    assert EngramHasher(config.model_copy(update={"engram_pad_token_id": last}), mapped).pad == mapped.ids[last]
    with pytest.raises(CedarError, match=rf"engram_pad_token_id: is {last + 1}; allowed: 0 to {last}"):
        EngramHasher(config.model_copy(update={"engram_pad_token_id": last + 1}), mapped)


@pytest.mark.parametrize("name", NAMES)
def test_injection_equals_the_golden_one(golden: Path, name: str) -> None:
    reader, expected = CheckpointReader(golden / name / "checkpoint"), units(golden, name)
    for place, layer in enumerate(reader.config.engram_layer_ids):
        module = Engram(reader.config, layer, torch.float32)
        module.load(reader.read, f"layers.{layer}.engram")
        rows = torch.from_numpy(expected["hash_ids"][0, :10, place].astype(np.int64))
        streams = torch.from_numpy(expected["inject_in"])
        torch.testing.assert_close(module(streams, rows), torch.from_numpy(expected[f"inject_out_{place}"]), atol=1e-5, rtol=1e-5)


def test_the_table_is_gathered_from_the_readers_bytes_without_a_copy(golden: Path) -> None:
    reader = CheckpointReader(golden / "tiny-a" / "checkpoint")
    module = Engram(reader.config, 1, torch.bfloat16)
    module.load(reader.read, "layers.1.engram")
    stored = reader.read("layers.1.engram.embed.weight")
    assert module.table.data_ptr() == stored.data_ptr()
    rows = torch.tensor([[0, 433, 7, 7, 1, 2]])
    spread = (2.0 ** (reader.read("layers.1.engram.embed.scale").int() - 127)).repeat_interleave(32, 1)
    assert torch.equal(module.gather(rows), (stored.float() * spread)[rows[0]].bfloat16().view(1, -1))
