# SPDX-License-Identifier: Apache-2.0
"""The library's routed experts on a GPU, from packed E2M1 weights, against the reference; and how the weights are packed."""

from __future__ import annotations

import pytest
import torch
from native_support import assert_close, run_native, seeded
from torch import Tensor

from cedar.cache.formats import pack_mxfp4, unpack_mxfp4
from cedar.errors import CedarError
from cedar.model.quantize import quantize_fp8_tiles
from cedar.ops.fp4_tiles import pack_tiles, unpack_tiles
from cedar.ops.moe import Experts, moe_fp4

BF16 = torch.bfloat16
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("gated", [False, True])
def test_packed_weights_are_other_weights(gated: bool) -> None:
    codes, scale = pack_mxfp4(torch.randn(3, 64, 256, generator=seeded(1)) * torch.logspace(-6, 0, 256))
    tiles, scales = pack_tiles(codes, scale, gated)
    assert (tiles.shape, scales.shape) == (codes.shape, scale.shape)
    assert torch.equal(unpack_tiles(tiles, scales, gated, torch.float32), unpack_mxfp4(codes, scale))


@pytest.mark.parametrize(
    ("rows", "depth", "scale", "text"), [(24, 128, 120, "24 rows"), (32, 64, 120, "64 inputs"), (32, 128, 129, "above 2")]
)
def test_weights_that_do_not_fit_are_packed(rows: int, depth: int, scale: int, text: str) -> None:
    codes, scales = torch.zeros(rows, depth // 2, dtype=torch.uint8), torch.full((rows, depth // 32), scale, dtype=torch.uint8)
    with pytest.raises(CedarError, match=text):
        pack_tiles(codes, scales, gated=False)


def layer(count: int, hidden: int, inner: int, act_quant: bool, fp8_shared: bool) -> Experts:
    g = torch.Generator("cuda").manual_seed(count + hidden)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda") * shape[-1] ** -0.5

    (w13, s13), (w2, s2) = (
        pack_tiles(*pack_mxfp4(matrix(count, 2 * inner, hidden)), gated=True),
        pack_tiles(*pack_mxfp4(matrix(count, hidden, inner)), gated=False),
    )
    if not fp8_shared:
        return Experts(w13, w2, matrix(2 * inner, hidden).to(BF16), matrix(hidden, inner).to(BF16), 1.0, act_quant, s13, s2)
    (a, sa), (b, sb) = quantize_fp8_tiles(matrix(2 * inner, hidden)), quantize_fp8_tiles(matrix(hidden, inner))
    return Experts(w13, w2, a, b, 1.0, act_quant, s13, s2, sa, sb)


def routed(rows: int, count: int, top_k: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    g = seeded(rows)
    ids = torch.rand(rows, count, generator=g).argsort(-1)[:, :top_k].contiguous()
    return torch.randn(rows, hidden, generator=g).to(BF16).cuda(), ids.cuda(), torch.rand(rows, top_k, generator=g).cuda()


@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner"), [(8, 2, 256, 128), (5, 2, 384, 128), (16, 6, 512, 384), (6, 3, 5120, 2304)]
)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 48, 128, 129, 300, 640, 641, 1500])
@pytest.mark.parametrize("act_quant", [False, True])
class TestExperts:
    pytestmark = gpu

    def test_the_experts_differ_from_the_reference(
        self, count: int, top_k: int, hidden: int, inner: int, rows: int, act_quant: bool
    ) -> None:
        matrices = layer(count, hidden, inner, act_quant, fp8_shared=act_quant)
        arguments = (*routed(rows, count, top_k, hidden), matrices)
        actual, expected = run_native(moe_fp4, *arguments), moe_fp4(*arguments)
        # an input that is rounded to FP8 the other way, which is rare, moves a row by a step of that format
        assert_close(actual, expected, 0.05 if act_quant else 8e-3)
        errors = (actual.float() - expected.float()).norm(dim=1)
        assert errors.median() <= 5e-3 * expected.float().norm(dim=1).mean()

    def test_results_differ_from_run_to_run(
        self, count: int, top_k: int, hidden: int, inner: int, rows: int, act_quant: bool
    ) -> None:
        """Whoever multiplies fast reads a stage that the copy engine fills again soon."""
        arguments = (*routed(rows, count, top_k, hidden), layer(count, hidden, inner, act_quant, fp8_shared=act_quant))
        first = run_native(moe_fp4, *arguments)
        for _ in range(60):
            assert torch.equal(run_native(moe_fp4, *arguments), first)


class TestDetails:
    pytestmark = gpu

    def test_a_row_depends_on_its_batch(self) -> None:
        matrices = layer(16, 512, 256, act_quant=True, fp8_shared=True)
        x, ids, weights = routed(1400, 16, 6, 512)
        together = run_native(moe_fp4, x, ids, weights, matrices)
        # by the warp's matrix instruction or the warp group's, whose sums of the same numbers may have another order
        for start, stop in ((3, 700), (0, 1000), (0, 1400)):
            part = [some[start:stop].contiguous() for some in (x, ids, weights)]
            assert torch.equal(run_native(moe_fp4, *part, matrices), together[start:stop]), (start, stop)
        together = run_native(moe_fp4, x[:640].contiguous(), ids[:640].contiguous(), weights[:640].contiguous(), matrices)
        for start, stop in ((0, 1), (5, 13), (20, 84), (100, 400), (0, 640)):
            part = [some[start:stop].contiguous() for some in (x, ids, weights)]
            assert torch.equal(run_native(moe_fp4, *part, matrices), together[start:stop]), (start, stop)

    @pytest.mark.parametrize("rows", [60, 300, 1000])
    def test_all_rows_of_one_expert_are_lost(self, rows: int) -> None:
        matrices = layer(8, 256, 128, act_quant=False, fp8_shared=False)
        x, ids, weights = routed(rows, 8, 2, 256)
        ids[:, 0], ids[:, 1] = 7, 0
        assert_close(run_native(moe_fp4, x, ids, weights, matrices), moe_fp4(x, ids, weights, matrices), 8e-3)

    def test_experts_with_other_numbers_of_rows_differ(self) -> None:
        """Each width of the matrix instruction for many rows, and a row more."""
        counts = torch.tensor([1, 32, 33, 56, 57, 64, 65, 72, 73, 80, 81, 96, 97])
        rows, experts = int(counts.sum()), len(counts) + 1
        matrices = layer(experts, 256, 128, act_quant=False, fp8_shared=True)
        x, ids, weights = routed(rows, experts, 2, 256)
        ids[:, 0], ids[:, 1] = torch.arange(experts - 1).repeat_interleave(counts), experts - 1
        assert_close(run_native(moe_fp4, x, ids, weights, matrices), moe_fp4(x, ids, weights, matrices), 8e-3)

    @pytest.mark.parametrize("rows", [9, 900])
    def test_a_nan_spreads_to_other_rows(self, rows: int) -> None:
        matrices = layer(8, 256, 128, act_quant=False, fp8_shared=False)
        x, ids, weights = routed(rows, 8, 2, 256)
        clean = run_native(moe_fp4, x, ids, weights, matrices)
        x[4] = torch.nan
        dirty = run_native(moe_fp4, x, ids, weights, matrices)
        others = [n for n in range(rows) if n != 4]
        assert dirty[4].isnan().all()
        assert torch.equal(dirty[others], clean[others])

    def test_an_expert_that_does_not_exist_is_read(self) -> None:
        matrices = layer(8, 256, 128, act_quant=False, fp8_shared=False)
        x, ids, weights = routed(30, 8, 2, 256)
        without = weights.clone()
        without[3, 1] = 0
        expected = run_native(moe_fp4, x, ids, without, matrices)
        for nowhere in (-1, 8, 1 << 40):
            ids[3, 1] = nowhere
            assert_close(run_native(moe_fp4, x, ids, weights, matrices), expected, 1e-6)

    @pytest.mark.parametrize("act_quant", [False, True])
    @pytest.mark.parametrize("rows", [1, 33, 200, 700])
    def test_a_captured_call_cannot_be_replayed(self, rows: int, act_quant: bool) -> None:
        matrices = layer(8, 256, 128, act_quant=act_quant, fp8_shared=True)
        x, ids, weights = routed(rows, 8, 2, 256)
        run_native(moe_fp4, x, ids, weights, matrices)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_native(moe_fp4, x, ids, weights, matrices)
        x.neg_()
        ids.copy_((ids + 3) % 8)
        graph.replay()
        assert torch.equal(captured, run_native(moe_fp4, x, ids, weights, matrices))

    @pytest.mark.parametrize("rows", [1, 6, 100, 640, 1300])
    def test_calls_that_follow_each_other_disturb_each_other(self, rows: int) -> None:
        """A launch may begin before the one ahead of it has ended."""
        layers = [layer(16, hidden, 1280, act_quant=False, fp8_shared=True) for hidden in (2048, 1024)]
        inputs = [routed(rows, 16, 6, hidden) for hidden in (2048, 1024)]
        alone = []
        for some, matrices in zip(inputs, layers, strict=True):
            alone.append(run_native(moe_fp4, *some, matrices))
            torch.cuda.synchronize()
        for _ in range(20):
            together = [run_native(moe_fp4, *some, matrices) for some, matrices in zip(inputs, layers, strict=True)]
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
