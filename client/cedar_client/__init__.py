# SPDX-License-Identifier: Apache-2.0
"""Streaming client of Cedar: `Client` for threads, `AsyncClient` for asyncio."""

from __future__ import annotations

from cedar_client.aio import AsyncClient, AsyncStream
from cedar_client.client import Client, Stream
from cedar_client.errors import (
    CedarError,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    ServerError,
    StallTimeout,
    Unavailable,
)
from cedar_client.types import Chat, Completion, Delta, Parameters, Perf, TokenLogprob

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "CedarError",
    "Chat",
    "Client",
    "Completion",
    "ConnectionLost",
    "DeadlineExceeded",
    "Delta",
    "InvalidArgument",
    "Parameters",
    "Perf",
    "ServerError",
    "StallTimeout",
    "Stream",
    "TokenLogprob",
    "Unavailable",
]
