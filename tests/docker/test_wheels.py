# SPDX-License-Identifier: Apache-2.0
"""The two wheels and the source distribution, built from a tree that holds no generated code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("backend", "client", "protos", "scripts", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
# What Triton itself puts on the path of a Python model (triton_python_backend_utils), out of the test bundle.
PYTRITON = metadata.distribution("nvidia-pytriton").locate_file("pytriton")
BACKEND = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{PYTRITON}/tritonserver/backends/python"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which nothing was built."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("v1", "__pycache__", "*.egg-info", "build")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            # protos/ keeps its v1: that is where the sources are.
            shutil.copytree(source, tree / name, ignore=None if name == "protos" else ignore)
        else:
            shutil.copyfile(source, tree / name)
    return tree


def _build_wheels(tree: Path, out: Path, *sources: str, **environment: str) -> dict[str, Path]:
    """Distribution name to wheel."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    env = {**os.environ, **environment}
    done = subprocess.run([*build, *sources], cwd=tree, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in out.glob("*.whl")}


@pytest.fixture(scope="module")
def wheels(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name to wheel, where there is no compiler."""
    return _build_wheels(tree, tmp_path_factory.mktemp("wheels"), ".", "./client", CXX="false")


def _declared(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return [Requirement(line) for line in Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []]


def _requirements(wheel: Path, extra: str = "") -> list[Requirement]:
    """What applies here with ``extra``, the markers taken off."""
    found = [each for each in _declared(wheel) if each.marker is None or each.marker.evaluate({"extra": extra})]
    return [Requirement(str(each).partition(";")[0]) for each in found]


def test_wheel_lacks_code_or_data(wheels: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(wheels["cedar-serving"]).namelist())
    modules = ("__init__.py", "engine_pb2.py", "engine_pb2.pyi", "engine_pb2_grpc.py", "engine_pb2_grpc.pyi")
    generated = {f"cedar/v1/{name}" for name in modules}
    committed = {
        path.relative_to(ROOT / "backend").as_posix()
        for path in (ROOT / "backend" / "cedar").rglob("*")
        if path.is_file() and path.suffix in (".py", ".typed", ".json", ".jinja", ".txt") and "v1" not in path.parts
    }
    folders = (ROOT / "backend/cedar/text/data", ROOT / "backend/cedar/model/data/cedar-small")
    data = {file.relative_to(ROOT / "backend").as_posix() for folder in folders for file in folder.iterdir() if file.is_file()}
    assert generated | committed | data <= names, sorted((generated | committed | data) - names)
    assert {"cedar_client/__init__.py", "cedar_client/py.typed"} <= set(zipfile.ZipFile(wheels["cedar-client"]).namelist())


def test_wheel_carries_tests_or_build_files(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        packages = {top for top in tops if not top.endswith(".dist-info")}
        assert packages in ({"cedar"}, {"cedar_client"}), packages


def test_a_wheel_without_the_library_is_for_one_platform(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        assert wheel.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    code = f"import setuptools.build_meta as build; build.build_sdist({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    (archive,) = out.glob("*.tar.gz")
    shutil.unpack_archive(archive, out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


def test_source_distribution_lacks_what_a_wheel_is_built_from(sdist: Path) -> None:
    sources = {path.relative_to(ROOT) for path in (ROOT / "backend" / "kernels").rglob("*") if path.is_file()}
    needed = sources | {Path("setup.py"), Path("scripts/build_protos.py"), Path("scripts/build_kernels.py"), Path("LICENSE")}
    assert len(sources) > 30
    assert sorted(path for path in needed if not (sdist / path).is_file()) == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("c++"), reason="needs CMake and a compiler")
def test_wheel_from_the_source_distribution_lacks_the_library(sdist: Path, tmp_path: Path) -> None:
    """It has a tag of the platform but of no Python, and an installed package finds it there."""
    wheel = _build_wheels(sdist, tmp_path, ".", CEDAR_CUDA="off")["cedar-serving"]
    assert re.fullmatch(r"cedar_serving-[^-]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert b"Root-Is-Purelib: false" in archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/WHEEL")))
        archive.extractall(tmp_path / "site")
    code = """
        import sys, torch
        sys.path.insert(0, sys.argv[1])
        from cedar.ops import native
        from cedar.ops.provider import choose
        print(native.load().path, sorted(choose("native", torch.device("cpu")).native_ops))
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("CEDAR_")}
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(f"{tmp_path}/site/cedar/libcedar_kernels.so ['compress_store', ")


def test_client_needs_more_than_tritonclient(wheels: dict[str, Path]) -> None:
    assert [each.name for each in _requirements(wheels["cedar-client"])] == ["tritonclient"]


def test_constraint_outside_the_declared_range(wheels: dict[str, Path]) -> None:
    pins = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, line
            pins[canonicalize_name(name)] = version
    project = _declared(wheels["cedar-serving"])
    checked = [each for each in project if canonicalize_name(each.name) in pins]
    assert len(checked) >= 20
    for each in checked:
        assert each.specifier.contains(pins[canonicalize_name(each.name)]), f"{each} but {pins[canonicalize_name(each.name)]}"
    needed = [each for each in project if "gpu" not in str(each.marker) and each.name != "cedar-client"]
    assert not [str(each) for each in needed if canonicalize_name(each.name) not in pins]


def _closure(requirements: list[Requirement]) -> set[str]:
    """Import names of every distribution that the requirements install, taken from this environment's metadata."""
    wanted, seen = [(each, "") for each in requirements], set()
    while wanted:
        requirement, extra = wanted.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for own in ["", *requirement.extras]:
            key = (canonicalize_name(requirement.name), own)
            if key not in seen:
                seen.add(key)
                wanted += [(Requirement(text), own) for text in metadata.requires(requirement.name) or []]
    installed = {name for name, _ in seen}
    owners = metadata.packages_distributions()
    return {top for top, names in owners.items() if {canonicalize_name(name) for name in names} & installed}


@pytest.mark.parametrize(
    ("extra", "modules"),
    [("", "cli cedar.triton cedar.text cedar.config"), ("serve", "cli triton text config model cache engine ops service bench")],
)
def test_import_of_an_undeclared_dependency(wheels: dict[str, Path], tmp_path: Path, extra: str, modules: str) -> None:
    """Every module of the rooms that the extra serves imports with nothing but the declared dependencies in reach."""
    allowed = _closure([each for each in _requirements(wheels["cedar-serving"], extra) if each.name != "cedar-client"])
    if extra:
        allowed |= _closure(_requirements(wheels["cedar-client"]))
    for wheel in wheels.values():
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = textwrap.dedent(
        """
        import importlib.metadata, pkgutil, sys
        sys.path[:0] = [sys.argv[1]]
        allowed = set(sys.argv[2].split(",")) | {"cedar", "cedar_client", "triton_python_backend_utils"}
        tops = set(importlib.metadata.packages_distributions()) - allowed
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in tops:
                    raise ModuleNotFoundError(f"{name} is not a declared dependency", name=name)
        sys.meta_path.insert(0, Refuse())
        import cedar
        assert cedar.__file__.startswith(sys.argv[1]), cedar.__file__
        count = 0
        for room in sys.argv[3].split():
            package = importlib.import_module("cedar." + room.removeprefix("cedar."))
            for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
                count += 1
        print(count)
        """
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(tmp_path / "site"), ",".join(sorted(allowed)), modules],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=BACKEND,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 10


@pytest.mark.slow
def test_clean_environment_where_the_wheels_do_not_work(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Both wheels in a new environment (base dependencies, no PyTorch): the command answers, the four adapters import."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *map(str, wheels.values())]
    done = subprocess.run(install, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    helped = subprocess.run([python.with_name("cedar"), "--help"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert helped.returncode == 0, helped.stderr
    assert "serve" in helped.stdout
    steps = sorted((ROOT / "model_repository").glob("*/1/model.py"))
    assert len(steps) == 4
    for step in steps:
        target = re.search(r"^from (\S+) import (\w+) as TritonPythonModel$", step.read_text(), re.M)
        assert target is not None, step
        code = f"from {target[1]} import {target[2]} as model; print(model.execute.__name__)"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=BACKEND)
        assert done.returncode == 0, f"{step}: {done.stderr[-2000:]}"
