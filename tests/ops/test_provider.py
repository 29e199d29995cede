# SPDX-License-Identifier: Apache-2.0
"""Who carries out an operation, and what is said when it cannot be the one that was asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from native_support import everything, native_library

from cedar.errors import CedarError
from cedar.ops import native
from cedar.ops.abi import OPERATIONS
from cedar.ops.linear import mxfp8_linear
from cedar.ops.native import NativeUnsupported
from cedar.ops.provider import Choice, FusedOp, choose, using

CPU = torch.device("cpu")


@FusedOp
def doubled(x: int, *, plus: int = 0) -> int:
    """Twice x."""
    return 2 * x + plus


@doubled.native
def _(x: int, *, plus: int = 0) -> int:
    if x < 0:
        raise NativeUnsupported("doubled: x is negative")
    return 200 * x + plus


def test_a_choice_outlives_its_block() -> None:
    with using(Choice({"doubled"}, set())):
        assert doubled(3, plus=1) == 601
        with using(None):
            assert doubled(3) == 6
        assert doubled(3) == 600
    assert doubled(3) == 6
    assert doubled.__doc__ == "Twice x."


def test_an_unsupported_call_does_not_reach_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    with using(Choice({"doubled"}, set())), caplog.at_level(logging.WARNING):
        assert [doubled(-1), doubled(-2), doubled(3)] == [-2, -4, 600]
    assert [record.getMessage() for record in caplog.records] == [
        "doubled runs as its PyTorch reference where the library cannot: doubled: x is negative"
    ]


def test_an_unsupported_call_falls_back_though_it_was_asked_for() -> None:
    with using(Choice({"doubled"}, {"doubled"})), pytest.raises(CedarError, match="CEDAR_OP_DOUBLED=reference"):
        doubled(-1)


def test_auto_is_silent_without_a_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CEDAR_KERNELS", str(tmp_path / "none.so"))
    native.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            choice = choose("auto", CPU, {})
        assert choice.native_ops == set()
        assert choice.summary.startswith("PyTorch reference: libcedar_kernels.so is not there")
        assert choose("reference", CPU, {}).summary == "PyTorch reference"
        assert "none.so" in caplog.text
        assert "make setup" in caplog.text
        with pytest.raises(CedarError, match=r"ops: is 'native', but libcedar_kernels.so is not there .*none\.so"):
            choose("native", CPU, {})
        with pytest.raises(CedarError, match=r"ops: is 'native'"):
            choose("reference", CPU, {"CEDAR_OP_MEGA_MHC": "native"})
    finally:
        native.load.cache_clear()


def test_a_file_that_is_no_library_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libcedar_kernels.so"
    path.write_bytes(b"not a library")
    monkeypatch.setenv("CEDAR_KERNELS", str(path))
    native.load.cache_clear()
    try:
        with pytest.raises(CedarError, match="cannot be loaded"):
            choose("native", CPU, {})
    finally:
        native.load.cache_clear()


def test_one_operation_cannot_be_chosen() -> None:
    native_here = f"native ({native_library().info})"
    every = set(OPERATIONS)
    assert choose("reference", CPU, {}).native_ops == set()
    assert choose("auto", CPU, {}).native_ops == every
    assert choose("native", CPU, {}).required == every
    one = choose("reference", CPU, {"CEDAR_OP_MEGA_GATE": "native"})
    assert (one.native_ops, one.required) == ({"mega_gate"}, {"mega_gate"})
    assert choose("native", CPU, {"CEDAR_OP_MEGA_GATE": "reference"}).native_ops == every - {"mega_gate"}
    assert choose("auto", CPU, {}).summary == native_here
    two = {"CEDAR_OP_MEGA_GATE": "reference", "CEDAR_OP_WO_A": "reference"}
    assert choose("auto", CPU, two).summary == f"{native_here}, PyTorch reference: mega_gate, wo_a"


def test_an_operation_without_a_body_is_chosen() -> None:
    library = native_library()
    assert all(library.has_body(name, CPU) for name in OPERATIONS)
    assert not library.has_body("mega_nothing", CPU)
    meta = torch.device("meta")
    choice = choose("auto", meta, {})
    assert choice.native_ops == set()
    assert choice.summary == f"PyTorch reference: {library.path} ({library.info}) has no bodies for meta"
    with pytest.raises(CedarError, match=r"ops: is 'native', but the library has no compress_store, .* for meta"):
        choose("native", meta, {})


def test_a_wrong_choice_is_not_named() -> None:
    with pytest.raises(CedarError, match=r"CEDAR_OP_WO_A: is 'fast'; allowed: auto \| reference \| native"):
        choose("auto", CPU, {"CEDAR_OP_WO_A": "fast"})
    with pytest.raises(CedarError, match=r"ops: is 'fast'"):
        choose("fast", CPU, {})


def test_a_reference_runs_where_the_library_could() -> None:
    """The two are told apart by what neither may do: a wrong shape reaches another message."""
    x, weight = torch.zeros(2, 8), torch.zeros(3, 9)
    with using(everything()), pytest.raises(ValueError, match="mxfp8_linear: weight is"):
        mxfp8_linear(x, weight)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        mxfp8_linear(x, weight)


def test_a_misspelt_operation_is_ignored() -> None:
    with pytest.raises(CedarError, match=r"CEDAR_OP_MEGA_GATES: names no operation; allowed: .*CEDAR_OP_MEGA_GATE,"):
        choose("auto", CPU, {"CEDAR_OP_MEGA_GATES": "reference"})
