# SPDX-License-Identifier: Apache-2.0
"""The strict loader: exact values, every defect named, all defects at once, and one copy of the weights in memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cedar.cache.formats import unpack_fp8
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.errors import CedarError, ErrorCode
from cedar.model.checkpoint import INDEX, SINGLE, CheckpointReader, load_weights
from cedar.model.layout import RELEASE_TENSORS, count_tensors, expected_tensors
from cedar.model.linear import Reader
from cedar.model.make import make_checkpoint
from cedar.model.quantize import dequantize_fp8_tiles, dequantize_mxfp4_rows

NAMES = ["tiny-a", "tiny-b"]
Header = dict[str, Any]


class Everything:
    """Takes every text tensor once, as a whole model does."""

    def __init__(self, config: ModelConfig, leave_out: str = "") -> None:
        self.names = [name for name in expected_tensors(config, drafter=False) if name != leave_out]
        self.shapes: dict[str, tuple[int, ...]] = {}

    def load(self, read: Reader, prefix: str) -> None:
        for name in self.names:
            self.shapes[name] = tuple(read(prefix + name).shape)


def test_the_release_layout_has_the_published_number_of_tensors() -> None:
    config = ModelConfig.from_dict(preset("release"))
    assert count_tensors(config) == RELEASE_TENSORS == 96_085
    specs = expected_tensors(config)
    assert sum(spec.nbytes for spec in specs.values() if spec.part == "Engram tables") == sum(config.engram_num_embeddings) * 264
    expert = [spec.nbytes for name, spec in specs.items() if name.startswith("layers.7.ffn.experts.11.")]
    assert (len(expert), sum(expert)) == (6, 18_800_640)
    assert specs["layers.20.attn.wo_a.weight"].shape == (8192, 4096)
    assert specs["layers.14.engram.wkv.scale"].shape == (800, 192)
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert specs["mtp.2.confidence_head.proj.weight"].shape == (1, 5376)


@pytest.mark.parametrize("name", NAMES)
def test_loaded_values_equal_the_golden_sums(golden: Path, name: str) -> None:
    directory = golden / name / "checkpoint"
    reader = CheckpointReader(directory)
    checks = json.loads((directory / "weights_check.json").read_text())
    assert {key for key in reader.entries if not key.endswith(".scale")} == set(checks)
    for key, check in checks.items():
        value, scale = reader.read(key), key.removesuffix("weight") + "scale"
        if "engram.embed" in key:
            value = unpack_fp8(value.view(torch.uint8), reader.read(scale))
        elif value.dtype == torch.float8_e4m3fn:
            value = dequantize_fp8_tiles(value, reader.read(scale), torch.float32)
        elif value.dtype == torch.uint8:
            value = dequantize_mxfp4_rows(value, reader.read(scale), torch.float32)
        assert list(value.shape) == check["logical_shape"], key
        assert value.double().sum().item() == pytest.approx(check["sum"], rel=1e-5, abs=1e-4), key
        assert value.double().abs().sum().item() == pytest.approx(check["abs_sum"], rel=1e-6), key
        assert value.flatten()[:4].tolist() == pytest.approx(check["first4"], rel=1e-6), key


@pytest.mark.parametrize("name", NAMES)
def test_a_good_checkpoint_is_verified_and_tells_what_is_skipped(golden: Path, name: str) -> None:
    reader = CheckpointReader(golden / name / "checkpoint")
    result = reader.verify()
    assert result.text_tensors + result.drafter_tensors == len(reader.entries)
    assert result.skipped["drafter"][0] == result.drafter_tensors
    assert "vision" not in result.skipped


def rewrite(path: Path, change: Callable[[Header], None]) -> None:
    """Change a shard's header; the data stays."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def renamed(old: str, new: str) -> Callable[[Header], None]:
    return lambda header: header.update({new: header.pop(old)})


def edited(name: str, **fields: Any) -> Callable[[Header], None]:
    return lambda header: header[name].update(fields)


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden / "tiny-a" / "checkpoint", tmp_path / "copy", copy_function=shutil.copy))


SINK, WKV, EXPERT = "layers.3.attn.attn_sink", "layers.3.attn.wkv.weight", "layers.0.ffn.experts.0.w1.weight"
DEFECTS = [
    (renamed(SINK, "mtp.0.x"), ["1 missing tensors:", SINK, "1 unexpected tensors:", "mtp.0.x"]),
    (renamed(SINK, "layers.30.attn.attn_sink"), ["1 missing tensors:", "1 unexpected tensors:", "layers.30.attn.attn_sink"]),
    (edited(SINK, shape=[2, 2]), ["1 tensors of a wrong shape:", f"{SINK}: is [2, 2]; allowed: [4]"]),
    (edited(WKV, dtype="I8"), ["1 tensors of a wrong type:", f"{WKV}: is I8; allowed: F8_E4M3"]),
    (edited(WKV.replace("weight", "scale"), dtype="U8"), [f"{WKV.replace('weight', 'scale')}: is U8; allowed: F8_E8M0"]),
    (edited(EXPERT, dtype="U8"), [f"{EXPERT}: is U8; allowed: I8"]),
    (edited("mtp.0.attn.attn_sink", shape=[2, 2]), ["mtp.0.attn.attn_sink: is [2, 2]; allowed: [4]"]),
    (edited(SINK, shape=[5]), ["unreadable shards", f"{SINK} has 16 bytes, which is not F32 [5]"]),
    (edited(SINK, data_offsets=[0]), ["unreadable shards", "header cannot be read"]),
    (edited(SINK, shape=["4"]), ["unreadable shards", "header cannot be read"]),
    (edited(SINK, data_offsets=[10**9, 10**9 + 16]), ["unreadable shards", "is truncated"]),
]


@pytest.mark.parametrize(("change", "messages"), DEFECTS, ids=[messages[-1][:60] for _, messages in DEFECTS])
def test_a_defect_is_named(copy: Path, change: Callable[[Header], None], messages: list[str]) -> None:
    rewrite(copy / SINGLE, change)
    with pytest.raises(CedarError) as caught:
        CheckpointReader(copy).verify()
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(copy) in caught.value.message
    for message in messages:
        assert message in caught.value.message


def test_all_defects_are_listed_at_once_and_long_lists_are_counted(copy: Path) -> None:
    def change(header: Header) -> None:
        for expert in range(8):
            for part in ("w1", "w2", "w3"):
                renamed(f"layers.0.ffn.experts.{expert}.{part}.weight", f"layers.0.ffn.experts.{expert}.{part}.qweight")(header)
        edited(SINK, shape=[2, 2])(header)
        edited("norm.weight", dtype="F16")(header)

    rewrite(copy / SINGLE, change)
    with pytest.raises(CedarError) as caught:
        CheckpointReader(copy).verify()
    message = caught.value.message
    for part in ("24 missing tensors:", "24 unexpected tensors:", "wrong shape:", "wrong type:", "norm.weight: is F16"):
        assert part in message
    assert message.count("… and 4 more") == 2


@pytest.mark.parametrize("size", [0, 5, 1000])
def test_a_cut_header_is_named(copy: Path, size: int) -> None:
    (copy / SINGLE).write_bytes((copy / SINGLE).read_bytes()[:size])
    with pytest.raises(CedarError, match="unreadable shards"):
        CheckpointReader(copy).verify()


def test_a_truncated_shard_is_named_with_its_sizes(copy: Path) -> None:
    size = (copy / SINGLE).stat().st_size
    (copy / SINGLE).write_bytes((copy / SINGLE).read_bytes()[:-1])
    with pytest.raises(CedarError, match=rf"{SINGLE}: is truncated: {size - 1} bytes, its header needs {size}"):
        CheckpointReader(copy).verify()


def test_a_directory_without_weights_is_named(copy: Path) -> None:
    (copy / SINGLE).unlink()
    with pytest.raises(CedarError, match=r"1 absent shards:\n  model\.safetensors"):
        CheckpointReader(copy).verify()


def test_vision_tensors_are_skipped_and_reported(copy: Path) -> None:
    names = ["vision.patch.weight", "aligner.w1.weight", "image_start"]

    def add(header: Header) -> None:
        for name in names:
            header[name] = {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}

    rewrite(copy / SINGLE, add)
    reader = CheckpointReader(copy)
    assert reader.verify().skipped["vision"] == (3, 48)
    module = Everything(reader.config)
    load_weights(module, copy)
    assert not set(names) & set(module.shapes)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded") / "tiny"
    make_checkpoint(preset("tiny"), directory, shards=4)
    return directory


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def change_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_absent_shards_are_named_and_their_tensors_are_not_read(shards: Path) -> None:
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    assert len(names) == 4
    for name in names[1:3]:
        (shards / name).unlink()
    with pytest.raises(CedarError) as caught:
        CheckpointReader(shards).verify()
    assert "2 absent shards:" in caught.value.message
    assert all(name in caught.value.message for name in names[1:3])
    assert "missing tensors" not in caught.value.message, "tensors of an absent shard are not missing a second time"


def test_defects_of_files_and_of_tensors_are_listed_together(shards: Path) -> None:
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    (shards / names[1]).unlink()
    (shards / names[3]).write_bytes((shards / names[3]).read_bytes()[:-1])
    rewrite(shards / names[0], edited("embed.weight", shape=[256, 128]))
    rewrite(shards / names[0], renamed("layers.0.attn.attn_sink", "layers.0.attn.sink"))
    with pytest.raises(CedarError) as caught:
        load_weights(Everything(ModelConfig.load(shards)), shards)
    parts = (
        "1 absent shards:",
        "1 unreadable shards:",
        "1 missing tensors:",
        "1 tensors of a wrong shape:",
        "1 unexpected tensors:",
    )
    for part in parts:
        assert part in caught.value.message


def test_a_shard_outside_the_directory_is_refused(shards: Path) -> None:
    change_index(shards, lambda weight_map: weight_map.update({"norm.weight": "../copy/model-00001-of-00004.safetensors"}))
    with pytest.raises(CedarError, match="no file name"):
        CheckpointReader(shards).verify()


def test_an_index_that_disagrees_with_the_shards_is_named(shards: Path) -> None:
    def change(weight_map: dict[str, str]) -> None:
        first, last = weight_map["embed.weight"], weight_map["mtp.1.norm.weight"]
        assert first != last
        weight_map["embed.weight"] = last
        del weight_map["norm.weight"]

    change_index(shards, change)
    with pytest.raises(CedarError) as caught:
        CheckpointReader(shards).verify()
    assert "tensors that the index places wrongly:\n  embed.weight: not in model-00004" in caught.value.message
    assert "tensors that the index does not list:\n  norm.weight" in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"norm.weight": 1}}'])
def test_an_unreadable_index_is_named(shards: Path, text: str) -> None:
    (shards / INDEX).write_text(text)
    with pytest.raises(CedarError, match=r"model\.safetensors\.index\.json: needs an object weight_map"):
        CheckpointReader(shards).verify()


def test_a_tensor_in_two_shards_is_named(shards: Path) -> None:
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    entry = CheckpointReader(shards).shards[names[0]].entries["embed.weight"]
    extra = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [0, entry.nbytes]}
    rewrite(shards / names[1], lambda header: header.update({"embed.weight": extra}))
    with pytest.raises(CedarError, match=rf"tensors in two shards:\n  embed.weight: {names[0]}, {names[1]}"):
        CheckpointReader(shards).verify()


def test_a_misaligned_tensor_is_read_all_the_same(copy: Path) -> None:
    before = CheckpointReader(copy).read(SINK).clone()
    raw = (copy / SINGLE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    padding = b" " * (3 - length % 4 + 4)
    (copy / SINGLE).write_bytes((length + len(padding)).to_bytes(8, "little") + raw[8 : 8 + length] + padding + raw[8 + length :])
    reader = CheckpointReader(copy)
    assert reader.entries[SINK].begin % 4
    assert torch.equal(reader.read(SINK), before)


def test_progress_counts_the_text_models_bytes(golden: Path) -> None:
    directory = golden / "tiny-a" / "checkpoint"
    seen: list[tuple[int, int]] = []
    config = ModelConfig.load(directory)
    result = load_weights(Everything(config), directory, progress=lambda done, total, name: seen.append((done, total)))
    assert seen[-1] == (result.text_bytes, result.text_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    entries = CheckpointReader(directory).entries
    assert result.text_bytes == sum(entries[name].nbytes for name in expected_tensors(config, drafter=False))


def test_a_module_that_forgets_a_tensor_is_an_internal_error(golden: Path) -> None:
    directory = golden / "tiny-a" / "checkpoint"
    with pytest.raises(CedarError, match=rf"1 tensors were not loaded, the first is {SINK}") as caught:
        load_weights(Everything(ModelConfig.load(directory), leave_out=SINK), directory)
    assert caught.value.code is ErrorCode.INTERNAL


def test_views_stay_valid_after_their_pages_are_given_back(golden: Path) -> None:
    reader = CheckpointReader(golden / "tiny-a" / "checkpoint")
    view = reader.read("embed.weight")
    before = view.clone()
    reader.release()
    assert torch.equal(view, before)
    del reader
    assert torch.equal(view, before)


PEAK = """
import sys, torch
from pathlib import Path
from cedar.config.model import ModelConfig
from cedar.model.checkpoint import load_weights
from cedar.model.transformer import Transformer

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

torch.set_num_threads(1)
config = ModelConfig.load(sys.argv[1])
torch.randn(64, 64) @ torch.randn(64, 64)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
model = Transformer(config, torch.float32)
load_weights(model, sys.argv[1])
loaded = sum(p.numel() * p.element_size() for p in model.parameters())
print(loaded, status("VmHWM") - before)
"""


def test_loading_peaks_below_1_2_times_the_loaded_size(tmp_path: Path) -> None:
    """The growth of the peak resident set (VmHWM, reset before) against the parameters' bytes.

    Mapped pages of the file count in full, although the kernel could drop them at any time. Engram tables are not part of
    the loaded size: they stay mapped.
    """
    data = preset("small")
    data["text_config"].update(vocab_size=32768, hidden_size=512, moe_intermediate_size=512, engram_vocab_size=40000)
    make_checkpoint(data, tmp_path / "big", shards=3)
    size = sum(file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors"))
    assert size > 200e6
    command = [sys.executable, "-c", PEAK, str(tmp_path / "big")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    loaded, peak = map(int, run.stdout.split())
    assert loaded > 400e6
    assert 0.9 * loaded < peak < 1.2 * loaded
