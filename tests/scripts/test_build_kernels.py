# SPDX-License-Identifier: Apache-2.0
"""scripts/build_kernels.py, on a small library in place of the real one: when it compiles, when it does not, and what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "build_kernels.py"
CMAKE = """cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES CXX)
add_library(cedar_kernels SHARED small.cpp)
"""
NEEDS_CMAKE = pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("c++"), reason="needs CMake and a compiler")


class Tree:
    """A checkout with the script and the sources of a small library."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = root / "backend" / "kernels"
        self.library = root / "build" / "kernels" / "libcedar_kernels.so"
        self.sources.mkdir(parents=True)
        (root / "scripts").mkdir()
        shutil.copy(SCRIPT, root / "scripts")
        self.cmake(CMAKE)
        self.code("one")

    def cmake(self, text: str) -> None:
        (self.sources / "CMakeLists.txt").write_text(text)

    def code(self, info: str) -> None:
        (self.sources / "small.cpp").write_text(f'extern "C" const char* cedar_build_info() {{ return "{info}"; }}\n')

    def build(self, status: int = 0, **environment: str) -> str:
        """What the script says."""
        env = {"CEDAR_CUDA": "off", **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}, **environment}
        command = [sys.executable, str(self.root / "scripts" / "build_kernels.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "checkout")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH without tools, to which a test adds some."""
    tools = tmp_path / "tools"
    tools.mkdir()
    return tools


def add_tool(tools: Path, name: str, text: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{text}\n")
    (tools / name).chmod(0o755)


def test_a_machine_without_cmake_fails(tree: Tree, tools: Path) -> None:
    said = tree.build(PATH=str(tools))
    assert said == "kernel library: not built: install CMake 3.22 or newer; operations run as PyTorch references\n"


def test_an_old_cmake_is_run(tree: Tree, tools: Path) -> None:
    add_tool(tools, "cmake", "echo cmake version 3.16.3")
    said = tree.build(PATH=str(tools))
    assert said.startswith(f"kernel library: not built: install CMake 3.22 or newer ({tools}/cmake is older); ")
    assert said.count("\n") == 1


def test_a_machine_without_a_compiler_fails(tree: Tree, tools: Path) -> None:
    add_tool(tools, "cmake", "echo cmake version 3.28.3")
    said = tree.build(PATH=str(tools))
    assert said.startswith("kernel library: not built: install a C++17 compiler, such as g++; ")
    add_tool(tools, "g++", "exit 1")  # one that knows no C++17
    assert tree.build(PATH=str(tools)) == said
    add_tool(tools, "other", "exit 1")
    assert "such as g++ (CXX=other is none)" in tree.build(PATH=str(tools), CXX="other")
    add_tool(tools, "g++", "exit 0")  # and nothing that would run it
    assert "not built: install Ninja or make; " in tree.build(PATH=str(tools))
    assert not tree.library.exists()


def test_a_wrong_setting_is_taken_for_auto(tree: Tree) -> None:
    assert "CEDAR_CUDA is 'yes'; allowed: auto, on, off" in tree.build(1, CEDAR_CUDA="yes")


@NEEDS_CMAKE
def test_an_unchanged_library_is_built_again_and_a_changed_one_is_not(tree: Tree) -> None:
    first = tree.build().splitlines()
    assert first[0].startswith("kernel library: compiling for CPU on ")
    assert first[1:] == [f"kernel library: {tree.library} (one)"]
    stamp = tree.library.stat().st_mtime_ns
    assert tree.build().splitlines() == first[1:]
    assert tree.library.stat().st_mtime_ns == stamp
    tree.code("two")
    assert tree.build().splitlines() == [first[0], f"kernel library: {tree.library} (two)"]


@NEEDS_CMAKE
def test_a_checkout_that_was_moved_is_not_built(tree: Tree, tmp_path: Path) -> None:
    """Its cache names another place, whose sources differ or are gone."""
    tree.build()
    moved = tree.root.rename(tmp_path / "moved")
    sources = moved / "backend" / "kernels" / "small.cpp"
    sources.write_text(sources.read_text().replace("one", "moved"))
    command = [sys.executable, str(moved / "scripts" / "build_kernels.py")]
    done = subprocess.run(command, env={**os.environ, "CEDAR_CUDA": "off"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"kernel library: {moved}/build/kernels/libcedar_kernels.so (moved)\n")


@NEEDS_CMAKE
def test_a_damaged_cache_ends_the_build(tree: Tree) -> None:
    tree.build()
    cache = tree.library.with_name("CMakeCache.txt")
    cache.write_text(re.sub(r"^CMAKE_GENERATOR:.*$", "CMAKE_GENERATOR:INTERNAL=None", cache.read_text(), flags=re.MULTILINE))
    assert tree.build().endswith("(one)\n")


@NEEDS_CMAKE
def test_an_nvcc_that_does_not_work_costs_the_cpu_bodies(tree: Tree) -> None:
    tree.cmake(CMAKE + 'if(NOT CEDAR_CUDA STREQUAL "off")\n  message(FATAL_ERROR "this nvcc is too old")\nendif()\n')
    said = tree.build(CEDAR_CUDA="auto")
    assert "nvcc does not work here (CUDA 12.9 or newer is needed): CPU bodies alone" in said
    assert said.endswith("(one)\n")
    assert "this nvcc is too old" in tree.build(1, CEDAR_CUDA="on")


@NEEDS_CMAKE
def test_a_mistake_in_the_sources_is_only_a_notice(tree: Tree) -> None:
    (tree.sources / "small.cpp").write_text("int broken(\n")
    said = tree.build(1)
    assert "small.cpp:" in said
    assert "kernel library: not built; " in said


@NEEDS_CMAKE
def test_a_library_that_does_not_load_is_a_success(tree: Tree) -> None:
    (tree.sources / "small.cpp").write_text('extern "C" int absent();\nextern "C" int cedar_build_info() { return absent(); }\n')
    assert "undefined symbol: absent" in tree.build(1)


def log_compiles(tools: Path, name: str, real: str, version: str) -> None:
    """A compiler that notes every source it compiles, and says that it is of this version."""
    add_tool(
        tools,
        name,
        f'[ "$*" = --version ] && echo {version} && exit\n'
        f'case "$*" in *small.cpp) echo {name} {version} >> "{tools}/log";; esac\n'
        f'exec {shutil.which(real)} "$@"',
    )


@NEEDS_CMAKE
def test_another_compiler_is_asked_for_and_the_first_is_used(tree: Tree, tools: Path) -> None:
    """Another one, then an update of it in its place; what did not change is left alone."""
    log, path = tools / "log", f"{tools}{os.pathsep}{os.environ['PATH']}"
    log_compiles(tools, "one", "c++", "1.0")
    log_compiles(tools, "two", "c++", "1.0")
    for compiler, version, compiled in (
        ("one", "1.0", "one 1.0\n"),
        ("one", "1.0", ""),
        ("two", "1.0", "two 1.0\n"),
        ("two", "2.0", "two 2.0\n"),
        ("two", "2.0", ""),
        ("one", "1.0", "one 1.0\n"),
    ):
        log_compiles(tools, compiler, "c++", version)
        log.write_text("")
        tree.build(PATH=path, CXX=compiler)
        assert log.read_text() == compiled


@NEEDS_CMAKE
def test_another_nvcc_is_not_used(tree: Tree, tools: Path) -> None:
    """It comes, is updated and goes; each time all is compiled again, and in between nothing."""
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    add_tool(tools, "nvcc", "exit 1")  # before any that the machine has

    def compiles() -> bool:
        return "compiling for CPU on " in tree.build(PATH=path)

    assert compiles()
    assert not compiles()
    for version in ("12.9", "13.0"):
        add_tool(tools, "nvcc", f"echo {version}")
        assert compiles()
        assert not compiles()
    (tools / "nvcc").unlink()
    assert compiles()
