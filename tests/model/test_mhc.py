# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections against the independent implementation and the published Sinkhorn example."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cedar.model.checkpoint import CheckpointReader
from cedar.model.mhc import HyperConnection
from cedar.ops.mhc import collapse, expand, mix, sinkhorn

NAMES = ["tiny-a", "tiny-b"]


def unit(golden: Path, name: str, key: str) -> Tensor:
    return torch.from_numpy(np.load(golden / name / "units_layers.npz")[key])


def connection(golden: Path, name: str) -> HyperConnection:
    reader = CheckpointReader(golden / name / "checkpoint")
    module = HyperConnection(reader.config)
    module.load(reader.read, "layers.3.hc_attn")
    return module


def sinkhorn_on_the_matrix(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """The textbook form: divide rows and columns of the matrix itself."""
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_equal_the_golden_ones(golden: Path, name: str) -> None:
    pre, post, comb = mix(unit(golden, name, "mhc_streams"), connection(golden, name).mixing)
    for value, key in ((pre, "mhc_pre"), (post, "mhc_post"), (comb, "mhc_comb")):
        torch.testing.assert_close(value, unit(golden, name, key), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_collapse_and_expand_equal_the_golden_ones(golden: Path, name: str) -> None:
    streams = unit(golden, name, "mhc_streams")
    collapsed = collapse(streams, unit(golden, name, "mhc_pre_in"))
    torch.testing.assert_close(collapsed, unit(golden, name, "mhc_collapsed"), atol=1e-6, rtol=1e-6)
    expanded = expand(
        unit(golden, name, "mhc_sub_output"), streams, unit(golden, name, "mhc_post"), unit(golden, name, "mhc_comb")
    )
    torch.testing.assert_close(expanded, unit(golden, name, "mhc_expanded"), atol=1e-6, rtol=1e-6)


def test_sinkhorn_of_the_published_example() -> None:
    logits = torch.tensor([[0.3, -1, 0.5, 2], [0, 0.7, -0.4, 1], [1.5, 0.2, -0.6, 0], [-2, 0.1, 0.9, 0.4]])
    expected = torch.tensor(
        [
            [0.177180, 0.061652, 0.243005, 0.518162],
            [0.173130, 0.445124, 0.130316, 0.251430],
            [0.623179, 0.216838, 0.085692, 0.074289],
            [0.026510, 0.276385, 0.540987, 0.156117],
        ]
    )
    torch.testing.assert_close(sinkhorn(logits[None], 1e-6, 20)[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_by_scaling_vectors_is_sinkhorn_on_the_matrix(spread: float, iterations: int) -> None:
    logits = torch.randn(200, 4, 4, generator=torch.Generator().manual_seed(7)) * spread
    expected = sinkhorn_on_the_matrix(logits.double(), 1e-6, iterations)
    torch.testing.assert_close(sinkhorn(logits, 1e-6, iterations).double(), expected, atol=2e-6, rtol=0)


def test_columns_of_comb_sum_to_one() -> None:
    comb = sinkhorn(torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(8)), 1e-6, 20)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), atol=1e-5, rtol=0)


def test_the_first_index_of_comb_is_the_source_stream() -> None:
    streams = torch.eye(4)[None] * torch.tensor([1.0, 2.0, 3.0, 4.0])  # stream i is (i + 1) times unit vector i
    comb = torch.zeros(1, 4, 4)
    comb[0, 2, 0] = 1.0
    expanded = expand(torch.zeros(1, 4), streams, torch.zeros(1, 4), comb)
    assert expanded[0, 0].tolist() == [0, 0, 3, 0]
    assert not expanded[0, 1:].any()


def test_renumbering_the_streams_renumbers_the_coefficients(golden: Path) -> None:
    module, order = connection(golden, "tiny-a"), torch.tensor([2, 0, 3, 1])
    streams = unit(golden, "tiny-a", "mhc_streams")
    pre, post, comb = mix(streams, module.mixing)
    outputs = torch.cat([order, 4 + order, (8 + 4 * order[:, None] + order).flatten()])
    fn = module.fn.view(24, 4, -1)
    module.fn.copy_(fn[outputs][:, order].flatten(1))
    module.base.copy_(module.base[outputs].clone())
    moved = mix(streams[:, order], module.mixing)
    for value, expected in zip(moved, (pre[:, order], post[:, order], comb[:, order][:, :, order]), strict=True):
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)


def test_bfloat16_streams_are_mixed_in_float32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(9)
    streams, output = torch.randn(6, 4, 64, generator=generator).bfloat16(), torch.randn(6, 64, generator=generator).bfloat16()
    post, comb = torch.rand(6, 4, generator=generator), torch.rand(6, 4, 4, generator=generator)
    assert torch.equal(expand(output, streams, post, comb), expand(output.float(), streams.float(), post, comb).bfloat16())
    assert torch.equal(collapse(streams, post), collapse(streams.float(), post).bfloat16())
