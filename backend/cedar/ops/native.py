# SPDX-License-Identifier: Apache-2.0
"""libcedar_kernels: finding it, loading it, and its operations as ``torch.ops.cedar.<op>``.

The library has a plain C interface (`backend/kernels/include/cedar_kernels.h`), so one binary serves every version of torch.
Operations write their results into arguments and return nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import FloatRecords, RecordFormat
from cedar.errors import invalid
from cedar.ops.abi import KINDS, OPERATIONS, Operation

ABI_VERSION = 4
LIBRARY = "libcedar_kernels.so"
_UNSUPPORTED, _WORKSPACE = 2, 4

_ROOT = Path(__file__).resolve().parents[3]
_NAMESPACE: Any = torch.library.Library("cedar", "DEF")  # type: ignore[no-untyped-call]
_registered: list[str] = []
_DEVICES = {"cpu": 0, "cuda": 1}
_CPU = torch.device("cpu")
_CPU_ISAS = ("baseline", "avx2", "avx512")
_CTYPES = {"int": ctypes.c_int64, "float": ctypes.c_double, "pointer": ctypes.c_void_p}


class NativeUnavailable(Exception):
    """The library cannot be used here; the text says why and what to do."""


class NativeUnsupported(Exception):
    """The library has no body for these arguments."""


class _Types(dict[torch.dtype, int]):
    def __missing__(self, dtype: torch.dtype) -> int:
        raise NativeUnsupported(f"it has no bodies for {dtype}")


_TYPES = _Types({torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.uint8: 3})


class Library:
    """The loaded shared library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(str(path))
            version = self._function("cedar_abi_version", ctypes.c_int64)()
            if version != ABI_VERSION:
                raise NativeUnavailable(f"{path} has ABI version {version}, this Cedar needs {ABI_VERSION}; build it again")
            info: bytes = self._function("cedar_build_info", ctypes.c_char_p)()
            self.last_error = self._function("cedar_last_error", ctypes.c_char_p)
            self._has_body = self._function("cedar_has_body", ctypes.c_int, ctypes.c_char_p, ctypes.c_int64)
            self.replay = self._function("cedar_replay", ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
            differs = [name for name, operation in OPERATIONS.items() if not self._agrees(operation)]
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{path} cannot be loaded ({error}); build it again") from error
        if differs:
            raise NativeUnavailable(f"{path} is of another Cedar (arguments of {', '.join(differs)}); build it again")
        self.info = info.decode()

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._dll, name)
        function.restype, function.argtypes = result, arguments
        return function

    @cached_property
    def pack_rows(self) -> Any:
        """``int pack_rows(...)``, see `cedar_kernels.h`."""
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        arguments = (pointer, number, pointer, number, number, pointer, number, pointer, number, number)
        return self._function("cedar_pack_rows", ctypes.c_int, *arguments)

    def _agrees(self, operation: Operation) -> bool:
        """Is the operation's struct as large there as here? Of no rows, all that is looked at is its size."""
        struct = struct_of(operation)
        return self.run(operation.name)(ctypes.byref(struct(ctypes.sizeof(struct))), None) == 0  # type: ignore[no-any-return]

    def has_body(self, op: str, device: torch.device) -> bool:
        """Can the library carry out an operation on a device, at least for some dimensions?"""
        return device.type in _DEVICES and bool(self._has_body(op.encode(), _DEVICES[device.type]))

    def run(self, op: str) -> Any:
        """``int run(args, stream)`` of an operation."""
        return self._function(f"cedar_{op}", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def workspace(self, op: str) -> Any:
        """``int64 workspace(args)`` of an operation."""
        return self._function(f"cedar_{op}_workspace", ctypes.c_int64, ctypes.c_void_p)


def candidates() -> list[Path]:
    """Where the library is looked for: CEDAR_KERNELS alone if it is set, else beside the package, else in a checkout's build."""
    named = os.environ.get("CEDAR_KERNELS")
    if named:
        return [Path(named)]
    return [Path(__file__).resolve().parents[1] / LIBRARY, _ROOT / "build" / "kernels" / LIBRARY]


@cache
def load() -> Library:
    """The library, its operations registered. Raises `NativeUnavailable`, and `CedarError` when CEDAR_CPU_ISA names no set.

    CEDAR_CPU_ISA, which the library reads: the widest instruction set of its CPU bodies; they use the widest there is up to it.
    """
    isa = os.environ.get("CEDAR_CPU_ISA")
    if isa is not None and isa not in _CPU_ISAS:
        raise invalid("CEDAR_CPU_ISA", f"is {isa!r}", f"{' | '.join(_CPU_ISAS)}, or unset")
    path = next((path for path in candidates() if path.is_file()), None)
    if path is None:
        looked = ", ".join(map(str, candidates()))
        raise NativeUnavailable(f"{LIBRARY} is not there (looked for {looked}); `make setup` builds it")
    library = Library(path)
    if not _registered:
        for operation in OPERATIONS.values():
            _register(library, operation)
            _registered.append(operation.name)
    return library


MOST_THREADS = 256
"""What the pool of the CPU bodies has at most; a workspace grows with the number."""


def set_threads(count: int) -> None:
    """How many threads a CPU body may use, this one included; at first one. They sleep between operations, and results do not
    depend on their number. Not torch's count: its idle threads spin, which no small operation is worth."""
    _threads[0] = min(count, MOST_THREADS)


_threads = [1]


def struct_of(operation: Operation) -> type[ctypes.Structure]:
    """The ctypes struct of an operation's arguments."""
    fields = [(name, _CTYPES[kind]) for name, kind in operation.fields]
    return type(f"cedar_{operation.name}_args", (ctypes.Structure,), {"_fields_": fields})


def _wrong(op: str, name: str, tensor: Tensor, kind: str, dims: tuple[str, ...], home: torch.device) -> None:
    has = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}"
    raise ValueError(f"{op}: {name} is {has}; allowed: dense {KINDS.get(kind, kind)} [{', '.join(dims)}] on {home}")


def builder(operation: Operation) -> Callable[..., ctypes.Structure]:
    """``build(*arguments, home, device, threads, workspace_bytes, workspace)`` of an operation (`Operation.source`).

    It raises ValueError for what is not as the table says, or not where the call runs, before anything takes its address.
    """
    struct = struct_of(operation)
    scope: dict[str, Any] = {"Struct": struct, "SIZE": ctypes.sizeof(struct), "TYPES": _TYPES, "wrong": _wrong}
    scope.update({dtype: getattr(torch, dtype) for dtype in KINDS.values()})
    exec(operation.source, scope)
    return scope["build"]  # type: ignore[no-any-return]


class _Scratch(threading.local):
    """Workspace of the CPU bodies, one per thread, grown and kept."""

    def __init__(self) -> None:
        self.size = 0
        self.pointer = 0

    def grow(self, size: int) -> tuple[int, int]:
        """At least ``size`` bytes: (bytes, address)."""
        self._memory = torch.empty(size + size // 2, dtype=torch.uint8)
        self.size, self.pointer = self._memory.numel(), self._memory.data_ptr()
        return self.size, self.pointer


_scratch = _Scratch()


class Recording:
    """Operations of a CPU pass, to be carried out again on the same tensors, whatever these hold then.

    It keeps the tensors alive: inputs, results and everything in between. Between two replays only the caller's own writes to the
    inputs happen. Nothing but ``torch.ops.cedar`` may have run in the pass; ``whole`` is false when a reference had to.
    num_bytes: results and workspace.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._calls: list[tuple[Any, Any, ctypes.Structure]] = []
        self._kept: list[tuple[Any, ...]] = []
        self.whole = True
        self.num_bytes = 0

    def add(self, run: Any, workspace: Any, args: ctypes.Structure, arguments: tuple[Any, ...], results: list[Tensor]) -> None:
        """One more operation, which was just carried out."""
        self._calls.append((run, workspace, args))
        self._kept.append(arguments)
        self.num_bytes += sum(result.nbytes for result in results)

    def seal(self) -> None:
        """The pass is over. Its operations take turns in one workspace."""
        size = max(workspace(ctypes.byref(args)) for _, workspace, args in self._calls)
        self._memory = torch.empty(size, dtype=torch.uint8)
        self.num_bytes += size
        self._array = (_Call * len(self._calls))()
        for place, (run, _, args) in zip(self._array, self._calls, strict=True):
            args.workspace_bytes, args.workspace = size, self._memory.data_ptr()
            place.function, place.args = ctypes.cast(run, ctypes.c_void_p), ctypes.addressof(args)

    def replay(self) -> None:
        """Carry everything out."""
        status = self._library.replay(self._array, len(self._array), None)
        if status:
            _raise(self._library, "replay", status)


class _Call(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("args", ctypes.c_void_p))


class _Active(threading.local):
    """The recording that this thread's calls go to."""

    recording: Recording | None = None


_active = _Active()


@contextmanager
def recording() -> Iterator[Recording]:
    """Carry out and record the operations of the block."""
    _active.recording = recorded = Recording(load())
    try:
        yield recorded
    finally:
        _active.recording = None
    if recorded.whole:
        recorded.seal()


def skipped() -> None:
    """An operation ran as its reference: what this thread records is not all of the pass."""
    if _active.recording is not None:
        _active.recording.whole = False


def _register(library: Library, operation: Operation) -> None:
    on_cpu, on_cuda = _calls(library, operation)
    _NAMESPACE.define(operation.schema)
    _NAMESPACE.impl(operation.name, on_cpu, "CPU")
    _NAMESPACE.impl(operation.name, on_cuda, "CUDA")
    torch.library.register_fake(f"cedar::{operation.name}", lambda *_: None, lib=_NAMESPACE)


def _on_stream(stream: torch.cuda.Stream, size: int) -> Tensor:
    """Workspace of the CUDA bodies, one per stream, whose calls take turns: grown and kept, zeroed once, as the counters need it.

    A graph that was captured keeps what it was captured with.
    """
    memory = _stream_memory.get(stream)
    if memory is None or memory.numel() < size:
        if memory is not None:
            _outgrown.append(memory)
        memory = _stream_memory[stream] = torch.zeros(size + size // 2, dtype=torch.uint8, device=stream.device)
    return memory


_stream_memory: dict[torch.cuda.Stream, Tensor] = {}
_outgrown: list[Tensor] = []


def _calls(library: Library, operation: Operation) -> tuple[Callable[..., None], Callable[..., None]]:
    """What the dispatcher calls for tensors of a CPU and of a GPU."""
    build, byref = builder(operation), ctypes.byref
    run, workspace = library.run(operation.name), library.workspace(operation.name)
    first = next(place for place, tensor in enumerate(operation.tensors) if not tensor.optional)
    written = [place for place, tensor in enumerate(operation.tensors) if tensor.written and tensor.sized]  # without pools

    def on_cpu(*arguments: Any) -> None:
        """Call with the thread's own workspace, which grows when it is too small; keep the call where one records."""
        args = build(*arguments, _CPU, 0, _threads[0], _scratch.size, _scratch.pointer)
        status = run(byref(args), None)
        if status == _WORKSPACE:
            args.workspace_bytes, args.workspace = _scratch.grow(workspace(byref(args)))
            status = run(byref(args), None)
        if status:
            _raise(library, operation.name, status)
        if _active.recording is not None:
            results = [arguments[place] for place in written if arguments[place] is not None]
            _active.recording.add(run, workspace, args, arguments, results)

    def on_cuda(*arguments: Any) -> None:
        """Call on the current stream of the device of the first tensor, with the workspace of that stream."""
        home = arguments[first].device
        stream = torch.cuda.current_stream(home)
        args = build(*arguments, home, 1, 1, 0, None)
        size = workspace(byref(args))
        if size > 0:
            args.workspace_bytes, args.workspace = size, _on_stream(stream, size).data_ptr()
        with torch.cuda.device(stream.device):
            status = run(byref(args), stream.cuda_stream)
        if status:
            _raise(library, operation.name, status)

    return on_cpu, on_cuda


def _raise(library: Library, op: str, status: int) -> None:
    text = library.last_error().decode()
    raise NativeUnsupported(text) if status == _UNSUPPORTED else RuntimeError(f"{op}: status {status}: {text}")


_RECORDS: dict[type[Any], int] = {WindowRecords: 2, GlobalRecords: 3, IndexKeyRecords: 4}


def record_code(record: RecordFormat) -> int:
    """The library's number of a record format."""
    if isinstance(record, FloatRecords):
        return _TYPES[record.dtype]
    if type(record) not in _RECORDS:
        raise NativeUnsupported(f"it has no bodies for {type(record).__name__}")
    return _RECORDS[type(record)]
