# SPDX-License-Identifier: Apache-2.0
"""The trained parameters, by the names of the released layout, and how each is stored there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from perf.quality import fake
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.model.layout import expected_tensors

Lookup = Callable[[str], Tensor]

_WIDE = ("embed.weight", ".gate.weight", "_fn", "q_weight", "k_weight")
"""Matrices that stay float32: tables, whose rows' gradients are sums of many, and what is computed in float32."""


def is_buffer(name: str) -> bool:
    """Moved by the load balance, not by a gradient (the image bias: by nothing)."""
    return name.endswith((".gate.bias", ".gate.bias_vl"))


class Weights(nn.Module):
    """float32 parameters. A layer's routed experts and, last, its shared expert are two tensors, ``layers.L.ffn.w13``
    [E + 1, 2 I, D] (w1, then w3) and ``.w2`` [E + 1, D, I]; all others have their released names and shapes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.specs = {name: spec for name, spec in expected_tensors(config, drafter=False).items() if not name.endswith(".scale")}
        self.experts, self.inner = config.n_routed_experts, config.moe_intermediate_size
        for name, shape in self._shapes():
            value = torch.zeros(shape)
            if is_buffer(name):
                self.register_buffer(_key(name), value)
            else:
                self.register_parameter(_key(name), nn.Parameter(value))

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, spec in self.specs.items():
            if "experts" not in name:
                yield name, spec.shape
        count, hidden = self.experts + 1, self.config.hidden_size
        for layer in self.config.layers:
            yield f"layers.{layer.index}.ffn.w13", (count, 2 * self.inner, hidden)
            yield f"layers.{layer.index}.ffn.w2", (count, hidden, self.inner)

    def __call__(self, name: str) -> Tensor:
        """The parameter or buffer of that name."""
        value: Tensor = getattr(self, _key(name))
        return value

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters by name."""
        for key, value in self.named_parameters():
            yield key.replace("/", "."), value

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Linears keep the size of what they are given; what writes to the streams starts small; comb starts near identity."""
        random = torch.Generator().manual_seed(seed)
        for name, value in self.named():
            value.copy_(_initial(name, value.shape, self.config, random))

    def view(self, dtype: torch.dtype, *, quantised: bool) -> Lookup:
        """Lookup for one forward: matrices in ``dtype``, everything else float32; ``quantised`` as the checkpoint stores them."""

        def lookup(name: str) -> Tensor:
            value = self(name)
            if quantised:
                value = fake.straight_through(value, self.stored(name))
            return value if value.dim() < 2 or name.endswith(_WIDE) else value.to(dtype)

        return lookup

    @torch.no_grad()
    def stored(self, name: str) -> Tensor:
        """The values that the checkpoint can hold of this parameter, float32."""
        value = self(name)
        if name.endswith((".ffn.w13", ".ffn.w2")):
            return torch.cat([fake.mxfp4(value[:-1]), fake.fp8_tiles(value[-1:])])
        if name.endswith("engram.embed.weight"):
            return fake.fp8_groups(value)
        kind = self.specs[name].dtypes[0]
        if kind == "F8_E4M3":
            return fake.fp8_tiles(value)
        return value.bfloat16().float() if kind == "BF16" else value

    def tensor(self, name: str) -> Tensor:
        """One tensor of the released layout, float32, not quantised."""
        if "experts" not in name:
            return self(name).detach()
        prefix, _, rest = name.partition(".ffn.")
        parts = rest.split(".")
        number = self.experts if parts[0] == "shared_experts" else int(parts[1])
        return self._expert(prefix, number, parts[-2]).detach()

    def _expert(self, prefix: str, number: int, part: str) -> Tensor:
        if part == "w2":
            return self(f"{prefix}.ffn.w2")[number]
        both = self(f"{prefix}.ffn.w13")[number]
        return both[: self.inner] if part == "w1" else both[self.inner :]


def _key(name: str) -> str:
    return name.replace(".", "/")


def _initial(name: str, shape: torch.Size, config: ModelConfig, random: torch.Generator) -> Tensor:
    if name.endswith(("norm.weight", "q_weight", "k_weight", "_scale")):
        return torch.ones(shape)
    if name.endswith("attn_sink"):
        return torch.zeros(shape)
    if name.endswith("_base"):
        hc = config.hc_mult
        return torch.cat([torch.zeros(2 * hc), 2 * torch.eye(hc).flatten()])
    std: float = shape[-1] ** -0.5
    if name.endswith("_fn"):
        std = 0.01
    elif name == "embed.weight" or name.endswith("engram.embed.weight"):
        std = 1.0
    elif name.endswith(("wo_b.weight", "ffn.w2", "engram.wkv.weight")):
        std *= (2 * config.num_hidden_layers) ** -0.5
    elif name == "head.weight":
        std *= 0.1
    return torch.randn(shape, generator=random) * std
