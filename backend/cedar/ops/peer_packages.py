# SPDX-License-Identifier: Apache-2.0
"""Optional packages whose kernels may carry out an operation: what each is for, where it comes from, and finding it.

Cedar neither requires nor brings one, and imports one only when an operation is set to it. ``cedar.ops.peer_*`` adapt their
kernels to our contracts.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch

from cedar.errors import CedarError, invalid

_HOPPER = 9


class PeerUnsupported(Exception):
    """The package has no kernel for these arguments."""


class Adapter(NamedTuple):
    """module: of ``cedar.ops``; importing it adds the operation's body. functions: what that calls of the package."""

    module: str
    functions: tuple[str, ...]


class Peer(NamedTuple):
    """operations: those it can carry out. distribution: one that supplies it."""

    operations: dict[str, Adapter]
    distribution: str


PEERS = {
    "deep_gemm": Peer(
        {
            "mxfp8_linear": Adapter("peer_deep_gemm", ("fp8_gemm_nt", "bf16_gemm_nt")),
            "wo_a": Adapter("peer_deep_gemm", ("fp8_einsum", "einsum")),
            "mega_mhc": Adapter("peer_deep_gemm_mhc", ("tf32_hc_prenorm_gemm",)),
            "mega_gate": Adapter("peer_deep_gemm_experts", ("bf16_gemm_nt",)),
            "moe_fp4": Adapter(
                "peer_deep_gemm_experts",
                ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "get_mk_alignment_for_contiguous_layout"),
            ),
            "mqa_logits_topk": Adapter(
                "peer_deep_gemm_index", ("fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms")
            ),
        },
        "tokenspeed-deepgemm==2.5.0.post20260629",
    ),
    "flash_mla": Peer(
        {"mega_attention": Adapter("peer_flash_mla", ("flash_mla_sparse_fwd",))}, "tokenspeed-flashmla==1.0.0.post20260615"
    ),
}
"""By import name."""


def peers_of(op: str) -> tuple[str, ...]:
    """The packages that can carry out an operation."""
    return tuple(name for name, peer in PEERS.items() if op in peer.operations)


def prepare(name: str, op: str, setting: str, device: torch.device) -> None:
    """Import a package, and its adapter for an operation, which adds the operation's body.

    Raises `CedarError`, which names the setting that asked for it, where it is not there, is another one, or does not run on the
    device.
    """
    adapter = PEERS[name].operations[op]
    why = _wrong_device(device) or _wrong_package(name, adapter.functions)
    if why is not None:
        raise _unusable(name, setting, why)
    import_module(f"cedar.ops.{adapter.module}")


def _wrong_device(device: torch.device) -> str | None:
    needs = "its kernels are for Hopper GPUs (compute capability 9.x)"
    if device.type != "cuda":
        return f"{needs}, and the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major == _HOPPER else f"{needs}, and this one has {major}.{minor}"


def _wrong_package(name: str, functions: tuple[str, ...]) -> str | None:
    try:
        package = import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # the last two: DeepGEMM without a CUDA toolkit
        return f"the package cannot be imported: {error!r}"
    missing = [function for function in functions if not hasattr(package, function)]
    return f"the package of that name here has no {', '.join(missing)}" if missing else None


def _unusable(name: str, setting: str, why: str) -> CedarError:
    source = f"{name} from {PEERS[name].distribution} (the distribution {name.replace('_', '-')} is an unrelated one) on Hopper"
    return invalid(setting, f"is {name!r}, but {why}", f"auto | reference | native, or {source}")
