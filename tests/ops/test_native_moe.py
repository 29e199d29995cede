# SPDX-License-Identifier: Apache-2.0
"""Router and experts of the library against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import DTYPES, assert_close, assert_nan_stays, assert_rows_alone, run_native, seeded, tolerance

from cedar.ops.moe import Experts, mega_gate, moe_fp4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 200), st.integers(1, 40), st.data(), st.sampled_from(DTYPES), st.booleans())
def test_a_choice_differs_from_the_reference(
    rows: int, hidden: int, experts: int, data: st.DataObject, dtype: torch.dtype, with_image: bool
) -> None:
    top_k = data.draw(st.integers(1, experts))
    g = seeded(rows + hidden)
    # coarse values: scores are exact, and many are equal
    x = torch.randint(-2, 3, (rows, hidden), generator=g).to(dtype)
    weight = torch.randint(-1, 2, (experts, hidden), generator=g) / 4
    bias, image_bias = (torch.randint(-1, 2, (experts,), generator=g) / 2 for _ in range(2))
    image = torch.rand(rows, generator=g) < 0.5 if with_image else None
    arguments = (x, weight, bias, top_k, 1.5, image_bias, image)
    (ids, weights), (expected_ids, expected_weights) = run_native(mega_gate, *arguments), mega_gate(*arguments)
    scores = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt()
    biased = scores + (bias if image is None else torch.where(image[:, None], image_bias, bias))
    # Scores that differ by rounding may come in either order; the sets of values must agree.
    torch.testing.assert_close(biased.gather(1, ids), biased.gather(1, expected_ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.sum(1), expected_weights.sum(1), atol=1e-5, rtol=1e-5)
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_equal_scores_select_late_experts() -> None:
    ids, weights = run_native(mega_gate, torch.randn(5, 64), torch.zeros(8, 64), torch.zeros(8), 3, 1.5)
    assert ids.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, 3), 0.5))


def test_a_row_of_nan_selects_an_expert_that_does_not_exist() -> None:
    x = torch.randn(9, 64)
    g = seeded(3)
    weight, bias = torch.randn(16, 64, generator=g), torch.randn(16, generator=g)

    def poison() -> None:
        x[5] = torch.nan

    assert_nan_stays(lambda: list(run_native(mega_gate, x, weight, bias, 4, 1.5)), poison, 5)
    ids, _ = run_native(mega_gate, x, weight, bias, 4, 1.5)
    assert sorted(set(ids[5].tolist())) == sorted(ids[5].tolist())
    assert ((ids >= 0) & (ids < 16)).all()


def experts(count: int, hidden: int, inner: int, dtype: torch.dtype, quantised: bool = False) -> Experts:
    g = seeded(count + hidden)
    shapes = ((count, 2 * inner, hidden), (count, hidden, inner), (2 * inner, hidden), (hidden, inner))
    return Experts(*(torch.randn(shape, generator=g).mul_(shape[-1] ** -0.5).to(dtype) for shape in shapes), 1.0, quantised)


def routed(rows: int, count: int, top_k: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = seeded(rows)
    ids = torch.rand(rows, count, generator=g).argsort(-1)[:, :top_k].contiguous()
    return torch.randn(rows, hidden, generator=g).to(dtype), ids, torch.rand(rows, top_k, generator=g)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.data(),
    st.integers(1, 100),
    st.integers(1, 60),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_the_experts_differ_from_the_reference(
    rows: int, count: int, data: st.DataObject, hidden: int, inner: int, dtype: torch.dtype, quantised: bool
) -> None:
    top_k = data.draw(st.integers(1, count))
    if quantised:
        hidden, inner = 32 * (1 + hidden // 32), 32 * (1 + inner // 32)
    weights = experts(count, hidden, inner, dtype, quantised)
    arguments = (*routed(rows, count, top_k, hidden, dtype), weights)
    actual, expected = run_native(moe_fp4, *arguments), moe_fp4(*arguments)
    # a value that is rounded to FP8 the other way, which is rare, moves a row by a step of that format
    assert_close(actual, expected, 0.1 if quantised else 2 * tolerance(dtype))
    if quantised:
        errors = (actual.float() - expected.float()).norm(dim=1)
        assert errors.median() <= 2 * tolerance(dtype) * expected.float().norm(dim=1).mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_its_batch(dtype: torch.dtype) -> None:
    x, ids, weights = routed(45, 8, 3, 64, dtype)
    matrices = experts(8, 64, 40, dtype)
    assert_rows_alone(lambda part: [run_native(moe_fp4, x[part], ids[part], weights[part], matrices)], 45)


def test_a_nan_spreads_to_other_rows() -> None:
    x, ids, weights = routed(9, 8, 3, 64, torch.float32)
    matrices = experts(8, 64, 32, torch.float32, quantised=True)

    def poison() -> None:
        x[2] = torch.nan

    assert_nan_stays(lambda: [run_native(moe_fp4, x, ids, weights, matrices)], poison, 2)
