# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's part of the hyper-connections: what it is given, when it is not asked, and its results on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_gemm_support import BF16, Kernels, gpu, needs_package, normal, refusal, run, run_package
from native_support import assert_close, seeded

import cedar.ops.peer_deep_gemm_mhc
from cedar.ops.mhc import Crossing, Gates, Mixing, Written, mega_mhc
from cedar.ops.norm import Norm

assert cedar.ops.peer_deep_gemm_mhc  # importing it adds the body

BOUND = 4e-3
"""Weights lose up to 2^-10 of themselves, all towards 0."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels.put(monkeypatch)


def inputs(g: torch.Generator, rows: int, hidden: int, hc: int = 4, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    """Arguments whose coefficients are far from 0 and 1."""
    outputs = (2 + hc) * hc
    rand = lambda *shape: torch.rand(shape, generator=g, device=g.device)  # noqa: E731
    written = Written(normal(g, rows, hidden).to(dtype), 2 * rand(rows, hc), rand(rows, hc, hc) / hc)
    fn = normal(g, outputs, hc * hidden) * (hc * hidden) ** -0.5
    mixing = Mixing(fn, rand(outputs) + 0.5, normal(g, outputs), 1e-6, 1e-20, 20)
    return normal(g, rows, hc, hidden).to(dtype), written, rand(rows, hc), mixing, Norm(rand(hidden) + 0.5, 1e-20)


def assert_crosses(actual: Crossing, expected: Crossing) -> None:
    assert torch.equal(actual.streams, expected.streams)
    assert (actual.normed is None) == (expected.normed is None)
    assert actual.normed is None or torch.equal(actual.normed, expected.normed)
    assert actual.gates is not None
    assert expected.gates is not None
    for name, one, other in zip(Gates._fields, actual.gates, expected.gates, strict=True):
        assert one.shape == other.shape, name
        assert_close(one, other, BOUND)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (64, 32), (65, 128), (300, 128), (9000, 16)])
def test_coefficients_differ_from_the_reference(kernels: Kernels, rows: int, hidden: int) -> None:
    arguments = inputs(seeded(rows), rows, hidden)
    assert_crosses(run(mega_mhc, *arguments), mega_mhc(*arguments))
    assert kernels.calls == ["tf32_hc_prenorm_gemm"]


def test_what_is_left_out_is_computed(kernels: Kernels) -> None:
    streams, written, _, mixing, norm = inputs(seeded(1), 5, 64)
    first = (streams, None, None, mixing, None)
    assert_crosses(run(mega_mhc, *first), mega_mhc(*first))
    strided = (streams.expand(2, *streams.shape).transpose(0, 1)[:, 0], written, written.post, mixing, norm)
    assert_crosses(run(mega_mhc, *strided), mega_mhc(*strided))


def test_a_boundary_that_it_does_not_take_fails(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    streams, written, pre, _, norm = inputs(seeded(2), 3, 64)
    assert refusal(caplog, mega_mhc, streams, written, pre, None, norm).startswith("no coefficients are asked for")
    wide = inputs(seeded(2), 3, 64, dtype=torch.float32)
    assert refusal(caplog, mega_mhc, *wide) == "streams are torch.float32; it takes bfloat16"
    for hidden, hc, shape in ((24, 4, "24 x 96"), (64, 3, "15 x 192"), (64, 6, "48 x 384")):
        why = f"fn is {shape}; it takes multiples of 8, up to 32, by multiples of 64"
        assert refusal(caplog, mega_mhc, *inputs(seeded(2), 3, hidden, hc)) == why
    assert kernels.calls == []


@pytest.mark.parametrize("rows", [1, 7, 130, 1024])
@pytest.mark.gpu
@needs_package
def test_the_package_mixes_otherwise(rows: int) -> None:
    arguments = inputs(gpu(rows), rows, 5120)
    assert_crosses(run_package(mega_mhc, *arguments), mega_mhc(*arguments))
