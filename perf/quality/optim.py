# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices (momentum, orthogonalised; Jordan et al. 2024), AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from perf.quality.weights import Weights
from torch import Tensor, nn

_ADAM = ("embed.weight", "head.weight", ".gate.weight", "_fn", "q_weight", "k_weight")
"""Matrices that are tables, routers or coefficients rather than maps between activations."""


class Muon:
    """Matrices of equal shape are one batch. Its step has the size of an AdamW step of the same learning rate."""

    def __init__(self, matrices: list[Tensor], *, momentum: float = 0.95, decay: float = 0.05) -> None:
        """matrices: views [..., out, in] of parameters."""
        groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            groups[tuple(matrix.shape[-2:])].append(matrix)  # type: ignore[index]
        self._groups = list(groups.items())
        self._momentum, self._decay = momentum, decay
        self._buffers = [
            torch.zeros(sum(m.numel() for m in group) // (shape[0] * shape[1]), *shape, device=group[0].device)
            for shape, group in self._groups
        ]

    @torch.no_grad()
    def step(self, gradients: dict[int, Tensor], rate: Tensor) -> None:
        """gradients: by `id` of the matrix, in its shape. rate: a scalar on the device, so that a captured step reads it anew."""
        for ((rows, cols), group), buffer in zip(self._groups, self._buffers, strict=True):
            gradient = torch.cat([gradients[id(m)].reshape(-1, rows, cols) for m in group])
            buffer.lerp_(gradient, 1 - self._momentum)
            update = orthogonalised(torch.lerp(gradient, buffer, self._momentum)).mul_(rate * (-0.2 * max(rows, cols) ** 0.5))
            parts = torch.split(update, [m.numel() // (rows * cols) for m in group])
            torch._foreach_mul_(group, 1 - rate * self._decay)
            torch._foreach_add_(group, [part.view(m.shape) for part, m in zip(parts, group, strict=True)])

    def state_dict(self) -> list[Tensor]:
        return self._buffers

    def load_state_dict(self, buffers: list[Tensor]) -> None:
        for mine, theirs in zip(self._buffers, buffers, strict=True):
            mine.copy_(theirs)


def orthogonalised(matrices: Tensor) -> Tensor:
    """[n, out, in] with all singular values moved near 1 by five Newton-Schulz steps (bfloat16 on a GPU)."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    out: Tensor = x.mT if tall else x
    return out.to(matrices.dtype)


class Optimiser:
    """Both, with one learning rate; a table's or coefficient's own rate is a multiple of it."""

    def __init__(self, weights: Weights) -> None:
        config = weights.config
        matrices: list[Tensor] = []
        self._sources: list[tuple[nn.Parameter, Tensor]] = []
        adam: dict[float, list[nn.Parameter]] = defaultdict(list)
        for name, value in weights.named():
            if value.dim() < 2 or name.endswith(_ADAM):
                adam[_multiple(name)].append(value)
                continue
            parts = 1
            if name.endswith("ffn.w13"):
                parts = 2  # w1 and w3 of each expert
            elif name.endswith("attn.wq_b.weight"):
                parts = config.num_attention_heads
            elif name.endswith("indexer.wq_b.weight"):
                parts = config.index_n_heads
            elif name.endswith("wo_a.weight"):
                parts = config.o_groups
            elif name.endswith("engram.wkv.weight"):
                parts = config.hc_mult + 1
            view = value.detach().view(*value.shape[:-2], parts, -1, value.shape[-1])
            matrices.append(view)
            self._sources.append((value, view))
        self.muon = Muon(matrices)
        groups: list[dict[str, Any]] = [{"params": params, "multiple": multiple} for multiple, params in adam.items()]
        device = groups[0]["params"][0].device
        on_gpu = device.type == "cuda"
        for group in groups:
            group["lr"] = torch.zeros((), device=device)
        self.adam = torch.optim.AdamW(
            groups, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=on_gpu, capturable=on_gpu, foreach=False
        )
        self.rate = torch.zeros((), device=device)

    def set_rate(self, rate: float) -> None:
        """Of the steps from now on."""
        self.rate.fill_(rate)
        for group in self.adam.param_groups:
            group["lr"].fill_(rate * group["multiple"])

    def step(self) -> None:
        """One step with the parameters' gradients. Reads the rate on the device."""
        self.adam.step()
        gradients = {id(view): value.grad.view(view.shape) for value, view in self._sources if value.grad is not None}
        self.muon.step(gradients, self.rate)

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for value, _ in self._sources:
            value.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def _multiple(name: str) -> float:
    """The rate of a parameter that AdamW moves, over the common rate."""
    if name.endswith("engram.embed.weight"):
        return 2.0
    return 0.25 if name.endswith(("_fn", ".gate.weight")) else 1.0
