# SPDX-License-Identifier: Apache-2.0
"""Who carries out an operation, and what is said when it cannot be the one that was asked for."""

from __future__ import annotations

import logging
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from native_support import everything, native_library

from cedar.errors import CedarError
from cedar.ops import native
from cedar.ops.abi import OPERATIONS
from cedar.ops.linear import mxfp8_linear
from cedar.ops.native import NativeUnsupported
from cedar.ops.peer_packages import PEERS, PeerUnsupported
from cedar.ops.provider import Choice, FusedOp, choose, using

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@FusedOp
def doubled(x: int, *, plus: int = 0) -> int:
    """Twice x."""
    return 2 * x + plus


@doubled.native
def _(x: int, *, plus: int = 0) -> int:
    if x < 0:
        raise NativeUnsupported("doubled: x is negative")
    return 200 * x + plus


@doubled.by("package")
def _(x: int, *, plus: int = 0) -> int:
    if x > 9 or x < 0:
        raise PeerUnsupported("x has two digits")
    return 3000 * x + plus


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


def test_what_a_package_cannot_do_goes_past_the_library(caplog: pytest.LogCaptureFixture) -> None:
    package = {"doubled": "package"}
    with using(Choice({"doubled"}, set(), peers=package)), caplog.at_level(logging.WARNING):
        assert [doubled(3, plus=1), doubled(10), doubled(11), doubled(-1)] == [9001, 2000, 2200, -2]
    assert [record.getMessage() for record in caplog.records] == [
        "doubled runs without package where that cannot: x has two digits",
        "doubled runs as its PyTorch reference where the library cannot: doubled: x is negative",
    ]
    with using(Choice(set(), set(), peers=package)):
        assert [doubled(3), doubled(10)] == [9000, 20]
    with using(Choice({"doubled"}, {"doubled"}, peers=package)):
        assert [doubled(3), doubled(10)] == [9000, 2000]
        with pytest.raises(CedarError, match="CEDAR_OP_DOUBLED=reference"):
            doubled(-1)


@pytest.mark.parametrize("peer", PEERS)
def test_an_operation_goes_to_a_package_without_it(peer: str) -> None:
    for op in OPERATIONS:
        if op in PEERS[peer].operations:
            continue
        others = [name for name in PEERS if op in PEERS[name].operations]
        allowed = r" \| ".join(["auto", "reference", "native", *others])
        with pytest.raises(CedarError, match=rf"CEDAR_OP_{op.upper()}: is '{peer}'; allowed: {allowed}$"):
            choose("auto", CPU, {f"CEDAR_OP_{op.upper()}": peer})
    with pytest.raises(CedarError, match=rf"ops: is '{peer}'; allowed: auto \| reference \| native$"):
        choose(peer, CPU, {})


def hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def package_here(monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, source: str) -> None:
    """A package of that name that is imported in place of any other."""
    (directory / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # what is imported goes again after the test
    del sys.modules[name]


@pytest.mark.parametrize("name", PEERS)
def test_a_package_is_imported_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Or for a GPU that it is not for: importing one may take seconds, and fail."""
    hopper(monkeypatch)
    package_here(monkeypatch, tmp_path, name, "raise OSError('imported')")
    choose("auto", CUDA, {})
    choose("reference", CUDA, {})
    setting = f"CEDAR_OP_{next(iter(PEERS[name].operations)).upper()}"
    needs = r"its kernels are for Hopper GPUs \(compute capability 9.x\), and"
    with pytest.raises(CedarError, match=rf"{setting}: is '{name}', but {needs} the device is cpu; allowed: auto"):
        choose("auto", CPU, {setting: name})
    for capability in ((8, 0), (10, 0)):
        hopper(monkeypatch, capability)
        with pytest.raises(CedarError, match=rf"{setting}: is '{name}', but {needs} this one has {capability[0]}\.0; allowed"):
            choose("auto", CUDA, {setting: name})


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import nothing_of_that_name", r"cannot be imported: ModuleNotFoundError\(.No module named 'nothing_of_that_name'"),
        ("raise ImportError('undefined symbol: _ZN3c10')", r"cannot be imported: ImportError\('undefined symbol: _ZN3c10'\)"),
        ("raise OSError('libcuda.so.1: cannot open')", r"cannot be imported: OSError\('libcuda.so.1: cannot open'\)"),
        ("raise AssertionError", r"cannot be imported: AssertionError\(\)"),
        ("", r"of that name here has no (fp8_gemm_nt, bf16_gemm_nt|flash_mla_sparse_fwd)"),
    ],
)
def test_a_package_that_cannot_be_used_is_no_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, source: str, problem: str
) -> None:
    hopper(monkeypatch)
    package_here(monkeypatch, tmp_path, name, source)
    peer, dashed = PEERS[name], name.replace("_", "-")
    setting = f"CEDAR_OP_{next(iter(peer.operations)).upper()}"
    source = f"{name} from {peer.distribution} .the distribution {dashed} is an unrelated one."
    with pytest.raises(CedarError, match=rf"{setting}: is '{name}', but the package {problem}.*; allowed: .*{source}"):
        choose("auto", CUDA, {setting: name})


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Both, on a Hopper GPU, and the environment that gives them an operation each."""
    hopper(monkeypatch)
    for name, peer in PEERS.items():
        package = types.ModuleType(name)
        for adapter in peer.operations.values():
            for function in adapter.functions:
                setattr(package, function, len)
        monkeypatch.setitem(sys.modules, name, package)
    return {"CEDAR_OP_MEGA_ATTENTION": "flash_mla", "CEDAR_OP_WO_A": "deep_gemm"}


def test_a_package_for_blackwell_is_passed_over(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else was said, its kernels for whole operations come first; where it has none or is not here, the library."""
    hopper(monkeypatch, (10, 0))
    package = sys.modules["deep_gemm"]
    package.__spec__ = ModuleSpec("deep_gemm", None)
    assert choose("auto", CUDA, {}).peers == {}
    package.mega_mhc = package.use_deterministic_algorithms = package.bf16_mega_gate = len  # type: ignore[attr-defined]
    whole = {"mega_mhc": "deep_gemm", "mega_gate": "deep_gemm"}
    assert choose("auto", CUDA, {}).peers == whole
    assert choose("reference", CUDA, {}).peers == {}
    assert choose("reference", CUDA, {"CEDAR_OP_MEGA_MHC": "auto"}).peers == {"mega_mhc": "deep_gemm"}
    assert choose("auto", CUDA, {"CEDAR_OP_MEGA_GATE": "reference"}).peers == {"mega_mhc": "deep_gemm"}
    with pytest.raises(
        CedarError, match=r"CEDAR_OP_WO_A: is 'deep_gemm', but its kernels are for Hopper GPUs .*has 10\.0; allowed"
    ):
        choose("auto", CUDA, {"CEDAR_OP_WO_A": "deep_gemm"})
    del package.bf16_mega_gate
    assert choose("auto", CUDA, {}).peers == {"mega_mhc": "deep_gemm"}
    with pytest.raises(CedarError, match=r"has no bf16_mega_gate; allowed: .*2\.5\.0.* on Hopper, .*2\.8\.2.* on Blackwell"):
        choose("auto", CUDA, {"CEDAR_OP_MEGA_GATE": "deep_gemm"})
    for capability in ((9, 0), (12, 0)):
        hopper(monkeypatch, capability)
        assert choose("auto", CUDA, {}).peers == {}
    needs = r"Hopper and Blackwell GPUs \(compute capability 9.x and 10.x\), and this one has 12\.0"
    with pytest.raises(CedarError, match=needs):
        choose("auto", CUDA, {"CEDAR_OP_MEGA_MHC": "deep_gemm"})


def test_a_package_is_refused_for_what_another_operation_needs(packages: dict[str, str]) -> None:
    del sys.modules["deep_gemm"].tf32_hc_prenorm_gemm
    choose("reference", CUDA, packages)
    with pytest.raises(CedarError, match=r"CEDAR_OP_MEGA_MHC: is 'deep_gemm', but .* has no tf32_hc_prenorm_gemm; allowed"):
        choose("reference", CUDA, packages | {"CEDAR_OP_MEGA_MHC": "deep_gemm"})


def test_a_package_is_not_in_the_summary(packages: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = choose("reference", CUDA, packages)
    assert choice.peers == {"mega_attention": "flash_mla", "wo_a": "deep_gemm"}
    assert (choice.native_ops, choice.required) == (set(), set())
    assert choice.summary == "PyTorch reference; wo_a: deep_gemm; mega_attention: flash_mla"
    assert "mega_attention runs in flash_mla" in caplog.text


def test_what_a_package_cannot_do_is_not_the_librarys(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"native ({native_library().info})"
    monkeypatch.setattr(native.Library, "has_body", lambda self, op, device: op != "wo_a")
    choice = choose("auto", CUDA, packages)
    assert choice.native_ops == set(OPERATIONS) - {"wo_a"}
    assert choice.summary == f"{here}; wo_a: deep_gemm; mega_attention: flash_mla"
    assert (choice.providers("mega_attention"), choice.providers("wo_a")) == (("flash_mla", "native"), ("deep_gemm",))
    del packages["CEDAR_OP_WO_A"]
    assert choose("auto", CUDA, packages).summary == f"{here}, PyTorch reference: wo_a; mega_attention: flash_mla"
    with pytest.raises(CedarError, match=r"ops: is 'native', but the library has no wo_a for cuda"):
        choose("native", CUDA, packages | {"CEDAR_OP_WO_A": "deep_gemm"})
