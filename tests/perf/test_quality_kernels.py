# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the training forward against their PyTorch definitions, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from perf.quality import kernels

from cedar.ops.mhc import sinkhorn as engine_sinkhorn


def test_the_reference_sinkhorn_differs_from_the_engines() -> None:
    logits = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0)) * 2
    torch.testing.assert_close(kernels.sinkhorn_reference(logits, 1e-6, 20), engine_sinkhorn(logits.clone(), 1e-6, 20))


def test_the_sinks_share_is_lost() -> None:
    """Probabilities and the sink's share add up to 1, and nothing invisible has any."""
    near, far, sink = torch.randn(1, 32, 2, 16), torch.randn(1, 32, 2, 16), torch.zeros(2)
    doc_start = torch.zeros(1, 32, dtype=torch.long)
    doc_start[0, 20:] = 20
    p_near, p_far, mass = kernels.joint_softmax(near, far, sink, doc_start, None, 0, 8, 2)
    assert p_far is not None
    assert mass is not None
    total = p_near.sum(-1) + p_far.sum(-1)
    assert (total < 1).all()
    assert not p_far[0, 20:, :, :10].any()
    assert not p_far[0, :20, :, 10:].any()
    torch.testing.assert_close(mass, p_far.sum(2))


def _both(function: Callable[..., Any], arguments: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for triton in (False, True):
        monkeypatch.setattr(kernels, "use_triton", lambda x, on=triton: on)
        inputs = [value.detach().clone().requires_grad_() for value in arguments]
        outputs = [out for out in function(*inputs) if out is not None]
        random = torch.Generator(device=arguments[0].device).manual_seed(1)
        loss = torch.stack(
            [(out * torch.randn(out.shape, generator=random, device=out.device)).sum() for out in outputs if out.requires_grad]
        ).sum()
        loss.backward()
        results.append([*[out.detach() for out in outputs], *[value.grad for value in inputs]])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_the_triton_sinkhorn_or_its_gradient_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(1000, 4, 4, device="cuda") * 2
    _both(lambda x: [kernels.sinkhorn(x, 1e-6, 20)], [logits], monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_the_triton_softmax_or_its_gradient_differs(ratio: int, selected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a later chunk, two documents, a count of entries that is no power of two."""
    batch, rows, heads, window, first = 2, 128, 3, 32, 64
    doc_start = torch.zeros(batch, rows, dtype=torch.long, device="cuda")
    doc_start[0, 40:] = first + 40
    near, sink = torch.randn(batch, rows, heads, 2 * window, device="cuda"), torch.randn(heads, device="cuda")
    if not ratio:
        _both(lambda a, s: kernels.joint_softmax(a, None, s, doc_start, None, first, window, 0), [near, sink], monkeypatch)
        return
    count = (first + rows) // ratio
    far = torch.randn(batch, rows, heads, count, device="cuda")
    picked = torch.rand(batch, rows, count, device="cuda") > 0.4 if selected else None
    _both(lambda a, b, s: kernels.joint_softmax(a, b, s, doc_start, picked, first, window, ratio), [near, far, sink], monkeypatch)
