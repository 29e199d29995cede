# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, emulated on a CPU: the GPU tests of `tests/ops` at small sizes.

Copies land as late as a kernel's waits allow, or early, and warps run in an order that a seed chooses, so that a missing wait or
barrier shows, which a run on a GPU may hide.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from emulator import ADDRESSES, build, missing, run_tests

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

FEW = 20
"""Processors, so that persistent blocks have several tiles each."""
MANY = 132


@pytest.fixture(scope="module")
def library() -> Path:
    """The emulated library; building takes a minute or two, once."""
    return build()


SMALL = [
    pytest.param(
        "",
        "boundary_differs and (352 or 5120) and not 1500 and (all or norm) or boundary_differs and 130 and (64 or 256) "
        "or whole_tiles and (24 or 41 or 58) or tile_is_no_number and 58",
        id="mega_mhc",
    ),
    pytest.param(
        "",
        "choice_differs and not 5120 and not 2053 and not 4096 or choice_differs and (17-5120 or 500-5120) "
        "or equal_scores and not 1900",
        id="mega_gate",
    ),
    pytest.param("", "window_records or entries or entry_depends or not_finite", id="stores"),
    pytest.param("_engram", "other_rows and not from_the_host or gate_differs and not 1100 or gate_depends", id="engram"),
    pytest.param(
        "_linear",
        "(64-64 or 272 or 2-128 or 4-256) and not 641 and not 900 or True-641-9248 or few_rows or nan or body_ends "
        "or True-300-2624 or True-48-40000 or True-48-32768 or some_tens and 1- and (328 or 2080 or 352 or 96-512) "
        "or grouped_projection_depends and (3-256 or 2-1024) or streamed and 1- and (10240 or 4260 or 16932)",
        id="linears",
    ),
    pytest.param(
        "_moe",
        "experts_differ and (8-2 or 5-2) and not 640 and not 641 and not 1500 or one_expert and 60 or exist",
        id="moe_fp4",
    ),
    pytest.param(
        "_index",
        "worse_entry or few_entries and not 33 and not tens or tens_of_rows and ([6- or [7-) or float32 and True "
        "or restricted_search and 100 or equal_scores and not 70000 or strided or nobody_sees or no_number "
        "or exact_scores and lengths0 or scored_wrong and 9-",
        id="mqa_logits_topk",
    ),
    pytest.param(
        "_attention",
        "output_differs and [3- and not sizes10 or single_key and 63 or without_keys or other_bits and [17- or half_of_a_tile "
        "or row_of_many and 129 and not sizes1 or output_differs and [133- and widths4 or few_of_many and (sizes1 or widths1) "
        "or 16_bytes",
        id="mega_attention",
    ),
    pytest.param("_plain", "not captured and not 5120 and not batch", id="plain"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("module", "selected"), SMALL)
def test_an_emulated_kernel_differs(library: Path, tmp_path: Path, module: str, selected: str) -> None:
    run_tests(library, f"test_native_cuda{module}", selected, seed=1, processors=FEW, directory=tmp_path)


@pytest.fixture(scope="module")
def checked_library() -> Path:
    """The same with every access to memory checked."""
    return build(ADDRESSES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("module", "selected"), SMALL)
def test_an_emulated_kernel_accesses_other_memory(checked_library: Path, tmp_path: Path, module: str, selected: str) -> None:
    run_tests(checked_library, f"test_native_cuda{module}", selected, seed=3, processors=FEW, directory=tmp_path, checked=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2])
@pytest.mark.parametrize(
    ("module", "selected", "processors"),
    [
        pytest.param("", "boundary_differs and 5120 and (1500 and all or 130) or boundary and batch and 70", FEW, id="mega_mhc"),
        pytest.param(
            "",
            "choice_differs and (5120 and 300 or 2053 and not 501) or choice_depends and (100 or 385 or 512) "
            "or equal_scores and (500 or 1900)",
            MANY,
            id="mega_gate",
        ),
        pytest.param(
            "_linear",
            "(64-64 or 272 or 2-128) and not 641 or 900-9248 or rounding and not 700",
            MANY,
            id="linears",
        ),
        pytest.param("_moe", "experts_differ and (8-2 or 5-2 or 16-6 and 48) or one_expert or nan or exist", FEW, id="moe_fp4"),
        pytest.param(
            "_index",
            "scales_far or sizes_are_lost or scored_wrong and 40- or nan or chunk and True or larger_blocks",
            MANY,
            id="mqa_logits_topk",
        ),
        pytest.param(
            "_attention",
            "output_differs and [48- and not sizes10 or other_sizes or single_key or leak or block_of_many and widths2",
            FEW,
            id="mega_attention",
        ),
        pytest.param("_plain", "not captured and (5120 or batch) and not 130", MANY, id="plain"),
    ],
)
def test_an_emulated_kernel_differs_at_larger_sizes(
    library: Path, tmp_path: Path, module: str, selected: str, processors: int, seed: int
) -> None:
    run_tests(library, f"test_native_cuda{module}", selected, seed=seed, processors=processors, directory=tmp_path)
