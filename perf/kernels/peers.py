# SPDX-License-Identifier: Apache-2.0
"""Public Hopper kernels by import name, where the machine has them: DeepGEMM, and parts of tokenspeed-kernel.

DeepGEMM compiles as it runs and needs nvcc. Of tokenspeed-kernel only single modules are taken, over the installed Triton:
the package as a whole asks for a newer PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from perf.kernels.case import Unavailable

_PARTS = ("ops", "ops.residual", "ops.activation", "ops.moe", "ops.moe.marlin", "ops.attention", "ops.attention.dsv4")
_CUDA_PARTS = ("thirdparty", "thirdparty.cuda")


def deep_gemm() -> Any:
    """The module. Raises `Unavailable`."""
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError) as error:
        raise Unavailable(f"deep_gemm: {error}") from error


def tokenspeed(part: str) -> Any:
    """``tokenspeed_kernel.<part>``. Raises `Unavailable`."""
    if "tokenspeed_kernel" not in sys.modules:
        spec = importlib.util.find_spec("tokenspeed_kernel")
        if spec is None or not spec.submodule_search_locations:
            raise Unavailable("tokenspeed_kernel is not installed")
        _lay_out(Path(next(iter(spec.submodule_search_locations))))
    try:
        return importlib.import_module(f"tokenspeed_kernel.{part}")
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"tokenspeed_kernel.{part}: {error}") from error


def _lay_out(root: Path) -> None:
    """Packages without their ``__init__``, and the installed Triton in place of its own."""
    import triton  # type: ignore[import-not-found, unused-ignore]
    from triton import language

    def package(name: str, *path: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__path__ = list(path)
        sys.modules[name] = module
        return module

    package("tokenspeed_kernel", str(root))
    shim: Any = package("tokenspeed_kernel._triton")
    shim.tl, shim.triton, shim.__getattr__ = language, triton, lambda name: None
    indexer: Any = package("tokenspeed_kernel.ops.attention.dsv4._triton.indexer")  # needs CuTe, which no row here does
    indexer.__getattr__ = lambda name: None
    for part in (*_PARTS, *_CUDA_PARTS):
        package(f"tokenspeed_kernel.{part}", str(root.joinpath(*part.split("."))))
