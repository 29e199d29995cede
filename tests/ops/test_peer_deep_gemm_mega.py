# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's kernels for whole operations on Blackwell: what they are given, and when they are not asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_gemm_support import BF16, Kernels, refusal, run
from native_support import assert_close, seeded
from test_peer_deep_gemm_experts import gate
from test_peer_deep_gemm_mhc import inputs

import cedar.ops.peer_deep_gemm_experts
from cedar.ops import peer_packages
from cedar.ops.mhc import mega_mhc
from cedar.ops.moe import mega_gate
from cedar.ops.norm import Norm

assert cedar.ops.peer_deep_gemm_experts  # importing it adds the body


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """On a Blackwell GPU."""
    monkeypatch.setattr(peer_packages, "_generation", lambda device: 10)
    return Kernels.put(monkeypatch)


def boundary(seed: int, rows: int, hidden: int = 1024, dtype: torch.dtype = BF16, hc: int = 4) -> tuple[Any, ...]:
    """Arguments whose scales and norm are as a checkpoint has them."""
    streams, written, pre, mixing, norm = inputs(seeded(seed), rows, hidden, hc, dtype)
    counts = torch.tensor([hc, hc, hc * hc])
    scale = torch.tensor([0.6, 1.1, 1.4]).repeat_interleave(counts)
    return streams, written, pre, mixing._replace(scale=scale), Norm(norm.weight.to(BF16).float(), norm.eps)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 1024), (65, 2048)])
def test_a_boundary_differs_from_the_reference(kernels: Kernels, rows: int, hidden: int) -> None:
    arguments = boundary(rows, rows, hidden)
    actual, expected = run(mega_mhc, *arguments), mega_mhc(*arguments)
    assert kernels.calls == ["mega_mhc"]
    assert_close(actual.streams.flatten(1), expected.streams.flatten(1), 2e-3)
    assert_close(actual.normed, expected.normed, 4e-3)
    for one, other in zip(actual.gates, expected.gates, strict=True):
        assert one.shape == other.shape
        assert_close(one, other, 2e-3)


def test_strided_arguments_reach_the_package(kernels: Kernels) -> None:
    """It asserts that all are contiguous."""
    streams, written, pre, mixing, norm = boundary(3, 6)
    strided = lambda x: x.repeat_interleave(2, 0)[::2]  # noqa: E731
    moved = written._replace(**{name: strided(value) for name, value in written._asdict().items()})
    whole = run(mega_mhc, streams, written, pre, mixing, norm)
    torch.testing.assert_close(run(mega_mhc, strided(streams), moved, strided(pre), mixing, norm), whole, rtol=0, atol=0)


def test_a_boundary_that_the_kernel_does_not_take_fails(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    streams, written, pre, mixing, norm = boundary(4, 3)
    part = "it has one kernel for a whole boundary, and a part is left out"
    assert refusal(caplog, mega_mhc, streams, None, pre, mixing, norm) == part
    assert refusal(caplog, mega_mhc, streams, written, pre, None, norm) == part
    assert refusal(caplog, mega_mhc, streams, written, None, mixing, None) == part
    for hidden, dtype, hc in ((512, BF16, 4), (1024, torch.float32, 4), (1024, BF16, 3)):
        why = f"streams are {dtype}, {hc} of {hidden}; it takes 4 in bfloat16, by multiples of 1024"
        assert refusal(caplog, mega_mhc, *boundary(4, 3, hidden, dtype, hc)) == why
    uneven = mixing._replace(scale=mixing.scale + torch.arange(24) / 100)
    assert refusal(caplog, mega_mhc, streams, written, pre, uneven, norm) == "scales differ inside of pre, post or comb"
    fine = Norm(norm.weight + 2e-3, norm.eps)
    assert refusal(caplog, mega_mhc, streams, written, pre, mixing, fine) == "bfloat16 does not hold the norm's weight"
    assert kernels.calls == []


@pytest.mark.parametrize("images", [False, True])
def test_a_choice_of_the_whole_kernel_differs_from_the_reference(kernels: Kernels, images: bool) -> None:
    arguments = gate(seeded(5), 33, 128, 256, images)
    (ids, weights), (expected_ids, expected) = run(mega_gate, *arguments), mega_gate(*arguments)
    assert kernels.calls == ["bf16_mega_gate"]
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected, 1e-6)


def test_a_text_has_an_image_bias(kernels: Kernels) -> None:
    """The model gives it always; the package wants both or neither."""
    *arguments, image_bias, _ = gate(seeded(8), 9, 128, 256, images=True)
    (ids, weights), (expected_ids, expected) = run(mega_gate, *arguments, image_bias, None), mega_gate(*arguments)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected, 1e-6)


def test_a_nan_stops_the_gpu(kernels: Kernels) -> None:
    x, *rest = gate(seeded(6), 5, 128, 256)
    ids, weights = run(mega_gate, x, *rest)
    x[1], x[3, 7] = torch.nan, torch.inf
    x[3, 8:80] = 3e38
    other_ids, other_weights = run(mega_gate, x, *rest)
    kept = [0, 2, 4]
    assert torch.equal(other_ids[kept], ids[kept])
    assert torch.equal(other_weights[kept], weights[kept])
    assert ((other_ids >= 0) & (other_ids < 128)).all()


def test_a_router_that_the_kernel_does_not_take_fails(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    x, weight, *rest = gate(seeded(7), 3, 128, 256)
    assert refusal(caplog, mega_gate, x.float(), weight.float(), *rest).startswith("inputs are torch.float32")
    for count, hidden in ((128, 128), (126, 256), (1024, 256)):
        why = f"6 of {count} experts of {hidden} inputs are to be chosen; it takes up to 32 of 512 by multiples of 4, and"
        assert refusal(caplog, mega_gate, *gate(seeded(7), 3, count, hidden)).startswith(why)
    assert kernels.calls == []
