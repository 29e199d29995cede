# SPDX-License-Identifier: Apache-2.0
"""Build hooks: what a wheel carries beside the Python files is made at build time.

The protocol code (cedar/v1) comes from protos/, the kernel library from backend/kernels where there is a compiler for it. A wheel
with the library has a platform tag, but no Python version or ABI: the library is loaded by ctypes.
"""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
PACKAGE = "cedar.v1"


def _script(name: str) -> Any:
    return runpy.run_path(str(ROOT / "scripts" / name))["main"]


@cache
def kernel_library() -> Path | None:
    """The library, built once per run; None: there is no compiler."""
    library: Path | None = _script("build_kernels.py")()
    return library


class GenerateThenBuild(build_py):
    """`build_py` that generates the protocol code first and adds the package that it makes, and the kernel library."""

    def finalize_options(self) -> None:
        status = _script("build_protos.py")()
        if status:
            raise ExecError(f"scripts/build_protos.py ended with status {status}")
        packages = self.distribution.packages or []
        if PACKAGE not in packages:
            self.distribution.packages = [*packages, PACKAGE]
        super().finalize_options()

    def run(self) -> None:
        super().run()
        # An editable install finds the library in build/kernels, where it is built again after a change.
        if self.editable_mode:
            return
        library, package = kernel_library(), Path(self.build_lib) / "cedar"
        for stale in package.glob("*.so"):
            stale.unlink()
        if library is not None:
            self.copy_file(str(library), str(package / library.name))


class KernelWheel(bdist_wheel):
    """`bdist_wheel` whose tag says whether the library is in the wheel."""

    def run(self) -> None:
        if kernel_library() is not None:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # to platlib, like the tag
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": GenerateThenBuild, "bdist_wheel": KernelWheel})
