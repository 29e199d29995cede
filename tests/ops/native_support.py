# SPDX-License-Identifier: Apache-2.0
"""Running operations of the kernel library beside their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.ops import native
from cedar.ops.abi import OPERATIONS
from cedar.ops.provider import Choice, FusedOp, using

DTYPES = [torch.float32, torch.bfloat16]


def native_library() -> native.Library:
    """The library; skips the test where it is not built (`make setup` builds it)."""
    try:
        return native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


def everything() -> Choice:
    """All operations native, no fallback."""
    native_library()
    return Choice(set(OPERATIONS), set(OPERATIONS))


def run_native(op: FusedOp[..., Any], *arguments: Any) -> Any:
    """The library's result."""
    with torch.inference_mode(), using(everything()):
        return op(*arguments)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """The norm of every row's difference is a small part of the rows' typical norm; NaNs and infinities in the same places."""
    actual, expected = actual.double().flatten(1), expected.double().flatten(1)
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    actual, expected = actual.where(finite, 0), expected.where(finite, 0)
    assert ((actual - expected).norm(dim=1) <= relative * expected.norm(dim=1).mean() + 1e-30).all()


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else 4e-3


def assert_rows_alone(run: Callable[[slice], Sequence[Tensor | None]], rows: int) -> None:
    """Every row has the same bits alone, in runs, and with all others."""
    together = run(slice(0, rows))
    for step in (1, 3, 7):
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            for some, all_rows in zip(run(part), together, strict=True):
                if all_rows is not None:
                    assert some is not None
                    assert torch.equal(_bits(some), _bits(all_rows[part]))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_nan_stays(run: Callable[[], Sequence[Tensor | None]], poison: Callable[[], None], row: int) -> None:
    """After ``poison`` filled row ``row`` of the inputs with NaN, all other rows keep their bits."""
    clean = [None if x is None else x.clone() for x in run()]
    poison()
    for dirty, before in zip(run(), clean, strict=True):
        if before is not None:
            assert dirty is not None
            others = [n for n in range(len(before)) if n != row]
            assert torch.equal(_bits(dirty[others]), _bits(before[others]))
