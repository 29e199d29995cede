# SPDX-License-Identifier: Apache-2.0
"""The same work by public Hopper kernels (peers.py), in chains where no single one does it; each checked before it is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from perf.kernels import cases_peers_attention
from perf.kernels.case import Case, token_counts
from perf.kernels.cases import (
    BF16,
    EXPERTS,
    GROUP_IN,
    GROUPS,
    HIDDEN,
    LINEARS,
    RANK,
    STREAMS,
    TOP_K,
    normal,
    seeded,
    tiles,
    uniform,
    values,
)
from perf.kernels.cases_peers_engram import engram
from perf.kernels.cases_peers_experts import experts, humming_layer, humming_plan
from perf.kernels.peers import deep_gemm, humming, tokenspeed
from perf.kernels.peers_data import (
    HEAD,
    HEADS,
    Chain,
    Inputs,
    dequantised,
    dequantised_blocks,
    fp8,
    peer,
    quantise,
    records,
    relative,
    rope_table,
    rotated,
)
from torch import Tensor

EPS = 1e-6


# ---- dense linears ----


def linears(rows: int) -> Iterator[Case]:
    for layer, (outputs, inputs) in LINEARS.items():
        size, flops = outputs * inputs + rows * (inputs + 2.0 * outputs), 2.0 * rows * inputs * outputs
        for name, chain, peak in (
            ("DeepGEMM fp8_gemm_nt, inputs in FP8", _fp8_linear, "fp8"),
            ("Humming W8A16, scales of 32 values", _humming_linear, "bf16"),
        ):
            build: Callable[[], Chain] = functools.partial(chain, rows, outputs, inputs)
            yield peer("mxfp8_linear", name, {"T": rows, "layer": layer}, size, flops, build, peak=peak)


def _fp8_linear(rows: int, outputs: int, inputs: int) -> Chain:
    library = deep_gemm()
    aligned = getattr(library, "get_mn_major_tma_aligned_tensor", lambda scales: scales)

    def make(seed: int) -> Inputs:
        g = seeded(seed)
        codes, scales = quantise(normal(g, rows, inputs))
        weight = fp8(normal(g, outputs, inputs)), uniform(g, outputs // 128, inputs // 128) * 0.02 + 0.01
        return (codes, aligned(scales)), weight, torch.empty(rows, outputs, dtype=BF16, device="cuda"), scales

    def error(inputs: Inputs, _: Any) -> float:
        (codes, _), weight, y, scales = inputs
        return relative(y, dequantised(codes, scales) @ dequantised_blocks(*weight).T)

    return Chain(make, lambda inputs: library.fp8_gemm_nt(*inputs[:3]), error)


def _humming_linear(rows: int, outputs: int, inputs: int) -> Chain:
    forward = humming("forward").humming_forward
    locks = torch.zeros(2048, dtype=torch.int32, device="cuda")

    def make(seed: int) -> Inputs:
        g = seeded(seed)
        x, (codes, scales) = normal(g, rows, inputs), tiles(g, outputs, inputs)
        config, tensors = humming_layer(codes.view(torch.uint8), scales.repeat_interleave(32, 0), "float8e4m3", "bf16")
        return x, config, tensors, humming_plan(config, rows, "dense")[0], (codes, scales)

    def run(inputs: Inputs) -> Tensor:
        x, config, tensors, plan, _ = inputs
        return forward(config, x, **tensors, **plan, locks=locks)  # type: ignore[no-any-return]

    return Chain(make, run, lambda inputs, y: relative(y, inputs[0].float() @ values(*inputs[4]).T))


# ---- grouped output projection ----


def projection(rows: int) -> Iterator[Case]:
    """The product alone on FP8 inputs, and with the inverse RoPE and the cast that make them."""
    size = GROUPS * RANK * GROUP_IN + rows * 2.0 * GROUPS * (GROUP_IN + RANK)
    flops = 2.0 * rows * GROUPS * GROUP_IN * RANK
    for name, chain in (
        ("DeepGEMM fp8_einsum, inputs in FP8", _einsum),
        ("tokenspeed inverse RoPE + cast, DeepGEMM fp8_einsum", _turned_einsum),
    ):
        build: Callable[[], Chain] = functools.partial(chain, rows)
        yield peer("wo_a", name, {"T": rows}, size, flops, build, bound=0.06, peak="fp8")


def _projection_weights(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return fp8(normal(g, GROUPS, RANK, GROUP_IN)), uniform(g, GROUPS, RANK // 128, GROUP_IN // 128) * 0.02 + 0.01


def _projected(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.einsum("tgk,grk->tgr", x, dequantised_blocks(*weight))


def _einsum(rows: int) -> Chain:
    library = deep_gemm()

    def make(seed: int) -> Inputs:
        g = seeded(seed)
        codes, scales = quantise(normal(g, rows, GROUPS, GROUP_IN))
        blocks, aligned = GROUP_IN // 128, (rows + 3) // 4 * 4
        buffer = torch.empty(GROUPS * blocks * aligned, device="cuda")  # as the TMA wants scales: a group's column is contiguous
        strided = buffer.as_strided((rows, GROUPS, blocks), (1, blocks * aligned, aligned))
        strided.copy_(scales)
        return (codes, strided), _projection_weights(g), torch.empty(rows, GROUPS, RANK, dtype=BF16, device="cuda")

    def run(inputs: Inputs) -> Tensor:
        library.fp8_einsum("bhr,hdr->bhd", *inputs, recipe=(1, 128, 128))
        return inputs[2]  # type: ignore[no-any-return]

    return Chain(make, run, lambda inputs, y: relative(y, _projected(dequantised(*inputs[0]), inputs[1])))


def _turned_einsum(rows: int) -> Chain:
    library, cast = deep_gemm(), tokenspeed("ops.attention.dsv4.triton").dsv4_fused_inv_rope_fp8_quant
    table = rope_table()

    def make(seed: int) -> Inputs:
        g = seeded(seed)
        positions = torch.randint(0, len(table), (rows,), generator=g, device="cuda")
        out = torch.empty(rows, GROUPS, RANK, dtype=BF16, device="cuda")
        return normal(g, rows, HEADS, HEAD), positions, _projection_weights(g), out

    def run(inputs: Inputs) -> Tensor:
        x, positions, weight, out = inputs
        quantised = cast(x, positions, table, GROUPS, HEADS // GROUPS, tma_aligned_scales=False)
        library.fp8_einsum("bhr,hdr->bhd", quantised, weight, out, recipe=(1, 128, 128))
        return out  # type: ignore[no-any-return]

    def error(inputs: Inputs, y: Tensor) -> float:
        x, positions, weight, _ = inputs
        return relative(y, _projected(rotated(x, positions, table, inverse=True).float().view(rows, GROUPS, GROUP_IN), weight))

    return Chain(make, run, error)


# ---- router ----


def router(rows: int) -> Case:
    def prepare() -> Chain:
        choose = tokenspeed("thirdparty.cuda.routing").softplus_sqrt_topk_flash

        def make(seed: int) -> Inputs:
            g = seeded(seed)
            given = normal(g, rows, HIDDEN), normal(g, EXPERTS, HIDDEN) * 0.02, normal(g, EXPERTS, dtype=torch.float32) * 0.1
            return *given, torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda"), uniform(g, rows, TOP_K)

        def run(inputs: Inputs) -> None:
            x, weight, bias, ids, weights = inputs
            choose(torch.mm(x, weight.t(), out_dtype=torch.float32), bias, ids, weights, 1.5, True)

        def spread(ids: Tensor, weights: Tensor) -> Tensor:
            return torch.zeros(rows, EXPERTS, device="cuda").scatter_(1, ids.long(), weights.float())

        def error(inputs: Inputs, _: Any) -> float:
            x, weight, bias, ids, weights = inputs
            scores = torch.nn.functional.softplus(x.float() @ weight.float().T).sqrt()
            best = (scores + bias).topk(TOP_K).indices
            chosen = scores.gather(-1, best)
            return relative(spread(ids, weights), spread(best, chosen / chosen.sum(-1, keepdim=True) * 1.5))

        return Chain(make, run, error)

    size, flops = 2.0 * (EXPERTS + rows) * HIDDEN, 2.0 * EXPERTS * HIDDEN * rows
    name = "cuBLAS bf16, tokenspeed softplus_sqrt_topk_flash"
    return peer("mega_gate", name, {"T": rows}, size, flops, prepare, bound=0.02)


# ---- hyper-connections ----


def hyper_connections(rows: int) -> Iterator[Case]:
    """A boundary with delayed coefficients, which is V4.1's, for two numbers of splits of the product."""
    size, flops = 24.0 * STREAMS * HIDDEN * 4 + rows * HIDDEN * 20, 2.0 * 24 * STREAMS * HIDDEN * rows
    for splits in (64, 16) if rows <= 128 else (16, 8) if rows <= 1024 else (2, 1):
        name = f"tokenspeed post, DeepGEMM in {splits} splits, tokenspeed Sinkhorn, norm"
        build = functools.partial(_boundary, rows, splits)
        yield peer("mega_mhc", name, {"T": rows}, size, flops, build, peak="tf32")


def _boundary(rows: int, splits: int) -> Chain:
    library, parts = deep_gemm(), tokenspeed("ops.residual.triton")

    def make(seed: int) -> Inputs:
        g = seeded(seed)
        new = torch.empty(rows, 4, device="cuda"), torch.empty(rows, 4, device="cuda"), torch.empty(rows, 16, device="cuda")
        base = normal(g, 24, dtype=torch.float32) * 0.1
        coefficients = normal(g, 24, STREAMS * HIDDEN, dtype=torch.float32) * 0.01, uniform(g, 3) + 0.5, base
        boundary = normal(g, rows, HIDDEN), normal(g, rows, 4, HIDDEN), uniform(g, rows, 4) * 2, uniform(g, rows, 4, 4) / 2
        sums = torch.empty(splits, rows, 24, device="cuda"), torch.empty(splits, rows, device="cuda")
        y = torch.empty(rows, HIDDEN, dtype=BF16, device="cuda")
        return boundary, coefficients, sums, new, uniform(g, rows, 4), (uniform(g, HIDDEN) + 0.5).to(BF16), y

    def run(inputs: Inputs) -> Tensor:
        boundary, (fn, scale, base), (sums, squares), (pre, post, comb), previous, weight, y = inputs
        streams = parts.triton_mhc_post(*boundary)
        library.tf32_hc_prenorm_gemm(streams.view(rows, STREAMS * HIDDEN), fn, sums, squares, splits)
        sizes = {"hidden_size": HIDDEN, "sinkhorn_iters": 20, "n_splits": splits, "num_tokens": rows}
        parts.mhc_pre_mix_hc4(sums, squares, scale, base, pre, post, comb, rms_eps=EPS, hc_eps=EPS, **sizes)
        parts.mhc_pre_layer_norm_hc4(previous, streams, weight, y, eps=EPS)
        return streams  # type: ignore[no-any-return]

    def error(inputs: Inputs, streams: Tensor) -> float:
        boundary, coefficients, _, (pre, post, comb), previous, weight, y = inputs
        expected = _crossed(boundary, coefficients, previous, weight)
        pairs = zip((streams, pre, post, comb.view(rows, 4, 4), y), expected, strict=True)
        return max(relative(one, other) for one, other in pairs)

    return Chain(make, run, error)


def _crossed(boundary: Inputs, coefficients: Inputs, previous: Tensor, weight: Tensor) -> Inputs:
    """Streams, next coefficients (pre, post, comb) and the sub-layer's input in plain PyTorch."""
    (x, residual, post, comb), (fn, scale, base) = boundary, coefficients
    streams = torch.einsum("tij,tih->tjh", comb, residual.float()) + post[:, :, None] * x.float()[:, None]
    streams = streams.to(BF16)
    flat = streams.float().flatten(1)
    mixes = (flat @ fn.T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + EPS
    new = torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8]) * 2
    mixed = torch.softmax((mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + EPS
    mixed = mixed / (mixed.sum(1, keepdim=True) + EPS)
    for _ in range(19):
        mixed = mixed / (mixed.sum(2, keepdim=True) + EPS)
        mixed = mixed / (mixed.sum(1, keepdim=True) + EPS)
    y = (previous[:, :, None] * streams.float()).sum(1).to(BF16).float()
    y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPS) * weight.float()
    return streams, pre, new, mixed, y


# ---- window records ----


def window(rows: int) -> Case:
    """The nearest public kernel: it turns a key and stores 584 bytes, and normalises, instead of the key, a query of one head."""

    def prepare() -> Chain:
        store, table = tokenspeed("thirdparty.cuda.dsv4_attention").fused_qnorm_rope_kv_insert, rope_table()

        def make(seed: int) -> Inputs:
            g = seeded(seed)
            positions = torch.randint(0, len(table), (rows,), generator=g, device="cuda")
            query, cache, slots = normal(g, rows, 1, HEAD), records(g, rows)[0], torch.arange(rows, device="cuda")
            return query, normal(g, rows, HEAD), cache.view(len(cache), -1), slots, positions, query.clone()

        def run(inputs: Inputs) -> Tensor:
            store(*inputs[:5], table, EPS, 64)
            return inputs[0]  # type: ignore[no-any-return]

        def error(inputs: Inputs, query: Tensor) -> float:
            x = inputs[5].float()
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
            return relative(query, rotated(x.to(BF16), inputs[4], table))

        return Chain(make, run, error)

    name = "tokenspeed query norm, RoPE, insert of 584 B"
    return peer("window_store", name, {"T": rows}, rows * (HEAD * 6.0 + 584), 0.0, prepare)


def cases(tokens: list[int] | None, host_gib: int = 8) -> Iterator[Case]:
    """All rows. tokens: numbers of rows, or the default ones. host_gib: of the Engram table in pinned host memory; 0: none."""
    for rows in token_counts(tokens):
        yield from hyper_connections(rows)
        yield router(rows)
        yield from projection(rows)
        yield from linears(rows)
        yield from engram(rows, host_gib)
        yield window(rows)
        yield from experts(rows)
    yield from cases_peers_attention.cases(tokens)
