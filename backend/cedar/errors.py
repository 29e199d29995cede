# SPDX-License-Identifier: Apache-2.0
"""The errors a caller may see: a code and a message that says which field, what was wrong, what is allowed."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The word that stands at the start of every message of ours (contract: README, "Errors")."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class CedarError(Exception):
    """An error with a code that reaches the caller unchanged through gRPC, Triton and the client."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def invalid(field: str, problem: str, allowed: str) -> CedarError:
    """INVALID_ARGUMENT in the one wording we use: ``field: problem; allowed: …``."""
    return CedarError(ErrorCode.INVALID_ARGUMENT, f"{field}: {problem}; allowed: {allowed}")


def unavailable(reason: str) -> CedarError:
    """UNAVAILABLE: the same request may succeed later (queue full, draining, engine restarting)."""
    return CedarError(ErrorCode.UNAVAILABLE, reason)
