# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's router and experts: what they are given, when they are not asked, and their results on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_gemm_support import BF16, Kernels, gpu, matrix_of, needs_package, normal, refusal, run, run_package, tiles, values_of
from native_support import assert_close, assert_nan_stays, seeded
from torch import Tensor

from cedar.cache.formats import pack_mxfp4
from cedar.ops import peer_deep_gemm, peer_deep_gemm_experts
from cedar.ops.fp4_tiles import pack_tiles, unpack_tiles
from cedar.ops.moe import Experts, choose_experts, mega_gate, moe_fp4, swiglu
from cedar.ops.peer_deep_gemm import aligned, quantised

BOUND = 0.1
"""Of a row's norm: inputs are rounded to E4M3 twice on the way."""
SAME_INPUTS = 1e-2


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels.put(monkeypatch)


def packed(g: torch.Generator, count: int, outputs: int, inputs: int, gated: bool, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Experts' matrices, whose groups differ by up to 2^spread."""
    made = []
    for _ in range(count):
        sizes = torch.rand(outputs, inputs // 32, generator=g, device=g.device).mul_(-spread).exp2_()
        values = normal(g, outputs, inputs) * inputs**-0.5 * sizes.repeat_interleave(32, 1)
        made.append(pack_tiles(*pack_mxfp4(values), gated))
    return torch.stack([codes for codes, _ in made]), torch.stack([scales for _, scales in made])


def experts(g: torch.Generator, count: int, hidden: int, inner: int) -> Experts:
    (w13, s13), (w2, s2) = packed(g, count, 2 * inner, hidden, True), packed(g, count, hidden, inner, False)
    shared13, shared2 = tiles(g, 2 * inner, hidden), tiles(g, hidden, inner)
    shared = [(codes, scale - 4) for codes, scale in (shared13, shared2)]
    return Experts(w13, w2, shared[0][0], shared[1][0], 10.0, False, s13, s2, shared[0][1], shared[1][1])


def routed(g: torch.Generator, rows: int, count: int, hidden: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(rows, count, generator=g, device=g.device).argsort(-1)[:, :top_k].contiguous()
    weights = torch.rand(rows, top_k, generator=g, device=g.device) + 0.1
    return normal(g, rows, hidden).to(BF16), ids, weights / weights.sum(-1, keepdim=True) * 1.5


def of_rounded_inputs(x: Tensor, ids: Tensor, weights: Tensor, matrices: Experts) -> Tensor:
    """The experts' sum in plain products, with inputs rounded as the kernels have them; float32 [T, D]."""

    def rounded(x: Tensor) -> Tensor:
        return values_of(*quantised(x))

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return (rounded(x) @ weight.T).to(BF16)

    w13, w2, shared_w13, shared_w2, limit, _, s13, s2, shared_s13, shared_s2 = matrices
    assert s13 is not None
    assert s2 is not None
    assert shared_s13 is not None
    assert shared_s2 is not None
    hidden = product(x, matrix_of(*aligned(shared_w13, shared_s13)))
    out = product(swiglu(hidden, limit).to(BF16), matrix_of(*aligned(shared_w2, shared_s2))).float()
    for expert in range(len(w13)):
        one = unpack_tiles(w13[expert], s13[expert], True, torch.float32)
        two = unpack_tiles(w2[expert], s2[expert], False, torch.float32)
        rows, place = (ids == expert).nonzero(as_tuple=True)
        inner = (swiglu(product(x[rows], one), limit) * weights[rows, place, None]).to(BF16)
        out.index_add_(0, rows, product(inner, two).float())
    return out


@pytest.mark.parametrize("rows", [1, 3, 50, 290])
def test_experts_differ_from_the_reference(kernels: Kernels, rows: int) -> None:
    """With 290 rows an expert has more than one block of 128, and two have none."""
    g = seeded(rows)
    x, ids, weights = routed(g, rows, 5, 256, 3)
    matrices = experts(g, 7, 256, 128)
    out = run(moe_fp4, x, ids, weights, matrices)
    assert_close(out, moe_fp4(x, ids, weights, matrices), BOUND)
    assert_close(out, of_rounded_inputs(x, ids, weights, matrices), SAME_INPUTS)
    assert torch.equal(out, run(moe_fp4, x, ids, weights, matrices._replace(act_quant=True)))
    assert kernels.calls == 2 * [*["fp8_gemm_nt"] * 2, *["m_grouped_fp8_gemm_nt_contiguous"] * 2]


def test_an_output_is_weighed_after_its_rounding_or_by_anothers_weight(kernels: Kernels) -> None:
    """Routed outputs alone, each with its own share."""
    g = seeded(1)
    x, ids, weights = routed(g, 40, 4, 256, 2)
    matrices = experts(g, 4, 256, 128)
    matrices.shared_w2.fill_(0)
    for share in (torch.tensor([1.5, 0.0]), torch.tensor([0.0, 1.5])):
        weights.copy_(share)
        assert_close(run(moe_fp4, x, ids, weights, matrices), moe_fp4(x, ids, weights, matrices), BOUND)


@pytest.mark.parametrize("gated", [False, True])
def test_fp4_weights_are_rounded_to_fp8(gated: bool) -> None:
    codes, scale = packed(seeded(2), 3, 256, 384, gated, spread=12.0)
    moved, blocks = peer_deep_gemm_experts._expanded(codes, scale, gated)
    assert torch.equal(matrix_of(moved, blocks), unpack_tiles(codes, scale, gated, torch.float32))
    assert blocks.shape == (3, 2, 3)


def test_experts_are_converted_at_every_call(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    convert = peer_deep_gemm_experts._expanded
    monkeypatch.setattr(peer_deep_gemm_experts, "_expanded", lambda *weight: made.append(weight[2]) or convert(*weight))
    g = seeded(3)
    x, ids, weights = routed(g, 2, 3, 128, 2)
    layers = [experts(g, 3, 128, 128) for _ in range(2)]
    for matrices in layers * 3:
        assert_close(run(moe_fp4, x, ids, weights, matrices), moe_fp4(x, ids, weights, matrices), BOUND)
    assert made == [True, False] * 2
    assert all(len(peer_deep_gemm._converted[matrices.w13][0]) == 3 for matrices in layers)


def test_a_nan_spreads_to_other_rows(kernels: Kernels) -> None:
    g = seeded(4)
    x, ids, weights = routed(g, 6, 3, 128, 2)
    matrices = experts(g, 3, 128, 128)
    assert_nan_stays(lambda: [run(moe_fp4, x, ids, weights, matrices)], lambda: x[2].fill_(torch.nan), 2)


def test_experts_that_it_does_not_take_fail(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    g = seeded(5)
    x, ids, weights = routed(g, 3, 2, 128, 2)
    good = experts(g, 2, 128, 128)
    plain = Experts(*(normal(g, *shape).to(BF16) for shape in ((2, 64, 128), (2, 128, 32), (64, 128), (128, 32))), 10.0, False)
    mixed = good._replace(shared_w13=plain.shared_w13, shared_w2=plain.shared_w2, shared_w13_scale=None, shared_w2_scale=None)
    (w13, s13), (w2, s2) = tiles(g, 320, 128), tiles(g, 128, 160)
    odd = good._replace(shared_w13=w13, shared_w2=w2, shared_w13_scale=s13, shared_w2_scale=s2)
    for matrices, why in (
        (plain, "the routed experts are torch.bfloat16; it takes them packed in FP4"),
        (mixed, "the shared expert is torch.bfloat16; it takes it in FP8"),
        (odd, "a matrix is 320 x 128; it takes multiples of 128"),
    ):
        assert refusal(caplog, moe_fp4, x, ids, weights, matrices) == why
    assert refusal(caplog, moe_fp4, x.float(), ids, weights, good).startswith("inputs are torch.float32 and the weight is")
    assert not any(matrix in peer_deep_gemm._converted for matrix in good[:4])
    assert kernels.calls == []


# ---- router ----


def gate(g: torch.Generator, rows: int, count: int, hidden: int, images: bool = False) -> tuple[Any, ...]:
    x, weight = normal(g, rows, hidden).to(BF16), (normal(g, count, hidden) * hidden**-0.5).to(BF16)
    bias, image_bias = (torch.rand(count, generator=g, device=g.device) / 10 for _ in range(2))
    image = torch.rand(rows, generator=g, device=g.device) < 0.5
    return (x, weight, bias, 6, 1.5, *((image_bias, image) if images else ()))


@pytest.mark.parametrize("images", [False, True])
def test_a_choice_differs_from_the_reference(kernels: Kernels, images: bool) -> None:
    arguments = gate(seeded(6), 33, 128, 256, images)
    (ids, weights), (expected_ids, expected) = run(mega_gate, *arguments), mega_gate(*arguments)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected, 1e-6)
    assert kernels.calls == ["bf16_gemm_nt"]


def test_a_router_that_it_does_not_take_fails(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    x, weight, *rest = gate(seeded(7), 3, 128, 128)
    why = "inputs are torch.bfloat16 and the weight is torch.float32"
    assert refusal(caplog, mega_gate, x, weight.float(), *rest).startswith(why)
    small = gate(seeded(7), 3, 96, 128)
    assert refusal(caplog, mega_gate, *small) == "a matrix is 96 x 128; it takes multiples of 128"
    assert kernels.calls == []


# ---- the package itself ----


@pytest.mark.parametrize("rows", [1, 130, 700])
@pytest.mark.gpu
@needs_package
def test_the_package_computes_experts_otherwise(rows: int) -> None:
    g = gpu(rows)
    x, ids, weights = routed(g, rows, 15, 5120, 6)
    matrices = experts(g, 16, 5120, 2304)
    out = run_package(moe_fp4, x, ids, weights, matrices)
    assert_close(out, moe_fp4(x, ids, weights, matrices), BOUND)
    expected = of_rounded_inputs(x, ids, weights, matrices)
    errors = (out - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() <= SAME_INPUTS, errors.sort().values  # a last bit may take a group of inner values to another scale


@pytest.mark.parametrize("count", [128, 384])
@pytest.mark.parametrize("rows", [1, 130, 1024])
@pytest.mark.gpu
@needs_package
def test_the_package_chooses_otherwise(rows: int, count: int) -> None:
    x, weight, bias, top_k, scaling = gate(gpu(rows), rows, count, 5120)
    ids, weights = run_package(mega_gate, x, weight, bias, top_k, scaling)
    logits = x.double() @ weight.double().T
    scores = torch.nn.functional.softplus(logits).sqrt()
    best = (scores + bias).topk(top_k).values[:, -1:]
    assert ((scores + bias).gather(1, ids) >= best - 1e-4).all()
    assert len(ids.sort().values.diff(dim=1).nonzero()) == rows * (top_k - 1)
    chosen = scores.gather(1, ids)
    assert_close(weights, chosen / chosen.sum(-1, keepdim=True) * scaling, 1e-4)
    agreed = ids == choose_experts(logits.float(), bias, top_k, scaling, None, None)[0]
    assert agreed.double().mean() > 0.99
