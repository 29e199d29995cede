# SPDX-License-Identifier: Apache-2.0
"""Public Hopper kernels by import name, where the machine has them: DeepGEMM, FlashMLA, Humming, and parts of tokenspeed-kernel.

DeepGEMM and Humming compile as they run and need nvcc; `check_peers` does that beforehand, in parallel. Of tokenspeed-kernel only
single modules are taken, over the installed Triton: the package as a whole asks for a newer PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any

from perf.kernels.case import Unavailable

_PARTS = ("ops", "ops.residual", "ops.activation", "ops.moe", "ops.moe.marlin", "ops.attention", "ops.attention.dsv4")
_CUDA_PARTS = ("thirdparty", "thirdparty.cuda")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"{name}: {error}") from error


def deep_gemm() -> Any:
    """The module (distribution tokenspeed-deepgemm 2.5). Raises `Unavailable`."""
    return _module("deep_gemm")


def launch_early() -> None:
    """From here on DeepGEMM's launches begin while those before them end, where its kernels await them. Raises `Unavailable`."""
    deep_gemm().set_pdl(True)


def flash_mla() -> tuple[Any, dict[str, bool]]:
    """The module (distribution tokenspeed-flashmla, or sgl-flash-mla) and what its Hopper kernels are to be called with besides.

    Raises `Unavailable`.
    """
    module = _module("flash_mla")
    legacy = "use_legacy" in inspect.signature(module.flash_mla_with_kvcache).parameters
    return module, {"use_legacy": True} if legacy else {}


def humming(part: str) -> Any:
    """``humming.<part>`` (distribution humming-kernels). Raises `Unavailable`."""
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # importing would start processes that build what is built
    os.environ.setdefault("HUMMING_COMPILER", "nvcc")  # its other one looks for NVRTC's headers, which a toolkit may lack
    return _module(f"humming.{part}")


def tokenspeed(part: str) -> Any:
    """``tokenspeed_kernel.<part>``. Raises `Unavailable`."""
    if "tokenspeed_kernel" not in sys.modules:
        spec = importlib.util.find_spec("tokenspeed_kernel")
        if spec is None or not spec.submodule_search_locations:
            raise Unavailable("tokenspeed_kernel is not installed")
        if importlib.util.find_spec("triton") is None:
            raise Unavailable("tokenspeed_kernel: Triton is not installed")
        _lay_out(Path(next(iter(spec.submodule_search_locations))))
    return _module(f"tokenspeed_kernel.{part}")


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
