# SPDX-License-Identifier: Apache-2.0
"""Build hook: the protocol code (cedar/v1) is generated from protos/ at build time, so that every wheel carries it."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
PACKAGE = "cedar.v1"


class GenerateThenBuild(build_py):
    """`build_py` that runs scripts/build_protos.py first and adds the package that it makes."""

    def finalize_options(self) -> None:
        status = runpy.run_path(str(ROOT / "scripts" / "build_protos.py"))["main"]()
        if status:
            raise ExecError(f"scripts/build_protos.py ended with status {status}")
        packages = self.distribution.packages or []
        if PACKAGE not in packages:
            self.distribution.packages = [*packages, PACKAGE]
        super().finalize_options()


setup(cmdclass={"build_py": GenerateThenBuild})
