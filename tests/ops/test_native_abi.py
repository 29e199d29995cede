# SPDX-License-Identifier: Apache-2.0
"""The table, the header and the library say the same; wrong calls end in an error, not in memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_support import everything, native_library

from cedar.ops import native
from cedar.ops.abi import OPERATIONS, TABLE, Operation
from cedar.ops.provider import using

HEADER = Path(__file__).resolve().parents[2] / "backend" / "kernels" / "include" / "cedar_kernels.h"
_STRUCT = re.compile(r"typedef struct \{(.*?)\} cedar_(\w+)_args;", re.DOTALL)
_KINDS = {"uint64_t": "int", "int64_t": "int", "double": "float"}


def header_fields() -> dict[str, list[tuple[str, str]]]:
    """The structs of the C header: (name, "int" | "float" | "pointer") in order."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    structs = {}
    for body, name in _STRUCT.findall(text):
        fields = []
        for statement in filter(None, (part.strip() for part in body.split(";"))):
            kind, names = re.match(r"(?:const )?(\w+)\s*(\*?.*)", statement).groups()  # type: ignore[union-attr]
            for each in names.split(","):
                field = each.strip()
                fields.append((field.lstrip("* "), "pointer" if field.startswith("*") else _KINDS[kind]))
        structs[name] = fields
    return structs


def test_the_table_and_the_header_disagree() -> None:
    assert {name: operation.fields for name, operation in OPERATIONS.items()} == header_fields()


def test_the_library_lacks_an_operation() -> None:
    library = native_library()
    for name in OPERATIONS:
        assert library.run(name)(None, None) == 1
        assert b"args is NULL" in library.last_error()
        assert library.workspace(name)(None) == -1


def test_a_struct_of_another_version_is_read() -> None:
    library = native_library()
    for name, operation in OPERATIONS.items():
        struct = native.struct_of(operation)
        args = struct(ctypes.sizeof(struct) - 8)
        assert library.run(name)(ctypes.byref(args), None) == 1
        assert b"size" in library.last_error()


@pytest.mark.parametrize("scalars", ["type more:int", "type"])
def test_a_library_from_before_a_change_is_used(scalars: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same version, but a struct of another size, or not the operation."""
    path = native_library().path
    name = "engram_gate" if "more" in scalars else "engram_other"
    text = TABLE["engram_gate"].replace("type", scalars, 1)
    monkeypatch.setitem(OPERATIONS, name, Operation(name, text))
    with pytest.raises(native.NativeUnavailable, match=rf"{re.escape(str(path))} .*{name}.*; build it again"):
        native.Library(path)


def test_a_wrong_tensor_reaches_the_library() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    y = torch.zeros(2, 3)
    op = torch.ops.cedar.mxfp8_linear.default if native_library() else None
    assert op is not None
    op(x, weight, None, None, y, 0, 0.0)
    for wrong in (torch.zeros(2, 9)[:, :8], torch.zeros(2, 7), torch.zeros(2, 8).half()):
        with pytest.raises((ValueError, native.NativeUnsupported), match=r"allowed: dense|no bodies for torch\.float16"):
            op(wrong, weight, None, None, y, 0, 0.0)
    with pytest.raises(ValueError, match=r"y is .*; allowed: dense"):
        op(x, weight, None, None, torch.zeros(2, 2), 0, 0.0)


def test_an_expert_that_does_not_exist_is_read() -> None:
    x, weights = torch.zeros(1, 32), torch.ones(1, 1)
    routed, shared = (
        (torch.zeros(2, 8, 32), None, torch.zeros(2, 32, 4), None),
        (torch.zeros(8, 32), None, torch.zeros(32, 4), None),
    )
    with using(everything()), pytest.raises(RuntimeError, match=r"ids\[0\] is 2, there are 2 experts"):
        torch.ops.cedar.moe_fp4.default(x, torch.tensor([[2]]), weights, *routed, *shared, torch.zeros(1, 32), 0, 10.0)


def test_shapes_cannot_be_traced() -> None:
    """The fake implementations let shape propagation run without touching memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cedar.ops.linear import mxfp8_linear

    native_library()
    with FakeTensorMode(), using(everything()):
        y = mxfp8_linear(torch.empty(5, 8), torch.empty(3, 8))
    assert tuple(y.shape) == (5, 3)


def test_an_operation_is_registered_wrongly() -> None:
    """Its schema says what is written, and the fake implementation is enough for tracing."""
    native_library()
    g = torch.Generator().manual_seed(0)
    streams, keys = torch.randn(2, 4, 32, generator=g), torch.randn(2, 5 * 32, generator=g)
    arguments = (streams, keys, torch.randn(4, 32, generator=g), torch.empty(2, 4, 32), 1e-6)
    torch.library.opcheck(torch.ops.cedar.engram_gate.default, arguments)


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_a_narrower_instruction_set_gives_another_result(isa: str) -> None:
    """Every body compiles for every instruction set, and they agree to rounding (AVX2 and AVX-512 to the bit)."""
    native_library()
    code = "import sys; sys.path.insert(0, sys.argv[1]); import isa_check; isa_check.main(sys.argv[2])"
    here = Path(__file__).parent
    env = {**os.environ, "CEDAR_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(here), isa], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    widest = {**env}
    del widest["CEDAR_CPU_ISA"]
    best = subprocess.run(
        [sys.executable, "-c", code, str(here), ""], env=widest, capture_output=True, text=True, timeout=120, check=True
    )
    digest, norms = done.stdout.splitlines()
    best_digest, best_norms = best.stdout.splitlines()
    if isa == "avx2":
        assert digest == best_digest
    for one, other in zip(norms.split(), best_norms.split(), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-5)
