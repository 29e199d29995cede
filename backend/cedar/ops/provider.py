# SPDX-License-Identifier: Apache-2.0
"""Who carries out a fused operation: its reference (plain PyTorch), the kernel library, or an optional package's kernels.

A runner chooses once, for its device, and makes its choice current while it runs a step; outside of steps the references run.
``CEDAR_OPS`` (the setting ``ops``) is for all operations, ``CEDAR_OP_<NAME>`` for one, which it may give to a package
(`cedar.ops.peer_packages`). What a package cannot do goes where ``ops`` says.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

import torch

from cedar.errors import invalid
from cedar.ops import native
from cedar.ops.abi import OPERATIONS
from cedar.ops.peer_packages import PEERS, PeerUnsupported, peers_of, preferred, prepare

P = ParamSpec("P")
R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_ALLOWED = ("auto", "reference", "native")
_PREFIX = "CEDAR_OP_"
REFERENCE = "PyTorch reference"
"""What `Choice.summary` calls operations that the library does not carry out."""


class FusedOp(Generic[P, R]):
    """An operation: called like its reference, whose docstring is the contract; `native` and `by` add other bodies."""

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.name = reference.__name__
        self.bodies: dict[str, Callable[P, R]] = {}

    def by(self, provider: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator of the function that does the same with a provider's kernels."""

        def add(body: Callable[P, R]) -> Callable[P, R]:
            self.bodies[provider] = body
            return body

        return add

    def native(self, body: Callable[P, R]) -> Callable[P, R]:
        """Decorator of the function that does the same through ``torch.ops.cedar``."""
        return self.by("native")(body)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        choice = _current.get()
        if choice is None:
            return self.reference(*args, **kwargs)
        for provider in choice.providers(self.name):
            try:
                return self.bodies[provider](*args, **kwargs)
            except (native.NativeUnsupported, PeerUnsupported) as error:
                choice.refused(self.name, provider, str(error))
        native.skipped()
        return self.reference(*args, **kwargs)


@dataclass
class Choice:
    """native_ops: operations that the library carries out. required: an operation that it cannot is an error, not a fallback.

    summary: the same for people, and why it is so. peers: the package of an operation that one is set for; it is asked first.
    """

    native_ops: set[str]
    required: set[str]
    summary: str = REFERENCE
    peers: dict[str, str] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def providers(self, op: str) -> tuple[str, ...]:
        """Who is asked, in turn, before the reference."""
        library = ("native",) if op in self.native_ops else ()
        return (self.peers[op], *library) if op in self.peers else library

    def refused(self, op: str, provider: str, why: str) -> None:
        """A provider has no body for these arguments. Says so once."""
        if provider == "native" and op in self.required:
            raise invalid("ops", f"is 'native' for {op}, but {why}", f"auto, or {_PREFIX}{op.upper()}=reference")
        if (op, provider) not in self._told:
            self._told.add((op, provider))
            if provider == "native":
                _LOG.warning("%s runs as its PyTorch reference where the library cannot: %s", op, why)
            else:
                _LOG.warning("%s runs without %s where that cannot: %s", op, provider, why)


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

    auto: on a Blackwell GPU a package's kernel for the whole operation, if one is here; then everything that the library has, or
    the references and one line in the log that says why not. Raises `CedarError` when an operation must be native and the
    library is not there, or is set to a package that cannot be used.
    """
    env = os.environ if env is None else env
    unknown = sorted(name for name in env if name.startswith(_PREFIX) and name.removeprefix(_PREFIX).lower() not in OPERATIONS)
    if unknown:
        raise invalid(unknown[0], "names no operation", ", ".join(_PREFIX + name.upper() for name in OPERATIONS))
    wanted = {name: _wanted(name, ops, env) for name in OPERATIONS}
    wanted |= {name: preferred(name, device) or how for name, how in wanted.items() if how == "auto"}
    peers = {name: how for name, how in wanted.items() if how in PEERS}
    for name, peer in peers.items():
        prepare(peer, name, _PREFIX + name.upper(), device)
    choice = _of_library(wanted | dict.fromkeys(peers, ops), device, unnamed=peers)
    choice.peers = peers
    for name, peer in peers.items():
        choice.summary += f"; {name}: {peer}"
        _LOG.info("%s runs in %s", name, peer)
    return choice


def _of_library(wanted: Mapping[str, str], device: torch.device, unnamed: Collection[str]) -> Choice:
    """What the library carries out of operations that are auto, reference or native. unnamed: those the summary leaves out."""
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
    rest = [name for name in OPERATIONS if name not in native_ops and name not in unnamed]
    summary = f"native ({library.info})" + (f", {REFERENCE}: {', '.join(rest)}" if rest else "")
    _LOG.info("operations run in %s: %s", library.path, summary)
    return Choice(native_ops, required, summary)


def _wanted(name: str, ops: str, env: Mapping[str, str]) -> str:
    variable = _PREFIX + name.upper()
    one = env.get(variable)
    allowed = (*_ALLOWED, *peers_of(name)) if one else _ALLOWED
    how = one or ops
    if how not in allowed:
        raise invalid(variable if one else "ops", f"is {how!r}", " | ".join(allowed))
    return how
