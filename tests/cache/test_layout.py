# SPDX-License-Identifier: Apache-2.0
"""The promised bytes of the caches: sizes, offsets, and that none of them changes unnoticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cedar.cache.layout import LAYOUT_VERSION, GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import FloatRecords, RecordFormat, RecordPool, record_bytes
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.engine.budget import cache_formats

CPU = torch.device("cpu")
PACKED = [WindowRecords, GlobalRecords, IndexKeyRecords]
Packed = type[WindowRecords] | type[GlobalRecords] | type[IndexKeyRecords]

FROZEN = {
    1: {
        "window": "b4ad3ccab458df5673f278b4aa3ec90059de5a74f07ab3a63fc8345adc5d74ee7a",
        "global": "88801819e687080891617d88801019c63b3d",
        "index": (
            "88801809c586080891516c88801019c580080891f20d88801029cf80000892f3080880a0398e80000899e40008809048"
            "088080188a86000888a160088080180a80000889e403088890484e80800809d4000888a1710f8880181ae7800808a171"
            "08888010198d80080891d1080880101988800008a385080880b059888000189b"
            "8080818180808281"
        ),
    }
}
"""Records of `known_input`, and a block of index keys of it, by version. A change of these bytes needs a new `LAYOUT_VERSION`."""


def known_input(rows: int = 1) -> Tensor:
    """[rows, 32] of plain arithmetic, positive and negative, over 11 powers of two."""
    steps = (torch.arange(rows * 32) * 37 % 101 - 50).view(rows, 32)
    return steps / 16 * 2.0 ** (torch.arange(32) % 11 - 7)


def bits(x: Tensor) -> Tensor:
    """Compares signed zeros too."""
    return x.float().view(torch.int32)


def test_a_byte_changed_without_a_new_version() -> None:
    expected = FROZEN[LAYOUT_VERSION]
    x = known_input()
    assert WindowRecords(32).encode(x).numpy().tobytes().hex() == expected["window"]
    assert GlobalRecords(32).encode(x).numpy().tobytes().hex() == expected["global"]
    pool = RecordPool.allocate(IndexKeyRecords(32), 16, CPU)
    pool.store(pool.record.encode(known_input(8)), torch.arange(8, 16))
    assert pool.rows[8:].numpy().tobytes().hex() == expected["index"]


def test_the_release_takes_other_bytes_than_published() -> None:
    config = ModelConfig.from_dict(preset("release"))
    formats = cache_formats(config, torch.bfloat16, fake_quant=True)
    assert [record_bytes(record) for record in (formats.window, formats.kv, formats.index_key)] == [528, 288, 68]
    assert RecordPool.allocate(formats.index_key, 8, CPU).nbytes == 544
    entries = sum(1 / config.compress_ratios[source] for source in config.kv_source_layer_ids)
    assert entries * (288 + 68) == 890
    assert config.num_hidden_layers * config.sliding_window * 528 == pytest.approx(2.58 * 2**20, rel=1e-3)
    unpacked = cache_formats(config, torch.bfloat16, fake_quant=False)
    assert [record_bytes(record) for record in (unpacked.window, unpacked.kv, unpacked.index_key)] == [1024, 1024, 256]


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("record", "name", "codes"),
    [(WindowRecords(128), "fp8", "codes"), (GlobalRecords(128), "nvfp4", "packed"), (IndexKeyRecords(128), "mxfp4", "packed")],
)
def test_a_record_is_not_the_golden_codes_and_then_scales(
    golden: Path, record: RecordFormat, name: str, codes: str, kind: str
) -> None:
    units = np.load(golden / "units_quant.npz")
    x = torch.from_numpy(units["x_f32"])
    if kind == "bf16":
        x = torch.from_numpy(units["x_bf16bits"].view(np.int16)).view(torch.bfloat16)
    records = record.encode(x)
    assert records.shape == (24, record.width)
    expected = np.concatenate([units[f"{name}_{codes}_{kind}"], units[f"{name}_scale_bytes_{kind}"]], -1)
    np.testing.assert_array_equal(records.numpy(), expected)
    assert torch.equal(bits(record.decode(records)), bits(torch.from_numpy(units[f"{name}_dq_{kind}"])))


def test_a_nibble_or_a_scale_is_somewhere_else() -> None:
    x = torch.zeros(512)
    x[0], x[1], x[2], x[32], x[511] = 6.0, -6.0, 1.5, 48.0, -96.0
    key, entry, window = IndexKeyRecords(512).encode(x), GlobalRecords(512).encode(x), WindowRecords(512).encode(x)
    for record, count in ((key, 256 + 16), (entry, 256 + 32)):
        assert record.shape == (count,)
        assert record[:2].tolist() == [0xF7, 0x03]  # -6 over 6, 0 over 1.5
        assert record[16] == 0x07
        assert record[255] == 0xF0
        assert not record[2:16].any()
    assert key[256:258].tolist() == [127, 130]  # 1 and 8
    assert (key[258:271] == 1).all()  # zeros: 2^-126
    assert key[271] == 131
    assert entry[256:259].tolist() == [0x38, 0x01, 0x50]  # 1, the least scale, 8
    assert entry[287] == 0x58
    assert window.shape == (528,)
    assert window[:2].view(torch.float8_e4m3fn).tolist() == [384.0, -384.0]
    assert window[512:514].tolist() == [127 - 6, 127 - 3]
    assert window[511].item() == 0xFC  # -384
    assert window[527].item() == 127 - 2


@pytest.mark.parametrize("dim", [32, 64, 96, 512])
@pytest.mark.parametrize("kind", [*PACKED, None])
def test_zero_bytes_are_not_zeros(kind: Packed | None, dim: int) -> None:
    record: RecordFormat = FloatRecords(dim, torch.bfloat16) if kind is None else kind(dim)
    values = record.decode(torch.zeros(2, record.width, dtype=record.dtype))
    assert values.dtype == torch.float32
    assert not bits(values).any()
    assert not bits(record.decode(record.encode(torch.zeros(2, dim, dtype=torch.bfloat16)))).any()


@pytest.mark.parametrize("dim", [32, 64, 96, 512])
@pytest.mark.parametrize("kind", PACKED)
def test_batch_dimensions_change_a_record(kind: Packed, dim: int) -> None:
    record = kind(dim)
    x = torch.randn(3, 4, dim, generator=torch.Generator().manual_seed(dim))
    records = record.encode(x)
    assert records.dtype == torch.uint8
    assert records.shape == (3, 4, record.width)
    assert torch.equal(record.encode(x[1, 2]), records[1, 2])
    assert torch.equal(record.decode(records)[1, 2], record.decode(records[1, 2]))
    assert record.decode(records[:0]).shape == (0, 4, dim)
    assert torch.equal(record.decode(record.encode(x.bfloat16())), record.decode(record.encode(x.bfloat16().float())))


@pytest.mark.parametrize("record", [WindowRecords(512), GlobalRecords(512), IndexKeyRecords(128)])
@pytest.mark.parametrize("rows", [8, 24, 4096])
def test_a_pool_of_the_release_starts_off_16_bytes(record: RecordFormat, rows: int) -> None:
    pools = [RecordPool.allocate(record, rows, CPU) for _ in range(5)]
    assert all(pool.rows.data_ptr() % 16 == 0 for pool in pools)
    assert 8 * record_bytes(record) % 16 == 0
