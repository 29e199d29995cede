# SPDX-License-Identifier: Apache-2.0
"""Linears of the library against their references."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import DTYPES, assert_close, assert_nan_stays, assert_rows_alone, run_native, seeded, tolerance

from cedar.ops import native
from cedar.ops.attention import wo_a
from cedar.ops.linear import mxfp8_linear
from cedar.ops.norm import Norm


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 70),
    st.integers(1, 300),
    st.integers(1, 90),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_a_linear_differs_from_the_reference(
    rows: int, inner: int, outputs: int, dtype: torch.dtype, weight_dtype: torch.dtype, quantised: bool, normed: bool
) -> None:
    if dtype is torch.float32:
        weight_dtype = dtype
    if quantised:
        inner = 32 * (1 + inner // 32)
    g = seeded(rows + inner)
    x, weight = torch.randn(rows, inner, generator=g).to(dtype), torch.randn(outputs, inner, generator=g).to(weight_dtype)
    norm = Norm(torch.rand(outputs, generator=g), 1e-20) if normed else None
    actual, expected = run_native(mxfp8_linear, x, weight, quantised, norm), mxfp8_linear(x, weight, quantised, norm)
    assert actual.dtype is expected.dtype
    assert_close(actual, expected, tolerance(weight_dtype) * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_depends_on_its_batch_or_on_the_threads(dtype: torch.dtype, threads: int) -> None:
    g = seeded(1)
    x, weight = torch.randn(150, 96, generator=g).to(dtype), torch.randn(333, 96, generator=g).to(dtype)
    norm = Norm(torch.rand(333, generator=g), 1e-6)
    alone = run_native(mxfp8_linear, x, weight, True, norm)
    native.set_threads(threads)
    try:
        assert torch.equal(run_native(mxfp8_linear, x, weight, True, norm), alone)
        assert_rows_alone(lambda part: [run_native(mxfp8_linear, x[part], weight, True, norm)], 150)
    finally:
        native.set_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_result_is_rounded(dtype: torch.dtype) -> None:
    g = seeded(2)
    x, weight = torch.randn(7, 64, generator=g).to(dtype), torch.randn(33, 64, generator=g).to(torch.bfloat16)
    wide = [run(x, weight, False, None, None, True) for run in (mxfp8_linear, lambda *a: run_native(mxfp8_linear, *a))]
    assert {one.dtype for one in wide} == {torch.float32}
    for one in wide:
        assert_close(one, x.double() @ weight.double().T, 1e-6)


def test_a_nan_spreads_to_other_rows() -> None:
    x, weight = torch.randn(9, 64), torch.randn(40, 64)

    def poison() -> None:
        x[3] = torch.nan

    assert_nan_stays(lambda: [run_native(mxfp8_linear, x, weight, True, Norm(torch.ones(40), 1e-6))], poison, 3)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 100), st.integers(1, 40), st.sampled_from(DTYPES))
def test_the_grouped_projection_differs_from_the_reference(
    rows: int, groups: int, inner: int, rank: int, dtype: torch.dtype
) -> None:
    g = seeded(rows)
    out, weight = (
        torch.randn(rows, groups, inner, generator=g).to(dtype),
        torch.randn(groups * rank, inner, generator=g).to(dtype),
    )
    assert_close(run_native(wo_a, out, weight, groups), wo_a(out, weight, groups), tolerance(dtype) * 2)
    assert_rows_alone(lambda part: [run_native(wo_a, out[part], weight, groups)], rows)


def test_calls_at_the_same_time_share_their_memory() -> None:
    g = seeded(9)
    weight = torch.randn(400, 300, generator=g)
    inputs = [torch.randn(60 + n, 300, generator=g) for n in range(16)]
    expected = [run_native(mxfp8_linear, x, weight, False, None) for x in inputs]
    native.set_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(20):
                results = list(pool.map(lambda x: run_native(mxfp8_linear, x, weight, False, None), inputs))
                assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    finally:
        native.set_threads(1)
