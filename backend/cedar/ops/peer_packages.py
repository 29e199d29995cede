# SPDX-License-Identifier: Apache-2.0
"""Optional packages whose kernels may carry out an operation: what each is for, where it comes from, and finding it.

Cedar neither requires nor brings one, and imports one only when an operation is set to it, or on a Blackwell GPU, where those
that nothing was said of go to its kernels for whole ones. ``cedar.ops.peer_*`` adapt their kernels to our contracts.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch

from cedar.errors import CedarError, invalid

_HOPPER, _BLACKWELL = 9, 10
"""Compute capabilities, without what follows the point."""


class PeerUnsupported(Exception):
    """The package has no kernel for these arguments."""


class Adapter(NamedTuple):
    """module: of ``cedar.ops``; importing it adds the operation's body. functions: what that calls of the package on Hopper.

    whole: what it calls on Blackwell, if the package has one kernel for the whole operation there.
    """

    module: str
    functions: tuple[str, ...]
    whole: tuple[str, ...] = ()


class Peer(NamedTuple):
    """operations: those it can carry out. distribution: one that supplies it. newest: one with kernels for Blackwell GPUs."""

    operations: dict[str, Adapter]
    distribution: str
    newest: str | None = None


PEERS = {
    "deep_gemm": Peer(
        {
            "mxfp8_linear": Adapter("peer_deep_gemm", ("fp8_gemm_nt", "bf16_gemm_nt")),
            "wo_a": Adapter("peer_deep_gemm", ("fp8_einsum", "einsum")),
            "mega_mhc": Adapter("peer_deep_gemm_mhc", ("tf32_hc_prenorm_gemm",), ("mega_mhc", "use_deterministic_algorithms")),
            "mega_gate": Adapter("peer_deep_gemm_experts", ("bf16_gemm_nt",), ("bf16_mega_gate", "use_deterministic_algorithms")),
            "moe_fp4": Adapter(
                "peer_deep_gemm_experts",
                ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "get_mk_alignment_for_contiguous_layout"),
            ),
            "mqa_logits_topk": Adapter(
                "peer_deep_gemm_index", ("fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms")
            ),
        },
        "tokenspeed-deepgemm==2.5.0.post20260629",
        "tokenspeed-deepgemm==2.8.2.post20261020",
    ),
    "flash_mla": Peer(
        {"mega_attention": Adapter("peer_flash_mla", ("flash_mla_sparse_fwd",))}, "tokenspeed-flashmla==1.0.0.post20260615"
    ),
}
"""By import name."""


def peers_of(op: str) -> tuple[str, ...]:
    """The packages that can carry out an operation."""
    return tuple(name for name, peer in PEERS.items() if op in peer.operations)


def is_blackwell(device: torch.device) -> bool:
    return _generation(device) == _BLACKWELL


def preferred(op: str, device: torch.device) -> str | None:
    """The package here that has one kernel for the whole of an operation on a Blackwell GPU."""
    if not is_blackwell(device):
        return None
    for name in peers_of(op):
        whole = PEERS[name].operations[op].whole
        if whole and find_spec(name) is not None and _wrong_package(name, whole) is None:
            return name
    return None


def prepare(name: str, op: str, setting: str, device: torch.device) -> None:
    """Import a package, and its adapter for an operation, which adds the operation's body.

    Raises `CedarError`, which names the setting that asked for it, where it is not there, is another one, or does not run on the
    device.
    """
    adapter = PEERS[name].operations[op]
    functions = adapter.whole if is_blackwell(device) else adapter.functions
    why = _wrong_device(adapter, device) or _wrong_package(name, functions)
    if why is not None:
        raise _unusable(name, adapter, setting, why)
    import_module(f"cedar.ops.{adapter.module}")


def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _wrong_device(adapter: Adapter, device: torch.device) -> str | None:
    needs = "its kernels are for Hopper GPUs (compute capability 9.x)"
    if adapter.whole:
        needs = "its kernels are for Hopper and Blackwell GPUs (compute capability 9.x and 10.x)"
    if device.type != "cuda":
        return f"{needs}, and the device is {device.type}"
    if _generation(device) == _HOPPER or (adapter.whole and is_blackwell(device)):
        return None
    return f"{needs}, and this one has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"


def _wrong_package(name: str, functions: tuple[str, ...]) -> str | None:
    try:
        package = import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # the last two: DeepGEMM without a CUDA toolkit
        return f"the package cannot be imported: {error!r}"
    missing = [function for function in functions if not hasattr(package, function)]
    return f"the package of that name here has no {', '.join(missing)}" if missing else None


def _unusable(name: str, adapter: Adapter, setting: str, why: str) -> CedarError:
    peer, dashed = PEERS[name], name.replace("_", "-")
    source = f"{name} from {peer.distribution} (the distribution {dashed} is an unrelated one) on Hopper"
    if adapter.whole:
        source += f", {peer.newest} on Blackwell"
    return invalid(setting, f"is {name!r}, but {why}", f"auto | reference | native, or {source}")
