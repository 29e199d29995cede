# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, and what a caller may do about it."""

from __future__ import annotations

import re

import grpc


class CedarError(Exception):
    """Base of all errors of this package. ``key``: the request's key, under which the server's log has more."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class InvalidArgument(CedarError, ValueError):
    """The request is wrong; the message names the field, the problem and what is allowed. Do not repeat it."""


class Unavailable(CedarError):
    """The server cannot take the request now (queue full, draining, restarting). It may be repeated later."""


class ConnectionLost(Unavailable):
    """No connection, or it broke. Text that came before it is valid; the server drops the rest of the request."""


class DeadlineExceeded(CedarError, TimeoutError):
    """``timeout_ms`` passed before the first token. (With tokens already sent: finish_reason "deadline", no error.)"""


class StallTimeout(CedarError, TimeoutError):
    """Nothing came for ``stall_timeout`` seconds; the request has been cancelled."""


class ServerError(CedarError):
    """The server failed, or answered with an error of its own that has no class here."""


_CLASSES = {
    "INVALID_ARGUMENT": InvalidArgument,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "INTERNAL": ServerError,
}
_CODE_WORD = re.compile(rf"(?:^|\s)({'|'.join(_CLASSES)}): ")
"""Cedar's messages begin with a code word; Triton puts ``in ensemble '<name>', `` before it."""
_NOT_LOADED = re.compile(r"is not ready|no available versions|unknown model", re.IGNORECASE)
_STOPPING = re.compile(r"stopping|stopped accepting", re.IGNORECASE)
_WRONG_INPUT = re.compile(
    r"unexpected (?:inference input|shape)|inference input '|input '[^']*' already exists|unable to find data"
)
"""How Triton words refusals of its own, which carry no code inside a stream."""
_OWN_NAMES = (("sampling_parameters.", ""), ("text_input:", "prompt:"))
"""Fields of the protocol, and what they are called here: settings travel in one of them but are keywords of their own."""
_NOT_GRPC = re.compile(r"^failed to connect to all addresses.*(?:Socket closed|Failed parsing HTTP/2)", re.DOTALL)
"""How gRPC words that somebody listens there but hangs up, or answers in another protocol."""


def from_message(message: str, key: str) -> CedarError:
    """The error of a response's ``error_message``."""
    word = _CODE_WORD.search(message)
    if word:
        text = message[word.end() :]
        for theirs, ours in _OWN_NAMES:
            if text.startswith(theirs):
                text = ours + text.removeprefix(theirs)
        return _CLASSES[word.group(1)](text, key)
    if _NOT_LOADED.search(message):
        why = "the server still loads its model or brings it back: try again in a moment; unless it is not Cedar's"
        return Unavailable(f"{why} ({message})", key)
    if _STOPPING.search(message):
        return Unavailable(message, key)
    if _WRONG_INPUT.search(message):
        return InvalidArgument(message, key)
    return ServerError(message, key)


def from_status(code: grpc.StatusCode, details: str | None, key: str) -> CedarError:
    """The error of a call that ended with a gRPC status."""
    text = details or code.name
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        hint = "; or is that the HTTP port? gRPC is 8001 by default" if _NOT_GRPC.match(text) else ""
        return ConnectionLost(text + hint, key)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(text, key)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(text, key)
    return ServerError(f"{code.name}: {text}", key)


def stalled(seconds: float, key: str) -> StallTimeout:
    """Why a stream was given up, and where to look."""
    return StallTimeout(
        f"request {key}: nothing came for {seconds:g} s, so it was cancelled; the server may be queueing (look at "
        "cedar_num_requests_waiting and cedar_engine_up on its metrics port), still reading a long prompt, or unreachable; "
        "raise stall_timeout if such waits are normal here",
        key,
    )
