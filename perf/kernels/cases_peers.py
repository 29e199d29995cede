# SPDX-License-Identifier: Apache-2.0
"""The same work by public Hopper kernels (peers.py), in chains where no single one does it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from perf.kernels.case import Case, rotate, sets_for, token_counts
from perf.kernels.cases import (
    BF16,
    EXPERT_BYTES,
    EXPERTS,
    GROUP_IN,
    GROUPS,
    HIDDEN,
    INNER,
    LINEARS,
    RANK,
    STREAMS,
    TOP_K,
    normal,
    seeded,
    uniform,
)
from perf.kernels.peers import deep_gemm, tokenspeed
from torch import Tensor

Inputs = tuple[Any, ...]


def _fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def _peer(
    op: str,
    name: str,
    facts: dict[str, int | str],
    size: float,
    flops: float,
    prepare: Callable[[], tuple[Callable[[int], Inputs], Callable[[Inputs], Any]]],
    **more: Any,
) -> Case:
    """prepare: finds the provider and returns (make, run) of `rotate`."""
    sets = sets_for(size)

    def build() -> Callable[[int], None]:
        make, run = prepare()
        return rotate(make, sets, run)

    return Case(op, name, facts, build, size, flops, sets=sets, **more)


def linears(rows: int) -> Iterator[Case]:
    for layer, (outputs, inputs) in LINEARS.items():

        def prepare(outputs: int = outputs, inputs: int = inputs) -> Any:
            library = deep_gemm()
            aligned = getattr(library, "get_mn_major_tma_aligned_tensor", lambda scales: scales)

            def make(seed: int) -> Inputs:
                g = seeded(seed)
                x, weight = _fp8(normal(g, rows, inputs)), _fp8(normal(g, outputs, inputs))
                scales = uniform(g, rows, inputs // 128), uniform(g, outputs // 128, inputs // 128)
                return (x, aligned(scales[0])), (weight, scales[1]), torch.empty(rows, outputs, dtype=BF16, device="cuda")

            return make, lambda inputs: library.fp8_gemm_nt(*inputs)

        size, flops = outputs * inputs + rows * (inputs + 2.0 * outputs), 2.0 * rows * inputs * outputs
        name = "DeepGEMM fp8_gemm_nt, inputs in FP8"
        yield _peer("mxfp8_linear", name, {"T": rows, "layer": layer}, size, flops, prepare, peak="fp8")


def projection(rows: int) -> Iterator[Case]:
    def weights(g: torch.Generator) -> tuple[Tensor, Tensor]:
        return _fp8(normal(g, GROUPS, RANK, GROUP_IN)), uniform(g, GROUPS, RANK // 128, GROUP_IN // 128)

    def einsum() -> Any:
        library = deep_gemm()

        def make(seed: int) -> Inputs:
            g = seeded(seed)
            x = _fp8(normal(g, rows, GROUPS, GROUP_IN)), uniform(g, rows, GROUPS, GROUP_IN // 128)
            return x, weights(g), torch.empty(rows, GROUPS, RANK, dtype=BF16, device="cuda")

        return make, lambda inputs: library.fp8_einsum("bhr,hdr->bhd", *inputs, recipe=(1, 128, 128))

    def chain() -> Any:
        library, cast = deep_gemm(), tokenspeed("ops.attention.dsv4.triton").dsv4_fused_inv_rope_fp8_quant

        def make(seed: int) -> Inputs:
            g = seeded(seed)
            table = uniform(g, 8192, 64)
            positions = torch.randint(0, 8192, (rows,), generator=g, device="cuda")
            out = torch.empty(rows, GROUPS, RANK, dtype=BF16, device="cuda")
            return normal(g, rows, 64, 512), positions, table, weights(g), out

        def run(inputs: Inputs) -> None:
            x, positions, table, weight, out = inputs
            quantised = cast(x, positions, table, GROUPS, 64 // GROUPS, tma_aligned_scales=False)
            library.fp8_einsum("bhr,hdr->bhd", quantised, weight, out, recipe=(1, 128, 128))

        return make, run

    size = GROUPS * RANK * GROUP_IN + rows * 2.0 * GROUPS * (GROUP_IN + RANK)
    flops = 2.0 * rows * GROUPS * GROUP_IN * RANK
    yield _peer("wo_a", "DeepGEMM fp8_einsum, inputs in FP8", {"T": rows}, size, flops, einsum, peak="fp8")
    yield _peer("wo_a", "tokenspeed inverse RoPE + cast, DeepGEMM fp8_einsum", {"T": rows}, size, flops, chain, peak="fp8")


def router(rows: int) -> Iterator[Case]:
    def prepare() -> Any:
        choose = tokenspeed("thirdparty.cuda.routing").softplus_sqrt_topk_flash

        def make(seed: int) -> Inputs:
            g = seeded(seed)
            ids = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")
            return normal(g, rows, HIDDEN), normal(g, EXPERTS, HIDDEN), uniform(g, EXPERTS), ids, uniform(g, rows, TOP_K)

        def run(inputs: Inputs) -> None:
            x, weight, bias, ids, weights = inputs
            choose(torch.mm(x, weight.t(), out_dtype=torch.float32), bias, ids, weights, 1.5, True)

        return make, run

    size, flops = 2.0 * (EXPERTS + rows) * HIDDEN, 2.0 * EXPERTS * HIDDEN * rows
    yield _peer("mega_gate", "cuBLAS bf16, tokenspeed softplus_sqrt_topk_flash", {"T": rows}, size, flops, prepare)


def hyper_connections(rows: int) -> Iterator[Case]:
    splits = 64 if rows <= 128 else 16 if rows <= 512 else 2

    def prepare() -> Any:
        library, parts = deep_gemm(), tokenspeed("ops.residual.triton")

        def make(seed: int) -> Inputs:
            g = seeded(seed)
            new = (uniform(g, rows, 4), torch.empty(rows, 4, device="cuda"), torch.empty(rows, 16, device="cuda"))
            coefficients = (normal(g, 24, STREAMS * HIDDEN, dtype=torch.float32) * 0.01, uniform(g, 3), uniform(g, 24))
            boundary = (normal(g, rows, HIDDEN), normal(g, rows, 4, HIDDEN), uniform(g, rows, 4), uniform(g, rows, 4, 4))
            sums = torch.empty(splits, rows, 24, device="cuda"), torch.empty(splits, rows, device="cuda")
            return boundary, coefficients, sums, new, uniform(g, rows, 4), normal(g, HIDDEN), normal(g, rows, HIDDEN)

        def run(inputs: Inputs) -> None:
            boundary, (fn, scale, base), (sums, squares), (pre, post, comb), previous, weight, y = inputs
            streams = parts.triton_mhc_post(*boundary)
            library.tf32_hc_prenorm_gemm(streams.view(rows, STREAMS * HIDDEN), fn, sums, squares, splits)
            sizes = {"hidden_size": HIDDEN, "sinkhorn_iters": 20, "n_splits": splits, "num_tokens": rows}
            parts.mhc_pre_mix_hc4(sums, squares, scale, base, pre, post, comb, rms_eps=1e-6, hc_eps=1e-6, **sizes)
            parts.mhc_pre_layer_norm_hc4(previous, streams, weight, y, eps=1e-6)

        return make, run

    size, flops = 24.0 * STREAMS * HIDDEN * 4 + rows * HIDDEN * 20, 2.0 * 24 * STREAMS * HIDDEN * rows
    name = "tokenspeed post, DeepGEMM, tokenspeed Sinkhorn, norm"
    yield _peer("mega_mhc", name, {"T": rows}, size, flops, prepare, peak="tf32")


@functools.cache
def _marlin_weights() -> tuple[Any, dict[str, str], torch.nn.Module]:
    kernels = tokenspeed("ops.moe.marlin.mxfp4")
    module: Any = torch.nn.Module()
    g = seeded(6)
    for name, high, shape in (
        ("w13_weight", 256, (EXPERTS, 2 * INNER, HIDDEN // 2)),
        ("w2_weight", 256, (EXPERTS, HIDDEN, INNER // 2)),
        ("w13_weight_scale", 0, (EXPERTS, 2 * INNER, HIDDEN // 32)),
        ("w2_weight_scale", 0, (EXPERTS, HIDDEN, INNER // 32)),
    ):
        values = torch.randint(0 if high else 117, high or 121, shape, generator=g, device="cuda", dtype=torch.uint8)
        setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    plan = {"activation": "silu"}
    kernels.marlin_mxfp4_moe_weights(plan, module)
    module.num_local_experts, module.ep_size = EXPERTS, 1
    return kernels, plan, module


def experts(rows: int) -> Iterator[Case]:
    def prepare() -> Any:
        kernels, plan, module = _marlin_weights()

        def make(seed: int) -> Inputs:
            g = seeded(100 + rows + seed)
            ids = torch.rand(rows, EXPERTS, generator=g, device="cuda").argsort(-1)[:, :TOP_K].int().contiguous()
            return normal(g, rows, HIDDEN), uniform(g, rows, TOP_K), ids

        return make, lambda inputs: kernels.marlin_mxfp4_local_moe_apply(plan, inputs[0], module, *inputs[1:])

    used = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows)
    flops = 6.0 * HIDDEN * INNER * rows * TOP_K
    name = "tokenspeed Marlin MXFP4 W4A16, without a shared expert"
    yield _peer("moe_fp4", name, {"T": rows}, used * EXPERT_BYTES + rows * HIDDEN * 4, flops, prepare)


def cases(tokens: list[int] | None) -> Iterator[Case]:
    """All rows. tokens: numbers of rows, or the default ones."""
    for rows in token_counts(tokens):
        yield from hyper_connections(rows)
        yield from router(rows)
        yield from projection(rows)
        yield from linears(rows)
        yield from experts(rows)
