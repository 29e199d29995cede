# SPDX-License-Identifier: Apache-2.0
"""The sub-layer boundary of the library against its reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import DTYPES, assert_close, assert_nan_stays, assert_rows_alone, run_native, seeded, tolerance
from torch import Tensor

from cedar.ops.mhc import Crossing, Mixing, Norm, Written, mega_mhc


class Inputs(NamedTuple):
    streams: Tensor
    written: Written
    pre: Tensor
    mixing: Mixing
    norm: Norm

    def rows(self, part: slice) -> Inputs:
        return self._replace(streams=self.streams[part], written=Written(*(x[part] for x in self.written)), pre=self.pre[part])


def inputs(rows: int, hc: int, hidden: int, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> Inputs:
    g = seeded(seed)
    outputs = (2 + hc) * hc
    return Inputs(
        torch.randn(rows, hc, hidden, generator=g).to(dtype),
        Written(
            torch.randn(rows, hidden, generator=g).to(dtype),
            2 * torch.rand(rows, hc, generator=g),
            torch.rand(rows, hc, hc, generator=g),
        ),
        torch.rand(rows, hc, generator=g),
        Mixing(
            torch.randn(outputs, hc * hidden, generator=g) * 0.1,
            spread * torch.rand(outputs, generator=g),
            torch.randn(outputs, generator=g),
            1e-6,
            1e-20,
            20,
        ),
        Norm(torch.rand(hidden, generator=g), 1e-20),
    )


def flat(crossing: Crossing) -> list[Tensor | None]:
    return [crossing.streams, *(crossing.gates or (None,) * 3), crossing.normed]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 130), st.sampled_from(DTYPES), st.sampled_from([0.1, 1.0, 30.0]))
def test_a_boundary_differs_from_the_reference(rows: int, hc: int, hidden: int, dtype: torch.dtype, spread: float) -> None:
    x = inputs(rows, hc, hidden, dtype, spread=spread)
    actual, expected = flat(run_native(mega_mhc, *x)), flat(mega_mhc(*x))
    for one, other in zip(actual, expected, strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype is other.dtype
        # streams that are rounded the other way move what is computed from them
        assert_close(one, other, 2 * tolerance(dtype) * max(1.0, spread))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("norms", [True, False])
def test_a_part_that_was_not_asked_for_is_computed_or_missing(
    dtype: torch.dtype, expands: bool, mixes: bool, norms: bool
) -> None:
    x = inputs(5, 4, 64, dtype)
    arguments = (x.streams, x.written if expands else None, x.pre, x.mixing if mixes else None, x.norm if norms else None)
    for one, other in zip(flat(run_native(mega_mhc, *arguments)), flat(mega_mhc(*arguments)), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_close(one, other, tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_its_batch(dtype: torch.dtype) -> None:
    x = inputs(37, 4, 96, dtype)
    assert_rows_alone(lambda part: flat(run_native(mega_mhc, *x.rows(part))), 37)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_spreads_to_other_rows(dtype: torch.dtype) -> None:
    x = inputs(9, 4, 64, dtype)

    def poison() -> None:
        for tensor in (x.streams, x.pre, *x.written):
            tensor[4] = torch.nan

    assert_nan_stays(lambda: flat(run_native(mega_mhc, *x)), poison, 4)


def test_columns_of_comb_do_not_sum_to_one() -> None:
    gates = run_native(mega_mhc, *inputs(20, 4, 64, torch.float32, spread=300.0)).gates
    torch.testing.assert_close(gates.comb.sum(1), torch.ones(20, 4), atol=1e-5, rtol=0)
