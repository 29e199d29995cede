# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's functions as it documents them, in PyTorch, and running an operation by it or by the package."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.model.quantize import quantize_fp8_tiles
from cedar.ops.peer_packages import PEERS
from cedar.ops.provider import Choice, FusedOp, choose, using

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_package = pytest.mark.skipif(
    not HOPPER or importlib.util.find_spec("deep_gemm") is None, reason="no Hopper GPU with deep_gemm"
)
FP8_BOUND = 5e-2
"""Of a row's norm: two roundings to E4M3, whose step is at most 1/8 of a value."""


def values_of(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.repeat_interleave(128, -1)


def matrix_of(codes: Tensor, scales: Tensor) -> Tensor:
    return values_of(codes, scales.repeat_interleave(128, -2))


class Kernels(types.ModuleType):
    """DeepGEMM's contract in PyTorch."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.calls: list[str] = []
        self.deterministic = False

    def fp8_gemm_nt(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor) -> None:
        self.calls.append("fp8_gemm_nt")
        (codes, scales), rows = a, a[0].shape[0]
        assert codes.is_contiguous()
        assert codes.dtype == b[0].dtype == E4M3
        assert scales.shape == (rows, codes.shape[1] // 128)
        assert scales.stride()[1] == (rows + 3) // 4 * 4
        assert scales.stride()[0] == 1
        assert b[1].shape == (b[0].shape[0] // 128, b[0].shape[1] // 128)
        assert scales.dtype == b[1].dtype == torch.float32
        d.copy_(values_of(*a) @ matrix_of(*b).T)

    def bf16_gemm_nt(self, a: Tensor, b: Tensor, d: Tensor) -> None:
        self.calls.append("bf16_gemm_nt")
        assert a.dtype == b.dtype == BF16
        assert d.dtype in (BF16, torch.float32)
        assert a.is_contiguous()
        d.copy_(a.float() @ b.float().T)

    def fp8_einsum(
        self, expr: str, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, recipe: tuple[int, int, int]
    ) -> None:
        self.calls.append("fp8_einsum")
        assert (expr, recipe) == ("bhr,hdr->bhd", (1, 128, 128))
        rows, heads, inner = a[0].shape
        padded = (rows + 3) // 4 * 4
        assert a[0].is_contiguous()
        assert b[0].is_contiguous()
        assert a[1].stride() == (1, inner // 128 * padded, padded)
        assert b[1].shape == (heads, b[0].shape[1] // 128, inner // 128)
        d.copy_(torch.einsum(expr, values_of(*a), matrix_of(*b)))

    def einsum(self, expr: str, a: Tensor, b: Tensor, d: Tensor) -> None:
        self.calls.append("einsum")
        assert a.dtype == b.dtype == d.dtype == BF16
        d.copy_(torch.einsum(expr, a.float(), b.float()))

    @classmethod
    def put(cls, monkeypatch: pytest.MonkeyPatch) -> Kernels:
        """In the package's place."""
        kernels = cls()
        monkeypatch.setitem(sys.modules, "deep_gemm", kernels)
        return kernels

    def tf32_hc_prenorm_gemm(self, a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int) -> None:
        self.calls.append("tf32_hc_prenorm_gemm")
        (rows, inputs), outputs = a.shape, len(b)
        assert a.dtype == BF16
        assert b.dtype == d.dtype == sqr_sum.dtype == torch.float32
        assert all(x.is_contiguous() for x in (a, b, d, sqr_sum))
        assert inputs % 64 == outputs % 8 == 0
        assert outputs <= 32
        assert (d.shape, sqr_sum.shape) == ((num_splits, rows, outputs), (num_splits, rows))
        assert 1 <= num_splits <= inputs // 64
        weight = b.view(torch.int32).bitwise_and(-1 << 13).view(torch.float32)  # TF32, which has 10 bits of the mantissa
        blocks = torch.arange(inputs // 64).tensor_split(num_splits)
        for part, mine in enumerate(blocks):
            columns = slice(int(mine[0]) * 64, int(mine[-1] + 1) * 64)
            d[part] = a[:, columns].float() @ weight[:, columns].T
            sqr_sum[part] = a[:, columns].float().square().sum(1)

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return 128

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor
    ) -> None:
        self.calls.append("m_grouped_fp8_gemm_nt_contiguous")
        rows, inputs = a[0].shape
        count, outputs, _ = b[0].shape
        assert a[0].dtype == b[0].dtype == E4M3
        assert a[1].dtype == b[1].dtype == torch.float32
        assert all(x.is_contiguous() for x in (a[0], *b, d))
        assert rows % 128 == 0
        assert (a[1].shape, a[1].stride()) == ((rows, inputs // 128), (1, rows))
        assert b[1].shape == (count, outputs // 128, inputs // 128)
        assert (d.shape, d.dtype) == ((rows, outputs), BF16)
        assert (grouped_layout.shape, grouped_layout.dtype) == ((rows,), torch.int32)
        d.fill_(torch.nan)
        for block in range(0, rows, 128):
            experts = grouped_layout[block : block + 128]
            mine = experts >= 0
            if mine.any():
                (expert,) = experts[mine].unique().tolist()
                assert mine[: int(mine.sum())].all()
                part = values_of(*(x[block : block + 128] for x in a)) @ matrix_of(*(x[expert] for x in b)).T
                d[block : block + 128] = part.masked_fill(~mine[:, None], torch.nan)

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
        assert (context_lens.dtype, context_lens.shape[1], block_kv, num_sms) == (torch.int32, 1, 64, 132)
        return torch.cat([context_lens.flatten(), torch.tensor([num_sms])])

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        fused_kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        schedule_meta: Tensor,
        max_context_len: int,
    ) -> Tensor:
        """What is behind the last page of 64 that a row has is whatever lay there."""
        self.calls.append("fp8_paged_mqa_logits")
        rows, _, heads, dim = q.shape
        assert q.shape[1:] in ((1, 32, 128), (1, 64, 128))
        assert (q.dtype, weights.dtype, context_lens.dtype, block_table.dtype) == (E4M3, torch.float32, torch.int32, torch.int32)
        assert fused_kv_cache.dtype == torch.uint8
        assert fused_kv_cache.shape[1:] == (64, 1, dim + 4)
        assert all(x.is_contiguous() for x in (q, fused_kv_cache, weights, context_lens, block_table))
        assert weights.shape == (rows, heads)
        assert torch.equal(schedule_meta, self.get_paged_mqa_logits_metadata(context_lens, 64, 132))
        assert 0 < context_lens.min() <= context_lens.max() <= max_context_len
        pages = fused_kv_cache.flatten(1)
        codes = pages[:, : 64 * dim].reshape(-1, 64, dim).view(E4M3).float()
        keys = codes * pages[:, 64 * dim :].contiguous().view(torch.float32)[..., None]
        scores = torch.full((rows, -(-max_context_len // 256) * 256), torch.nan)
        for row in range(rows):
            mine = keys[block_table[row, : -(-int(context_lens[row]) // 64)].long()].flatten(0, 1)
            scores[row, : len(mine)] = weights[row] @ (q[row, 0].float() @ mine.T).relu()
        return scores[:, :max_context_len]

    def use_deterministic_algorithms(self, enabled: bool) -> None:
        self.deterministic = enabled

    def mega_mhc(
        self,
        x: Tensor,
        residual: Tensor,
        shifted_prev_mix: Tensor,
        post_mix: Tensor,
        comb_res_mix: Tensor,
        fn: Tensor,
        mix_scales: Tensor,
        mix_bases: Tensor,
        hc_mult: int,
        hc_norm_eps: float,
        hc_pre_eps: float,
        hc_post_scale: float,
        sinkhorn_eps: float,
        num_sinkhorn_iters: int,
        rmsnorm_weight: Tensor,
        rmsnorm_eps: float,
        rmsnorm_scale: float,
        new_residual: Tensor,
        new_prev_mix: Tensor,
        new_post_mix: Tensor,
        new_comb_res_mix: Tensor,
        y_bf16: Tensor,
    ) -> None:
        self.calls.append("mega_mhc")
        assert self.deterministic
        rows, hidden = x.shape
        assert hc_mult == 4
        assert hidden % 1024 == 0
        assert residual.shape == new_residual.shape == (rows, 4, hidden)
        assert shifted_prev_mix.shape == new_prev_mix.shape == post_mix.shape == new_post_mix.shape == (rows, 4, 1)
        assert comb_res_mix.shape == new_comb_res_mix.shape == (rows, 4, 4)
        assert (fn.shape, mix_scales.shape, mix_bases.shape) == ((24, 4 * hidden), (3,), (24,))
        assert {t.dtype for t in (x, residual, new_residual, rmsnorm_weight, y_bf16)} == {BF16}
        coefficients = (shifted_prev_mix, post_mix, comb_res_mix, new_prev_mix, new_post_mix, new_comb_res_mix)
        floats = (*coefficients, fn, mix_scales, mix_bases)
        assert {t.dtype for t in floats} == {torch.float32}
        assert all(t.is_contiguous() for t in (x, residual, new_residual, rmsnorm_weight, y_bf16, *floats))
        spread = post_mix * x[:, None].float() + torch.einsum("tij,tid->tjd", comb_res_mix, residual.float())
        new_residual.copy_(spread)
        flat = new_residual.float().flatten(1)
        mixes = (flat @ fn.T) * (flat.square().mean(1, keepdim=True) + hc_norm_eps).rsqrt()
        scales = mix_scales.repeat_interleave(torch.tensor([4, 4, 16]))
        pre, post, comb = (mixes * scales + mix_bases).split([4, 4, 16], 1)
        new_prev_mix.copy_((pre.sigmoid() + hc_pre_eps)[..., None])
        new_post_mix.copy_((post.sigmoid() * hc_post_scale)[..., None])
        c = comb.view(-1, 4, 4).softmax(-1) + sinkhorn_eps
        c /= c.sum(1, keepdim=True) + sinkhorn_eps
        for _ in range(num_sinkhorn_iters - 1):
            c /= c.sum(2, keepdim=True) + sinkhorn_eps
            c /= c.sum(1, keepdim=True) + sinkhorn_eps
        new_comb_res_mix.copy_(c)
        y = (shifted_prev_mix * new_residual.float()).sum(1).to(BF16).float()
        y *= (y.square().mean(1, keepdim=True) + rmsnorm_eps).rsqrt() * rmsnorm_scale
        y_bf16.copy_(y * rmsnorm_weight.float())

    def bf16_mega_gate(
        self,
        x: Tensor,
        weight: Tensor,
        num_topk: int,
        use_shared_as_routed: bool,
        num_shared_experts: int,
        routed_scaling_factor: float,
        ep_rank: int,
        *,
        bias: Tensor,
        image_bias: Tensor | None,
        image_token_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """A logit that is not finite stops the GPU."""
        self.calls.append("bf16_mega_gate")
        assert self.deterministic
        rows, hidden = x.shape
        assert (use_shared_as_routed, num_shared_experts, ep_rank) == (False, 0, 0)
        assert (x.dtype, weight.dtype, bias.dtype) == (BF16, BF16, torch.float32)
        assert hidden % 256 == len(weight) % 4 == 0
        assert len(weight) <= 512
        assert num_topk <= 32
        assert (image_bias is None) == (image_token_mask is None)
        assert all(t.is_contiguous() for t in (x, weight, bias))
        logits = x.float() @ weight.float().T
        assert logits.isfinite().all()
        scores = torch.nn.functional.softplus(logits).sqrt()
        shift = bias.expand_as(scores)
        if image_bias is not None and image_token_mask is not None:
            assert (image_token_mask.dtype, image_token_mask.shape) == (torch.bool, (rows,))
            shift = torch.where(image_token_mask[:, None], image_bias, bias)
        ids = (scores + shift).sort(dim=1, descending=True, stable=True).indices[:, :num_topk]
        chosen = scores.gather(1, ids)
        return ids, chosen / chosen.sum(1, keepdim=True) * routed_scaling_factor


def deep_gemm() -> Choice:
    return Choice(set(), set(), peers=dict.fromkeys(PEERS["deep_gemm"].operations, "deep_gemm"))


def run(op: FusedOp[..., Any], *arguments: Any, **more: Any) -> Any:
    """The package's result: falling back is an error."""
    return _run(deep_gemm(), op, *arguments, **more)


def run_package(op: FusedOp[..., Any], *arguments: Any, **more: Any) -> Any:
    """The same where the package itself is chosen."""
    choice = choose("reference", torch.device("cuda"), {f"CEDAR_OP_{op.name.upper()}": "deep_gemm"})
    return _run(choice, op, *arguments, **more)


def _run(choice: Choice, op: FusedOp[..., Any], *arguments: Any, **more: Any) -> Any:
    with torch.inference_mode(), using(choice):
        result = op(*arguments, **more)
    assert choice._told == set()
    return result


def refusal(caplog: pytest.LogCaptureFixture, op: FusedOp[..., Any], *arguments: Any) -> str:
    """Why the package is not asked; the result is the reference's."""
    caplog.clear()
    with using(deep_gemm()):
        actual = op(*arguments)
    torch.testing.assert_close(actual, op(*arguments), rtol=0, atol=0)
    (record,) = caplog.records
    return record.getMessage().removeprefix(f"{op.name} runs without deep_gemm where that cannot: ")


def gpu(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, device=g.device)


def tiles(g: torch.Generator, outputs: int, inputs: int, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """FP8 tiles whose scales differ, by powers of two up to 2^spread."""
    sizes = torch.rand(outputs // 32, inputs // 32, generator=g, device=g.device).mul_(-spread).exp2_()
    return quantize_fp8_tiles(normal(g, outputs, inputs) * sizes.repeat_interleave(32, 0).repeat_interleave(32, 1))
