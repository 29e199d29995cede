# SPDX-License-Identifier: Apache-2.0
"""Does the emulator find what it is there to find? Small kernels with a mistake each, and without."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from emulator import build_mistakes, missing
from torch import Tensor
from translate import translate

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

THREADS, ROWS = 128, 8
EXCHANGE, STAGES, SUMS, PRODUCT, EARLY = range(5)
TRIES = 24
"""Each launch has another order and other times of landing, from one seed."""


@pytest.fixture(scope="module")
def emulate() -> Callable[[int, int], tuple[Tensor, str]]:
    """``emulate(kernel, mistake)``: what it wrote, and the error."""
    library = ctypes.CDLL(str(build_mistakes()))
    given = torch.arange(ROWS * THREADS * 4, dtype=torch.float32)

    def run(kernel: int, mistake: int) -> tuple[Tensor, str]:
        out, text = torch.full((2 * THREADS,), torch.nan), ctypes.create_string_buffer(4096)
        addresses = (ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        failed = library.emulate(kernel, mistake, *addresses, text, len(text))
        return out, text.value.decode() if failed else ""

    return run


def expected(kernel: int) -> Tensor:
    i, out = torch.arange(THREADS), torch.full((2 * THREADS,), torch.nan)
    if kernel == EXCHANGE:
        out[:THREADS] = (i + (i ^ 64) + (i ^ 1)).float()
    elif kernel == STAGES:
        out[:THREADS] = sum(4.0 * i + row * 4 * THREADS for row in range(ROWS))
    elif kernel == SUMS:
        out[:THREADS], out[THREADS:] = 1.0 + i, 0.0 + i
    elif kernel == EARLY:
        out[:THREADS], out[THREADS:] = i.float(), 2.0 * i
    else:
        out[:THREADS] = 16.0
    return out


@pytest.mark.parametrize("kernel", [EXCHANGE, STAGES, SUMS, PRODUCT, EARLY])
def test_a_kernel_without_mistakes_fails(emulate: Callable[[int, int], tuple[Tensor, str]], kernel: int) -> None:
    for _ in range(TRIES):
        out, error = emulate(kernel, 0)
        assert error == ""
        assert torch.equal(out.nan_to_num(-1), expected(kernel).nan_to_num(-1))


@pytest.mark.parametrize(
    ("kernel", "mistake", "text"),
    [
        (EXCHANGE, 1, ""),
        (EXCHANGE, 2, ""),
        (STAGES, 3, ""),
        (STAGES, 4, ""),
        (SUMS, 5, "deadlock: nobody can go on"),
        (SUMS, 6, "a barrier that nobody initialised"),
        (PRODUCT, 7, ""),
        (EARLY, 8, ""),
    ],
)
def test_a_mistake_is_not_found(emulate: Callable[[int, int], tuple[Tensor, str]], kernel: int, mistake: int, text: str) -> None:
    """Wrong results where there is no text."""
    found = 0
    for _ in range(TRIES):
        out, error = emulate(kernel, mistake)
        if text:
            found += text in error
        else:
            assert error == ""
            found += not torch.equal(out.nan_to_num(-1), expected(kernel).nan_to_num(-1))
    assert found > 0


def test_assembly_is_translated_otherwise() -> None:
    loop = r'asm volatile("{\n.reg .pred p;\nagain:\ntry.x p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(f(a, 1)), "n"(4) : "memory");'
    assert translate(loop) == "{ auto&& asm_0 = (f(a, 1)); auto&& asm_1 = (4); bool p; ::emulated::ptx::try_x(p, asm_0, asm_1); }"
    vector = 'asm("ld::x.v2 {%0, %1}, [%2];" : "=r"(a[0]), "+f"(b) : "l"(p));'
    bound = "auto&& asm_0 = (a[0]); auto&& asm_1 = (b); auto&& asm_2 = (p);"
    assert translate(vector) == f"{{ {bound} ::emulated::ptx::ld_x_v2(::emulated::registers(asm_0, asm_1), asm_2); }}"
    predicated = 'asm("{.reg .pred p; x.y p, %0; @!p z %0, 1;}" : "=r"(a));'
    calls = "::emulated::ptx::x_y(p, asm_0); if (!p) ::emulated::ptx::z(asm_0, 1);"
    assert translate(predicated) == f"{{ auto&& asm_0 = (a); bool p; {calls} }}"
