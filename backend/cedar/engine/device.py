# SPDX-License-Identifier: Apache-2.0
"""Where the network runs: device, arithmetic, threads, and how much memory is free."""

from __future__ import annotations

import os

import psutil
import torch

from cedar.config.engine import EngineConfig
from cedar.config.model import ModelConfig
from cedar.errors import invalid
from cedar.ops import native

PARALLEL_WORK = 1 << 26
"""Multiply-adds of one layer from which CPU threads pay. Below it a step is thousands of operations of microseconds, and the
barrier of each waits for whichever core another process is using."""


def resolve_device(settings: EngineConfig) -> torch.device:
    """``device`` with auto resolved. Raises `CedarError` when a GPU is asked for and absent."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise invalid("device", "is 'cuda', but no GPU can be used", "auto or cpu on this machine")
    return torch.device("cuda" if settings.device != "cpu" and available else "cpu")


def resolve_dtype(settings: EngineConfig, device: torch.device) -> torch.dtype:
    """``dtype`` with auto resolved: bfloat16 on a GPU, float32 on a CPU."""
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


class CpuThreads:
    """Sets torch's thread count to fit each step. Does nothing on a GPU.

    native_ops: the kernel library carries out all operations. Its threads sleep between operations and are set once; torch, whose
    idle threads spin and would be in their way, has one.
    """

    def __init__(self, config: ModelConfig, settings: EngineConfig, device: torch.device, *, native_ops: bool) -> None:
        self._most = settings.cpu_threads or len(os.sched_getaffinity(0))
        self._active = device.type == "cpu"
        self._native = native_ops
        if self._active:
            native.set_threads(self._most)
        attention = config.hidden_size * (config.q_lora_rank + config.head_dim + config.o_groups * config.o_lora_rank)
        attention += config.num_attention_heads * config.head_dim * (config.q_lora_rank + config.o_lora_rank)
        experts = (config.num_experts_per_tok + 1) * 3 * config.hidden_size * config.moe_intermediate_size
        self._row_work = attention + experts

    def use(self, rows: int | None = None) -> None:
        """For a step of ``rows`` rows; None: all threads (loading)."""
        if self._active:
            few = rows is not None and (self._native or rows * self._row_work < PARALLEL_WORK)
            torch.set_num_threads(1 if few else self._most)
