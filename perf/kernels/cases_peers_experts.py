# SPDX-License-Identifier: Apache-2.0
"""Routed experts, without a shared one, by Marlin (tokenspeed-kernel), by DeepGEMM's grouped FP8 product and by Humming."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from perf.kernels.case import Case
from perf.kernels.cases import BF16, EXPERT_BYTES, EXPERTS, HIDDEN, INNER, TOP_K, normal, seeded, uniform
from perf.kernels.peers import deep_gemm, humming, tokenspeed
from perf.kernels.peers_data import Chain, Inputs, compiled, dequantised_blocks, fp8, peer, quantise, relative
from torch import Tensor

from cedar.cache.formats import unpack_mxfp4

FP8_BOUND = 0.1
"""Of chains that round activations to FP8, against activations as they are."""


def experts(rows: int) -> Iterator[Case]:
    used = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows)
    size, flops = used * EXPERT_BYTES + rows * HIDDEN * 4, 6.0 * HIDDEN * INNER * rows * TOP_K
    twice = used * 3.0 * HIDDEN * INNER + rows * HIDDEN * 4
    some: dict[str, Any] = {"facts": {"T": rows}, "flops": flops, "note": "without the shared expert"}
    name = "tokenspeed Marlin MXFP4 W4A16"
    yield peer("moe_fp4", name, size=size, prepare=lambda: _marlin(rows), bound=0.02, **some)
    name = "DeepGEMM grouped FP8, weights in FP8, routing beforehand"
    yield peer("moe_fp4", name, size=twice, prepare=lambda: _grouped(rows), bound=FP8_BOUND, peak="fp8", **some)
    for activations, bound in (("FP8", FP8_BOUND), ("bf16", 0.02)):
        name = f"Humming MXFP4, activations in {activations}"
        build = lambda activations=activations: _humming(rows, activations)  # noqa: E731
        yield peer("moe_fp4", name, size=size, prepare=build, bound=bound, **some)


# ---- operands and reference ----


def _route(g: torch.Generator, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, int32 experts and the weights of their outputs."""
    ids = torch.rand(rows, EXPERTS, generator=g, device="cuda").argsort(-1)[:, :TOP_K].int().contiguous()
    weights = uniform(g, rows, TOP_K)
    return normal(g, rows, HIDDEN), ids, weights / weights.sum(-1, keepdim=True) * 1.5


class _Weights(NamedTuple):
    """MXFP4 as a checkpoint has it: codes [E, N, K/2], the low nibble first, and UE8M0 scales [E, N, K/32], uint8."""

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor

    def dense(self, expert: int) -> tuple[Tensor, Tensor]:
        return unpack_mxfp4(self.w13[expert], self.s13[expert]), unpack_mxfp4(self.w2[expert], self.s2[expert])


@functools.cache
def _weights() -> _Weights:
    g = seeded(6)

    def some(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device="cuda", dtype=torch.uint8)

    w13, w2 = some(0, 256, EXPERTS, 2 * INNER, HIDDEN // 2), some(0, 256, EXPERTS, HIDDEN, INNER // 2)
    return _Weights(w13, some(117, 121, EXPERTS, 2 * INNER, HIDDEN // 32), w2, some(117, 121, EXPERTS, HIDDEN, INNER // 32))


def _error(dense: Any, inputs: Inputs, actual: Tensor) -> float:
    """Of the first and the last row. dense(expert): its two matrices in float32."""
    x, ids, weights = inputs[:3]
    checked, expected = sorted({0, len(x) - 1}), []
    for row in checked:
        out = torch.zeros(HIDDEN, device="cuda")
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            w13, w2 = dense(expert)
            gate, up = (w13 @ x[row].float()).chunk(2)
            out += weight * (w2 @ (torch.nn.functional.silu(gate) * up))
        expected.append(out)
    return relative(actual[checked], torch.stack(expected))


# ---- Marlin ----


@functools.cache
def _marlin_module() -> tuple[Any, dict[str, str], torch.nn.Module]:
    kernels, module, plan = tokenspeed("ops.moe.marlin.mxfp4"), torch.nn.Module(), {"activation": "silu"}
    for name, values in zip(("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"), _weights(), strict=True):
        setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    kernels.marlin_mxfp4_moe_weights(plan, module)
    module.num_local_experts, module.ep_size = EXPERTS, 1  # type: ignore[assignment]
    return kernels, plan, module


def _marlin(rows: int) -> Chain:
    kernels, plan, module = _marlin_module()

    def run(inputs: Inputs) -> Tensor:
        x, ids, weights = inputs
        return kernels.marlin_mxfp4_local_moe_apply(plan, x, module, weights, ids)  # type: ignore[no-any-return]

    make = lambda seed: _route(seeded(100 + rows + seed), rows)  # noqa: E731
    return Chain(make, run, lambda inputs, out: _error(_weights().dense, inputs, out))


# ---- DeepGEMM ----


@functools.cache
def _fp8_weights() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    g, made = seeded(7), []
    for outputs, inputs in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        codes = torch.empty(EXPERTS, outputs, inputs, dtype=torch.float8_e4m3fn, device="cuda")
        for expert in range(EXPERTS):
            codes[expert] = fp8(normal(g, outputs, inputs))
        made.append((codes, uniform(g, EXPERTS, outputs // 128, inputs // 128) * 0.02 + 0.01))
    return made[0], made[1]


def _activate(hidden: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = hidden.float().chunk(2, -1)
    return quantise(torch.nn.functional.silu(gate) * up)


def _combine(outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (outputs[places].float() * weights[..., None]).sum(1).to(BF16)


def _weigh(outputs: Tensor, weights: Tensor) -> Tensor:
    return (outputs.view(*weights.shape, -1).float() * weights[..., None]).sum(1).to(BF16)


def _places(ids: Tensor, align: int) -> tuple[Tensor, Tensor, Tensor]:
    """A block of a multiple of align rows per expert: where a token's six go, which token a row has, whose row it is."""
    flat = ids.flatten().long()
    count = torch.bincount(flat, minlength=EXPERTS)
    padded = (count + align - 1) // align * align
    order = flat.argsort(stable=True)
    expert = flat[order]
    rank = torch.arange(len(order), device=ids.device) - (count.cumsum(0) - count)[expert]
    place = (padded.cumsum(0) - padded)[expert] + rank
    places = torch.empty_like(order).scatter_(0, order, place).view(ids.shape)
    source = torch.zeros(int(padded.sum()), dtype=torch.long, device=ids.device).scatter_(0, place, order // TOP_K)
    return places, source, torch.repeat_interleave(torch.arange(EXPERTS, device=ids.device), padded).int()


def _grouped(rows: int) -> Chain:
    library = deep_gemm()
    align = getattr(library, "get_mk_alignment_for_contiguous_layout", None) or library.get_m_alignment_for_contiguous_layout
    w13, w2 = _fp8_weights()
    cast, activate, combine = compiled(quantise), compiled(_activate), compiled(_combine)

    def make(seed: int) -> Inputs:
        x, ids, weights = _route(seeded(100 + rows + seed), rows)
        places, source, layout = _places(ids, align())
        hidden = torch.empty(len(source), 2 * INNER, dtype=BF16, device="cuda")
        return x, ids, weights, places, source, layout, hidden, torch.empty(len(source), HIDDEN, dtype=BF16, device="cuda")

    def run(inputs: Inputs) -> Tensor:
        x, _, weights, places, source, layout, hidden, y = inputs
        codes, scales = cast(x)
        gathered = codes.view(torch.uint8)[source].view(torch.float8_e4m3fn), scales[source]
        library.m_grouped_fp8_gemm_nt_contiguous(gathered, w13, hidden, layout)
        library.m_grouped_fp8_gemm_nt_contiguous(activate(hidden), w2, y, layout)
        return combine(y, places, weights)  # type: ignore[no-any-return]

    def dense(expert: int) -> tuple[Tensor, Tensor]:
        one, other = (dequantised_blocks(codes[expert], scales[expert]) for codes, scales in (w13, w2))
        return one, other

    return Chain(make, run, lambda inputs, out: _error(dense, inputs, out))


# ---- Humming ----


def humming_layer(weight: Tensor, scale: Tensor, codes: str, activations: str) -> tuple[Any, dict[str, Tensor]]:
    """A layer's configuration, and its weights as Humming lays them out.

    weight: uint8 codes [..., N, K * bits / 8] of Humming's format ``codes``. scale: UE8M0 [..., N, K/32], uint8. activations: FP8
    (in groups of 128) or bf16.
    """
    kinds, schema, transform = humming("dtypes"), humming("schema"), humming("transform")
    kind = schema.HummingWeightSchema(
        b_dtype=kinds.DataType.from_str(codes), bs_dtype=kinds.float8e8m0, weight_scale_group_size=32
    )
    eight = schema.HummingInputSchema(a_dtype=kinds.float8e4m3, input_scale_group_size=128)
    given = eight if activations == "FP8" else schema.HummingInputSchema(a_dtype=kinds.bfloat16)
    tensors = {"weight": weight.view(torch.int32), "weight_scale": scale.view(torch.float8_e8m0fnu)}
    more = {"num_experts": len(weight) if weight.dim() == 3 else None, "torch_dtype": BF16, "device": weight.device}
    sizes = weight.shape[-2], scale.shape[-1] * 32
    return transform.prepare_and_transform_humming_tensors(tensors, *sizes, kind, given, **more)  # type: ignore[no-any-return]


def humming_plan(config: Any, rows: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Humming's own heuristics choose for so many rows: arguments of the product, and the tile's configuration."""
    for low, high, tuning in humming("tune").get_heuristics_config(config, gemm_type=kind, device=0):
        if low < rows <= high:
            given = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": kind}
            return {"compute_config": given, "tuning_config": tuning, "valid_shape_m": rows}, tuning
    raise RuntimeError(f"Humming has no configuration for {rows} rows")


@functools.cache
def _humming_layers(activations: str) -> list[tuple[Any, dict[str, Tensor]]]:
    weights = _weights()
    return [humming_layer(*part, "float4e2m1", activations) for part in (weights[:2], weights[2:])]


def _humming(rows: int, activations: str) -> Chain:
    forward, align = humming("forward"), tokenspeed("thirdparty.cuda.marlin_moe").moe_align_block_size
    multiply = tokenspeed("ops.activation.triton").silu_and_mul
    layers = _humming_layers(activations)
    plans = [humming_plan(config, rows * TOP_K, "indexed") for config, _ in layers]
    locks = torch.zeros(2048, dtype=torch.int32, device="cuda")
    weigh = compiled(_weigh)

    def make(seed: int) -> Inputs:
        outputs = [torch.empty(rows * TOP_K, size, dtype=BF16, device="cuda") for size in (2 * INNER, HIDDEN)]
        return (*_route(seeded(100 + rows + seed), rows), outputs)

    def run(inputs: Inputs) -> Tensor:
        x, ids, weights, outputs = inputs
        sorted_by: dict[int, dict[str, Tensor]] = {}
        for layer, (plan, tuning) in enumerate(plans):
            config, tensors = layers[layer]
            size = tuning["block_shape"][0]
            if size not in sorted_by:
                names = ("sorted_ids", "expert_ids", "num_tokens_padded")
                sorted_by[size] = dict(zip(names, align(ids, size, EXPERTS), strict=True))
            codes, scale = forward.may_quant_input(config, x)
            more = {**tensors, **sorted_by[size], **plan, "top_k": 1 if layer else TOP_K, "locks": locks}
            forward.humming_forward(config, codes, input_scale=scale, outputs=outputs[layer], **more)
            x = outputs[1] if layer else multiply(outputs[0])
        return weigh(x, weights)  # type: ignore[no-any-return]

    return Chain(make, run, lambda inputs, out: _error(_weights().dense, inputs, out))
