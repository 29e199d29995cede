# SPDX-License-Identifier: Apache-2.0
"""Window and compressed records that the library writes, byte for byte where the input of the encoder is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import DTYPES, assert_close, assert_rows_alone, run_native, seeded, tolerance
from torch import Tensor

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import FloatRecords, RecordFormat, RecordPool
from cedar.cache.rows import WindowPlan, WritePlan
from cedar.ops.compress import CompressorWeights, compress_store
from cedar.ops.window import window_store

DIM, INDEX_DIM, PAIRS = 96, 64, 16
CPU = torch.device("cpu")
SPECIAL = [0.0, -0.0, 1e-30, 1e-12, 6.1e-5, 0.25, 0.75, 1.75, 2.5, 3.5, 5.0, 448.0, 449.0, 1e4, 3e38]


def vectors(rows: int, dim: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of all sizes, halves between codes among them."""
    x = torch.randn(rows, dim, generator=generator) * 10.0 ** torch.randint(-6, 5, (rows, 1), generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (rows, dim), generator=generator)]
    signs = torch.randint(0, 2, (rows, dim), generator=generator) * 2 - 1
    return torch.where(torch.rand(rows, dim, generator=generator) < 0.3, special * signs, x).to(dtype)


def still(rows: int) -> tuple[Tensor, Tensor]:
    """No rotary dimensions: even a rotation by 0 may change the sign of a zero."""
    return torch.ones(rows, 0), torch.zeros(rows, 0)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES), st.sampled_from(["window", "global", "index"]))
def test_the_encoders_write_other_bytes(seed: int, dtype: torch.dtype, kind: str) -> None:
    """A norm that changes nothing leaves the encoder: rows of one magnitude have an RMS of 1, and its weight undoes the rest."""
    g = seeded(seed)
    rows = 6
    record: RecordFormat = {"window": WindowRecords(DIM), "global": GlobalRecords(DIM), "index": IndexKeyRecords(DIM)}[kind]
    x = torch.randint(0, 2, (rows, DIM), generator=g).mul_(2).sub_(1).to(dtype)
    weight = vectors(1, DIM, torch.float32, g)[0].to(dtype).float()
    assert torch.equal(stored_records(x, weight, record, kind), record.encode((x.float() * weight).to(dtype)))


def window_plan(rows: int, history: int, kept: int, generator: torch.Generator) -> WindowPlan:
    places = 1 + torch.randperm(39, generator=generator)
    if history == 0:
        return WindowPlan(None, None, places[:rows].contiguous())
    return WindowPlan(
        torch.cat([torch.zeros(1, dtype=torch.int64), places[: history - 1]]),
        torch.randperm(rows, generator=generator)[:kept].sort().values,
        places[:kept].contiguous(),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 9), st.data(), st.sampled_from(DTYPES), st.booleans())
def test_the_rings_differ_from_the_reference(
    rows: int, history: int, data: st.DataObject, dtype: torch.dtype, packed: bool
) -> None:
    kept = data.draw(st.integers(0, rows))
    g = seeded(rows + history)
    record: RecordFormat = WindowRecords(DIM) if packed else FloatRecords(DIM, dtype)
    rings = [RecordPool.allocate(record, 40, CPU) for _ in range(2)]
    old = record.encode(torch.randn(39, DIM, generator=g).to(dtype))
    for ring in rings:
        ring.store(old, torch.arange(1, 40))
    plan = window_plan(rows, history, kept, g)
    kv, weight, angle = (
        torch.randn(rows, DIM, generator=g).to(dtype),
        torch.rand(DIM, generator=g),
        torch.randn(rows, PAIRS, generator=g),
    )
    arguments = (kv, weight, 1e-20, angle.cos(), angle.sin())
    table, staged = run_native(window_store, *arguments, rings[0], plan)
    expected_table, expected_staged = window_store(*arguments, rings[1], plan)
    pairs = ((staged, expected_staged), (table, expected_table), (rings[0].rows, rings[1].rows))
    for one, other in pairs:
        if packed:  # a rotation that is rounded the other way may land on the next code
            assert ((one != other).float().mean() < 2e-3).item()
        assert_close(record.decode(one), record.decode(other), 2e-2 if packed else tolerance(dtype))
    assert (table is rings[0].rows) == (plan.history is None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_record_depends_on_its_batch(dtype: torch.dtype) -> None:
    g = seeded(2)
    kv, weight, angle = vectors(21, DIM, dtype, g), torch.rand(DIM, generator=g), torch.randn(21, PAIRS, generator=g)
    ring = RecordPool.allocate(WindowRecords(DIM), 40, CPU)

    def run(part: slice) -> list[Tensor]:
        plan = WindowPlan(None, None, torch.arange(1, 22)[part])
        return [run_native(window_store, kv[part], weight, 1e-20, angle.cos()[part], angle.sin()[part], ring, plan)[1]]

    assert_rows_alone(run, 21)


def compressed(
    ratio: int, dtype: torch.dtype, packed: bool, native: bool, split: int | None = None, seed: int = 0
) -> tuple[RecordPool, RecordPool, Tensor | None]:
    """Both pools and the open rows after 24 tokens of one sequence, whole or cut at ``split``."""
    g = seeded(seed)
    tokens = 24
    kinds: tuple[RecordFormat, RecordFormat] = (GlobalRecords(DIM), IndexKeyRecords(INDEX_DIM))
    if not packed:
        kinds = (FloatRecords(DIM, dtype), FloatRecords(INDEX_DIM, dtype))
    pools = tuple(RecordPool.allocate(record, 32, CPU) for record in kinds)
    projected = torch.randn(tokens, ratio * DIM, generator=g).to(dtype if ratio == 1 else torch.float32)
    weights = CompressorWeights(
        torch.rand(DIM, generator=g),
        torch.randn(INDEX_DIM, DIM, generator=g).to(dtype),
        torch.rand(INDEX_DIM, generator=g),
        1e-20,
    )
    angle = torch.randn(tokens // ratio, PAIRS, generator=g)
    open_rows = torch.full((3, 2 * DIM), torch.nan) if ratio == 2 else None
    for start, end in [(0, tokens)] if split is None else [(0, split), (split, tokens)]:
        groups = torch.arange(start // ratio, end // ratio)
        write = WritePlan(None, 1 + groups, groups * ratio)
        if ratio == 2:
            from_open = [1] if start % 2 else []
            first = [n if n == 0 and from_open else len(from_open) + 2 * g - start for n, g in enumerate(groups.tolist())]
            write = WritePlan(
                groups * 2 + 1 - start,
                1 + groups,
                groups * 2,
                torch.tensor(first, dtype=torch.int64),
                torch.tensor(from_open) if from_open else None,
                torch.tensor([end - 1 - start]) if end % 2 else None,
                torch.tensor([1]) if end % 2 else None,
            )
        part = slice(start // ratio, end // ratio)
        arguments = (projected[start:end], open_rows, write, weights, angle.cos()[part], angle.sin()[part], *pools)
        run_native(compress_store, *arguments) if native else compress_store(*arguments)
    return (*pools, open_rows)  # type: ignore[return-value]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_entries_differ_from_the_reference(ratio: int, dtype: torch.dtype, packed: bool) -> None:
    actual, expected = (compressed(ratio, dtype, packed, native) for native in (True, False))
    for one, other in zip(actual[:2], expected[:2], strict=True):
        assert isinstance(one, RecordPool)
        assert isinstance(other, RecordPool)
        rows = torch.arange(32)
        decoded = (one.record.decode(one.load(rows)), other.record.decode(other.load(rows)))
        if packed:
            assert ((decoded[0] != decoded[1]).float().mean() < (5e-3 if dtype is torch.float32 else 5e-2)).item()
        assert_close(*decoded, 0.1 if packed else 2 * tolerance(dtype))


@pytest.mark.parametrize("split", range(1, 24))
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_split_changes_an_entry(ratio: int, split: int) -> None:
    whole, parts = compressed(ratio, torch.float32, True, True), compressed(ratio, torch.float32, True, True, split)
    for one, other in zip(whole[:2], parts[:2], strict=True):
        assert isinstance(one, RecordPool)
        assert isinstance(other, RecordPool)
        assert torch.equal(one.rows, other.rows)
        assert (one.rows != 0).any()


@pytest.mark.parametrize("native", [True, False])
def test_a_masked_group_or_row_is_stored(native: bool) -> None:
    g = seeded(7)
    pools = RecordPool.allocate(GlobalRecords(DIM), 16, CPU), RecordPool.allocate(IndexKeyRecords(INDEX_DIM), 16, CPU)
    rows = torch.arange(4)
    slots, to = torch.tensor([3, -1, 5, -1]), torch.tensor([-1, 2, -1, 4])
    write = WritePlan(rows, slots, rows, rows, torch.tensor([1, 2, 3, 4]), rows, to, masked=True)
    projected, open_rows = torch.randn(4, 2 * DIM, generator=g), torch.randn(5, 2 * DIM, generator=g)
    before = open_rows.clone()
    weights = CompressorWeights(torch.ones(DIM), torch.randn(INDEX_DIM, DIM, generator=g), torch.ones(INDEX_DIM), 1e-20)
    arguments = (projected, open_rows, write, weights, torch.ones(4, PAIRS), torch.zeros(4, PAIRS), *pools)
    run_native(compress_store, *arguments) if native else compress_store(*arguments)
    assert [n for n in range(5) if not torch.equal(open_rows[n], before[n])] == [2, 4]
    assert torch.equal(open_rows[[2, 4]], projected[[1, 3]])
    for pool in pools:
        stored = pool.load(torch.arange(16)) != 0
        assert stored.any(1).nonzero()[:, 0].tolist() == [3, 5]


def test_no_group_ends_and_the_open_row_is_lost() -> None:
    pools = RecordPool.allocate(GlobalRecords(DIM), 8, CPU), RecordPool.allocate(IndexKeyRecords(INDEX_DIM), 8, CPU)
    none = torch.zeros(0, dtype=torch.int64)
    write = WritePlan(none, none, none, none, None, torch.tensor([0]), torch.tensor([2]))
    projected, open_rows = torch.randn(1, 2 * DIM), torch.zeros(3, 2 * DIM)
    weights = CompressorWeights(torch.ones(DIM), torch.zeros(INDEX_DIM, DIM), torch.ones(INDEX_DIM), 1e-20)
    run_native(compress_store, projected, open_rows, write, weights, torch.zeros(0, PAIRS), torch.zeros(0, PAIRS), *pools)
    assert torch.equal(open_rows[2], projected[0])
    assert all((pool.rows == 0).all() for pool in pools)
    assert replace(write, open_to=None) != write


def test_a_nan_becomes_a_zero() -> None:
    """A NaN in a latent spreads over its whole row; the entry, its key and its window record all have to tell."""
    records: list[RecordFormat] = [GlobalRecords(64), IndexKeyRecords(64), WindowRecords(64)]
    pools = [RecordPool.allocate(record, 8, CPU) for record in records]
    weights = CompressorWeights(torch.ones(64), torch.eye(64), torch.ones(64), 1e-6)
    x = torch.randn(3, 64, generator=seeded(1))
    x[1, 5] = torch.nan
    write = WritePlan(None, torch.arange(1, 4), torch.arange(3))
    angle = torch.ones(3, 2), torch.zeros(3, 2)
    run_native(compress_store, x, None, write, weights, *angle, *pools[:2])
    run_native(window_store, x, torch.ones(64), 1e-6, *angle, pools[2], WindowPlan(None, None, write.slots))
    for pool in pools:
        stored = pool.record.decode(pool.load(write.slots))
        assert stored[1].isnan().all()
        assert stored[[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["window", "global", "index"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_that_is_not_finite_is_encoded_otherwise(dtype: torch.dtype, kind: str, value: float) -> None:
    """Byte for byte as the reference, which promises: FP8 (window) and MXFP4 (index keys) make the group of a NaN or an infinity
    NaNs; NVFP4 (entries) that of a NaN, and keeps an infinity as its largest value, beside zeros. Other groups are as ever.
    """
    record: RecordFormat = {"window": WindowRecords(DIM), "global": GlobalRecords(DIM), "index": IndexKeyRecords(DIM)}[kind]
    size = 16 if kind == "global" else 32
    x, weight = torch.ones(2, DIM, dtype=dtype), torch.linspace(0.5, 3.0, DIM).to(dtype).float()
    x[1] = -1
    broken = weight.clone()
    broken[size + 3] = value
    stored = stored_records(x, broken, record, kind)
    assert torch.equal(stored, record.encode((x.float() * broken).to(dtype)))
    decoded, finite = record.decode(stored), record.decode(record.encode((x.float() * weight).to(dtype)))
    group = slice(size, 2 * size)
    if kind == "global" and abs(value) == torch.inf:
        assert decoded[0, size + 3] == math.copysign(2688.0, value)
        finite[:, group] = 0
        finite[:, size + 3] = decoded[:, size + 3]
        assert torch.equal(decoded, finite)
    else:
        assert decoded[:, group].isnan().all()
        decoded[:, group] = finite[:, group]
        assert torch.equal(decoded, finite)


def stored_records(x: Tensor, weight: Tensor, record: RecordFormat, kind: str) -> Tensor:
    """Records of x [T, DIM], whose rows have an RMS of 1, times weight [DIM]."""
    rows, dtype = len(x), x.dtype
    pool, slots = RecordPool.allocate(record, 16, CPU), torch.arange(1, 1 + rows)
    if kind == "window":
        _, staged = run_native(window_store, x, weight, 0.0, *still(rows), pool, WindowPlan(None, None, slots))
        assert torch.equal(staged, pool.load(slots))
    else:
        other = RecordPool.allocate(FloatRecords(DIM, dtype), 16, CPU)
        norms = (weight, torch.ones(DIM)) if kind == "global" else (torch.ones(DIM), weight)
        weights = CompressorWeights(norms[0], torch.eye(DIM).to(dtype), norms[1], 0.0)
        pools = (pool, other) if kind == "global" else (other, pool)
        run_native(compress_store, x, None, WritePlan(None, slots, slots), weights, *still(rows), *pools)
    assert (pool.load(torch.tensor([0, *range(1 + rows, 16)])) == 0).all()
    return pool.load(slots)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("history", -1, "at least 0 and less than 40"),
        ("history", 40, "at least 0 and less than 40"),
        ("store_from", -1, "at least 0 and less than 5"),
        ("store_from", 5, "at least 0 and less than 5"),
        ("store_to", 0, "at least 1 and less than 40"),
        ("store_to", -(2**63), "at least 1 and less than 40"),
        ("store_to", 2**63 - 1, "at least 1 and less than 40"),
    ],
)
def test_a_row_outside_of_the_rings_is_read_or_written(field: str, value: int, allowed: str) -> None:
    ring = RecordPool.allocate(WindowRecords(DIM), 40, CPU)
    plan = WindowPlan(torch.arange(3), torch.arange(2, 5), torch.tensor([39, 4, 1]))
    arguments = (torch.randn(5, DIM), torch.ones(DIM), 1e-6, torch.ones(5, PAIRS), torch.zeros(5, PAIRS), ring)
    run_native(window_store, *arguments, plan)
    before = ring.rows.clone()
    getattr(plan, field)[2] = value
    with pytest.raises(RuntimeError, match=rf"window_store: {field}\[2\] is {value}; allowed: {allowed}$"):
        run_native(window_store, *arguments, plan)
    assert torch.equal(ring.rows, before)


def test_more_rows_are_stored_than_there_are() -> None:
    ring = RecordPool.allocate(WindowRecords(DIM), 40, CPU)
    arguments = (torch.randn(2, DIM), torch.ones(DIM), 1e-6, *still(2), ring, WindowPlan(None, None, torch.arange(1, 4)))
    with pytest.raises(RuntimeError, match=r"window_store: must hold: a\.store_from \|\| a\.stores <= a\.rows"):
        run_native(window_store, *arguments)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("slots", 0, "at least 1 and less than 8, or negative"),
        ("slots", 8, "at least 1 and less than 8, or negative"),  # the smaller of the pools
        ("rows", 4, "at least 0 and less than 4"),
        ("rows", -1, "at least 0 and less than 4"),
        ("first", 6, "at least 0 and less than 6"),
        ("first", -1, "at least 0 and less than 6"),
        ("open_from", 3, "at least 0 and less than 3"),
        ("open_from", -1, "at least 0 and less than 3"),
        ("open_rows", 4, "at least 0 and less than 4"),
        ("open_to", 3, "at least 0 and less than 3, or negative"),
    ],
)
def test_a_row_outside_of_the_pools_is_read_or_written(field: str, value: int, allowed: str) -> None:
    pools = RecordPool.allocate(GlobalRecords(DIM), 16, CPU), RecordPool.allocate(IndexKeyRecords(INDEX_DIM), 8, CPU)
    two = (torch.tensor([1, 3]), torch.tensor([7, 2]), torch.tensor([0, 2]), torch.tensor([0, 5]), torch.tensor([1, 2]))
    write = WritePlan(*two, torch.tensor([2, 3]), torch.tensor([-5, 2]), masked=True)
    weights = CompressorWeights(torch.ones(DIM), torch.randn(INDEX_DIM, DIM), torch.ones(INDEX_DIM), 1e-6)
    opened = torch.randn(3, 2 * DIM)
    arguments = (torch.randn(4, 2 * DIM), opened, write, weights, torch.ones(2, PAIRS), torch.zeros(2, PAIRS), *pools)
    run_native(compress_store, *arguments)
    before = [x.clone() for x in (opened, *(pool.rows for pool in pools))]
    getattr(write, field)[1] = value
    name = "group_rows" if field == "rows" else field
    with pytest.raises(RuntimeError, match=rf"compress_store: {name}\[1\] is {value}; allowed: {allowed}$"):
        run_native(compress_store, *arguments)
    for x, y in zip(before, (opened, *(pool.rows for pool in pools)), strict=True):
        assert torch.equal(x, y)
