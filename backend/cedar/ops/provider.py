# SPDX-License-Identifier: Apache-2.0
"""Who carries out a fused operation: its reference (plain PyTorch), or the kernel library.

A runner chooses once, for its device, and makes its choice current while it runs a step; outside of steps the references run.
``CEDAR_OPS`` (the setting ``ops``) is for all operations, ``CEDAR_OP_<NAME>`` for one.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

import torch

from cedar.errors import invalid
from cedar.ops import native
from cedar.ops.abi import OPERATIONS

P = ParamSpec("P")
R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_ALLOWED = ("auto", "reference", "native")
_PREFIX = "CEDAR_OP_"
REFERENCE = "PyTorch reference"
"""What `Choice.summary` calls operations that the library does not carry out."""


class FusedOp(Generic[P, R]):
    """An operation: called like its reference, whose docstring is the contract; `native` adds the library's body."""

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.name = reference.__name__
        self._native: Callable[P, R] | None = None

    def native(self, body: Callable[P, R]) -> Callable[P, R]:
        """Decorator of the function that does the same through ``torch.ops.cedar``."""
        self._native = body
        return body

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        choice = _current.get()
        if choice is None or self._native is None or self.name not in choice.native_ops:
            return self.reference(*args, **kwargs)
        try:
            return self._native(*args, **kwargs)
        except native.NativeUnsupported as error:
            choice.refused(self.name, str(error))
            native.skipped()
            return self.reference(*args, **kwargs)


@dataclass
class Choice:
    """native_ops: operations that the library carries out. required: an operation that it cannot is an error, not a fallback.

    summary: the same for people, and why it is so.
    """

    native_ops: set[str]
    required: set[str]
    summary: str = REFERENCE
    _told: set[str] = field(default_factory=set)

    def refused(self, op: str, why: str) -> None:
        """The library has no body for these arguments. Says so once."""
        if op in self.required:
            raise invalid("ops", f"is 'native' for {op}, but {why}", f"auto, or {_PREFIX}{op.upper()}=reference")
        if op not in self._told:
            self._told.add(op)
            _LOG.warning("%s runs as its PyTorch reference where the library cannot: %s", op, why)


_current: ContextVar[Choice | None] = ContextVar("choice", default=None)


@contextmanager
def using(choice: Choice | None) -> Iterator[None]:
    """Run the block with a choice; None: references."""
    token = _current.set(choice)
    try:
        yield
    finally:
        _current.reset(token)


def choose(ops: str, device: torch.device, env: Mapping[str, str] | None = None) -> Choice:
    """What the setting ``ops`` and the environment mean on this machine.

    auto: everything that the library has, or the references and one line in the log that says why not. Raises `CedarError`
    when an operation must be native and the library is not there.
    """
    env = os.environ if env is None else env
    unknown = sorted(name for name in env if name.startswith(_PREFIX) and name.removeprefix(_PREFIX).lower() not in OPERATIONS)
    if unknown:
        raise invalid(unknown[0], "names no operation", ", ".join(_PREFIX + name.upper() for name in OPERATIONS))
    wanted = {name: _wanted(name, ops, env) for name in OPERATIONS}
    required = {name for name, how in wanted.items() if how == "native"}
    if not any(how != "reference" for how in wanted.values()):
        return Choice(set(), set())
    try:
        library = native.load()
    except native.NativeUnavailable as error:
        if required:
            raise invalid("ops", f"is 'native', but {error}", "auto or reference") from error
        _LOG.warning("operations run as their PyTorch references: %s", error)
        return Choice(set(), set(), f"{REFERENCE}: {error}")
    has = {name for name in wanted if library.has_body(name, device)}
    missing = sorted(required - has)
    if missing:
        raise invalid("ops", f"is 'native', but the library has no {', '.join(missing)} for {device.type}", "auto or reference")
    native_ops = {name for name, how in wanted.items() if how != "reference"} & has
    if not native_ops:
        summary = f"{REFERENCE}: {library.path} ({library.info}) has no bodies for {device.type}"
        _LOG.warning("operations run as their %s", summary)
        return Choice(set(), required, summary)
    rest = [name for name in OPERATIONS if name not in native_ops]
    summary = f"native ({library.info})" + (f", {REFERENCE}: {', '.join(rest)}" if rest else "")
    _LOG.info("operations run in %s: %s", library.path, summary)
    return Choice(native_ops, required, summary)


def _wanted(name: str, ops: str, env: Mapping[str, str]) -> str:
    variable = _PREFIX + name.upper()
    how = env.get(variable) or ops
    if how not in _ALLOWED:
        raise invalid(variable if env.get(variable) else "ops", f"is {how!r}", " | ".join(_ALLOWED))
    return how
