# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's product for the hyper-connections' coefficients, and the streams' sums of squares; the rest is the reference.

On a Blackwell GPU it is its one kernel for all of it.

The product is TF32: of a weight's mantissa it reads 10 bits, streams are exact. It is summed in parts, as many as fill the GPU,
whose sums PyTorch adds, so a row's last bits depend on how many rows there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.ops.mhc import Crossing, Gates, Mixing, Written, gates_of, mega_mhc
from cedar.ops.norm import Norm
from cedar.ops.peer_deep_gemm import kernels
from cedar.ops.peer_deep_gemm_mega import cross
from cedar.ops.peer_packages import PeerUnsupported, is_blackwell

_ROWS, _DEPTH = 64, 64
"""Of a block of the product."""
_MOST_SPLITS, _BLOCKS = 64, 128
"""Parts of the sums at most, and about how many blocks a GPU runs at once."""
_MOST_OUTPUTS = 32


@mega_mhc.by("deep_gemm")
def _(streams: Tensor, written: Written | None, pre: Tensor | None, mixing: Mixing | None, norm: Norm | None) -> Crossing:
    if is_blackwell(streams.device):
        return cross(streams, written, pre, mixing, norm)
    if mixing is None:
        raise PeerUnsupported("no coefficients are asked for, and it has no kernel for the rest")
    outputs, inputs = mixing.fn.shape
    if streams.dtype is not torch.bfloat16:
        raise PeerUnsupported(f"streams are {streams.dtype}; it takes bfloat16")
    if outputs % 8 or outputs > _MOST_OUTPUTS or inputs % _DEPTH:
        raise PeerUnsupported(
            f"fn is {outputs} x {inputs}; it takes multiples of 8, up to {_MOST_OUTPUTS}, by multiples of {_DEPTH}"
        )
    crossing = mega_mhc.reference(streams, written, pre, None, norm)
    return crossing._replace(gates=_mix(crossing.streams, mixing))


def _mix(streams: Tensor, mixing: Mixing) -> Gates:
    outputs, inputs = mixing.fn.shape
    rows = streams.shape[0]
    splits = _splits(rows, inputs)
    products = mixing.fn.new_empty(splits, rows, outputs)
    squares = mixing.fn.new_empty(splits, rows)
    kernels().tf32_hc_prenorm_gemm(streams.reshape(rows, inputs), mixing.fn, products, squares, splits)
    return gates_of(products.sum(0), squares.sum(0)[:, None] / inputs, mixing)


def _splits(rows: int, inputs: int) -> int:
    """A power of two, because each number is compiled on its own."""
    most = min(_MOST_SPLITS, inputs // _DEPTH, max(1, _BLOCKS // -(-rows // _ROWS)))
    return 1 << (most.bit_length() - 1)
