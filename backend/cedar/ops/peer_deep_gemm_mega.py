# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's kernels for a whole boundary and a whole router, which it has for Blackwell GPUs since its version 2.8.

Both count their blocks in memory of the stream that they run on, which is set to zero when a stream is first used: not while a
graph is captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cedar.ops.mhc import Crossing, Gates, Mixing, Written
from cedar.ops.norm import Norm
from cedar.ops.peer_deep_gemm import kernels, made_once
from cedar.ops.peer_packages import PeerUnsupported

_STREAMS = 4
_PARTS, _PART = 16, 64
"""Parts of a sum, and what a part is a multiple of."""
_GATE_DEPTH, _GATE_LANES = 256, 4
_MOST_EXPERTS, _MOST_CHOSEN = 512, 32
_POST_SCALE = 2.0
_LARGEST = 2.0**100
"""Of a router's input: its logits stay finite."""


def cross(streams: Tensor, written: Written | None, pre: Tensor | None, mixing: Mixing | None, norm: Norm | None) -> Crossing:
    """`mega_mhc` in one launch."""
    if written is None or pre is None or mixing is None or norm is None:
        raise PeerUnsupported("it has one kernel for a whole boundary, and a part is left out")
    rows, hc, hidden = streams.shape
    if streams.dtype is not torch.bfloat16 or hc != _STREAMS or hidden % (_PARTS * _PART):
        raise PeerUnsupported(
            f"streams are {streams.dtype}, {hc} of {hidden}; it takes {_STREAMS} in bfloat16, by multiples of {_PARTS * _PART}"
        )
    scales, weight = _constants(mixing, norm)
    package = _deterministic()
    new = torch.empty_like(streams, memory_format=torch.contiguous_format)
    gates = Gates(*(x.new_empty(x.shape) for x in (pre, written.post, written.comb)))
    normed = streams.new_empty(rows, hidden)
    package.mega_mhc(
        written.output.contiguous(),
        streams.contiguous(),
        pre.contiguous()[..., None],
        written.post.contiguous()[..., None],
        written.comb.contiguous(),
        mixing.fn,
        scales,
        mixing.base,
        hc,
        mixing.norm_eps,
        mixing.eps,
        _POST_SCALE,
        mixing.eps,
        mixing.iterations,
        weight,
        norm.eps,
        1.0,
        new,
        gates.pre[..., None],
        gates.post[..., None],
        gates.comb,
        y_bf16=normed,
    )
    return Crossing(new, gates, normed)


def _deterministic() -> Any:
    """The package, told to cut sums into as many parts for any number of rows."""
    package = kernels()
    package.use_deterministic_algorithms(True)
    return package


def _constants(mixing: Mixing, norm: Norm) -> tuple[Tensor, Tensor]:
    """The three scales, and the norm's weight in bfloat16, both as the checkpoint has them."""
    scales, same_scales = made_once(mixing.scale, lambda: _three(mixing.scale))
    weight, same_weight = made_once(norm.weight, lambda: _narrow(norm.weight))
    if not same_scales:
        raise PeerUnsupported("scales differ inside of pre, post or comb")
    if not same_weight:
        raise PeerUnsupported("bfloat16 does not hold the norm's weight")
    return scales, weight


def _three(scale: Tensor) -> tuple[Tensor, Tensor]:
    """One scale each for pre, post and comb, and whether that is all of them, on the CPU."""
    firsts = scale[::_STREAMS][:3].contiguous()
    counts = torch.tensor([_STREAMS, _STREAMS, _STREAMS**2], device=scale.device)
    return firsts, (firsts.repeat_interleave(counts) == scale).all().cpu()


def _narrow(weight: Tensor) -> tuple[Tensor, Tensor]:
    narrow = weight.to(torch.bfloat16)
    return narrow, (narrow.float() == weight).all().cpu()


def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scaling: float, image_bias: Tensor | None, image: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`mega_gate` in one launch. Rows with NaN or infinity, which would stop the GPU, are routed as if those were 0."""
    experts, hidden = weight.shape
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        raise PeerUnsupported(f"inputs are {x.dtype} and the weight is {weight.dtype}; it takes bfloat16")
    if hidden % _GATE_DEPTH or experts % _GATE_LANES or experts > _MOST_EXPERTS or top_k > _MOST_CHOSEN:
        raise PeerUnsupported(
            f"{top_k} of {experts} experts of {hidden} inputs are to be chosen; it takes up to {_MOST_CHOSEN} of {_MOST_EXPERTS} "
            f"by multiples of {_GATE_LANES}, and inputs by multiples of {_GATE_DEPTH}"
        )
    if image is None or image_bias is None:
        image = image_bias = None  # both or neither
    x = torch.nan_to_num(x, 0.0, 0.0, 0.0).clamp(-_LARGEST, _LARGEST)
    ids, weights = _deterministic().bf16_mega_gate(
        x.contiguous(), weight, top_k, False, 0, scaling, 0, bias=bias, image_bias=image_bias, image_token_mask=image
    )
    return ids, weights
