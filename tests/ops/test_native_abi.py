# SPDX-License-Identifier: Apache-2.0
"""The table, the header and the library say the same; wrong calls end in an error, not in memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from native_support import assert_close, everything, native_library, tolerance

from cedar.errors import CedarError
from cedar.ops import native
from cedar.ops.abi import KINDS, OPERATIONS, TABLE, Operation
from cedar.ops.provider import using

HEADER = Path(__file__).resolve().parents[2] / "backend" / "kernels" / "include" / "cedar_kernels.h"
_STRUCT = re.compile(r"typedef struct \{(.*?)\} cedar_(\w+)_args;", re.DOTALL)
_KINDS = {"uint64_t": "int", "int64_t": "int", "double": "float"}


def dense_arguments(operation: Operation, device: torch.device) -> list[torch.Tensor]:
    """Tensors that the table takes when every dimension is 32, but ``hc`` 1, and ``ratio`` 2; floats are bfloat16."""
    scope: dict[str, Any] = {scalar.name: 32 for scalar in operation.scalars} | {"hc": 1, "ratio": 2}
    scope |= dict.fromkeys(("type", "weight_type", "shared_type", "out_type", "any"), torch.bfloat16)
    scope |= {dtype: getattr(torch, dtype) for dtype in KINDS.values()}
    return [
        torch.empty(
            [eval(part, scope) for part in field.dims if part != "..."] or [32],
            dtype=eval(KINDS.get(field.kind, field.kind), scope),
            device=device,
        )
        for field in operation.tensors
    ]


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


@pytest.mark.parametrize("home", ["cpu", "meta"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_library_reads_an_address_of_another_device(name: str, home: str) -> None:
    """Every tensor of every operation in turn; memory that is not pinned is no exception either."""
    operation, here = OPERATIONS[name], torch.device(home)
    build, other = native.builder(operation), torch.device("meta" if home == "cpu" else "cpu")
    values = {"ratio": 2, "rows": 32, "groups": 32, "rank": 32, "in_dim": 32}
    given = [values.get(scalar.name, 1) for scalar in operation.given]
    tensors = dense_arguments(operation, here)
    build(*tensors, *given, here, 0, 1, 0, None)
    for place, field in enumerate(operation.tensors):
        moved = [*tensors]
        moved[place] = torch.empty_like(tensors[place], device=other)
        with pytest.raises(ValueError, match=rf"{name}: {field.name} is .* on {other}; allowed: dense .* on {home}$"):
            build(*moved, *given, here, 0, 1, 0, None)


def test_projections_of_another_type_are_read_as_floats() -> None:
    operation = OPERATIONS["compress_store"]
    build, tensors = native.builder(operation), dense_arguments(operation, torch.device("cpu"))
    place = [field.name for field in operation.tensors].index("projected")
    scalars = [scalar.name for scalar in operation.given]
    for ratio, right in ((1, torch.bfloat16), (2, torch.float32)):
        given = [{"ratio": ratio}.get(name, 1) for name in scalars]
        for dtype in (torch.bfloat16, torch.float32, torch.int32):
            tensors[place] = torch.zeros(32, ratio * 32, dtype=dtype)
            if dtype is right:
                build(*tensors, *given, torch.device("cpu"), 0, 1, 0, None)
                continue
            with pytest.raises(ValueError, match=r"compress_store: projected is .*; allowed: dense"):
                build(*tensors, *given, torch.device("cpu"), 0, 1, 0, None)


def test_a_misspelt_instruction_set_is_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    native_library()
    monkeypatch.setenv("CEDAR_CPU_ISA", "AVX2")
    with pytest.raises(CedarError, match=r"CEDAR_CPU_ISA: is 'AVX2'; allowed: baseline \| avx2 \| avx512, or unset"):
        native.load.__wrapped__()


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


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], dict[str, list[torch.Tensor]]]:
    """What every operation gives with one instruction set, None: the widest; skips the test where the machine lacks it."""
    native_library()
    folder = tmp_path_factory.mktemp("isa")

    @cache
    def run(isa: str | None) -> dict[str, Any]:
        path = folder / str(isa)
        env = {name: value for name, value in os.environ.items() if name != "CEDAR_CPU_ISA"}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ({"CEDAR_CPU_ISA": isa} if isa else {})
        command = [sys.executable, str(Path(__file__).with_name("isa_check.py")), str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        saved: dict[str, Any] = torch.load(path)
        return saved

    def results(isa: str | None) -> dict[str, list[torch.Tensor]]:
        saved = run(isa)
        if isa and f"cpu: {isa}" not in saved["info"]:
            pytest.skip(f"this machine has no {isa}: {saved['info']}")
        found: dict[str, list[torch.Tensor]] = saved["results"]
        return found

    return results


@pytest.mark.parametrize("name", OPERATIONS)
def test_avx2_and_avx512_give_other_bits(name: str, results_of: Callable[[str | None], dict[str, list[torch.Tensor]]]) -> None:
    for one, other in zip(results_of("avx2")[name], results_of(None)[name], strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert (one != 0).any()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_baseline_gives_another_result(name: str, results_of: Callable[[str | None], dict[str, list[torch.Tensor]]]) -> None:
    """It has no fused multiply-add, so sums are rounded otherwise; what adds nothing is the same to the bit."""
    for one, other in zip(results_of("baseline")[name], results_of(None)[name], strict=True):
        if name == "engram_gather" or not one.is_floating_point():
            assert torch.equal(one, other)
        else:  # a value that is rounded the other way may land on another code
            assert_close(one, other, 2e-2 if name.endswith("store") else tolerance(one.dtype))
