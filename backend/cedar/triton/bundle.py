# SPDX-License-Identifier: Apache-2.0
"""Finding a tritonserver, and what it needs to run our Python models in this interpreter's environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import cedar
from cedar.config.engine import EngineConfig
from cedar.errors import CedarError, ErrorCode, invalid

CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Triton:
    """A server that can be started. ``arguments`` and ``environment`` come on top of the usual ones."""

    executable: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def find_triton(config: EngineConfig) -> Triton:
    """``config.tritonserver``, else PATH, else the container's place, else the server inside the nvidia-pytriton wheel."""
    if config.tritonserver:
        path = shutil.which(config.tritonserver)
        if path is None:
            raise invalid("tritonserver", f"{config.tritonserver} is not an executable", "a tritonserver executable")
        return _installed(Path(path).resolve())
    path = shutil.which("tritonserver") or (str(CONTAINER) if os.access(CONTAINER, os.X_OK) else None)
    if path is not None:
        return _installed(Path(path).resolve())
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        allowed = "tritonserver on PATH or in /opt/tritonserver, --tritonserver PATH, or pip install nvidia-pytriton"
        raise invalid("tritonserver", "was not found", allowed)
    return _wheel(Path(spec.submodule_search_locations[0]) / "tritonserver")


def _installed(executable: Path) -> Triton:
    """A server that brings its own backends; one inside the wheel is recognised by the stubs beside it."""
    if (executable.parents[1] / "python_backend_stubs").is_dir():
        return _wheel(executable.parents[1])
    backends = executable.parents[1] / "backends"
    return Triton(executable, (f"--backend-directory={backends}",) if backends.is_dir() else ())


def _wheel(root: Path) -> Triton:
    """The server of the nvidia-pytriton wheel: its backend directory has to be put together for this Python version."""
    stub = root / "python_backend_stubs" / PYTHON_VERSION / STUB
    if not stub.is_file():
        raise invalid("python", f"{PYTHON_VERSION} has no stub in {stub.parents[1]}", "a Python version that has one")
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise invalid("numpy", f"is {numpy}", "below 2: this server's Python stub cannot read texts with numpy 2")
    library = f"libpython{PYTHON_VERSION}.so.1.0"
    site = root.parents[1]
    paths = [str(site / "nvidia_pytriton.libs"), str(_library_directory(library)), os.environ.get("LD_LIBRARY_PATH", "")]
    return Triton(
        root / "bin" / "tritonserver",
        (f"--backend-directory={_backend_directory(root, stub)}",),
        {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))},
    )


def _library_directory(library: str) -> Path:
    """Where this interpreter's shared library lies; the stub is linked against it."""
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    candidates = (libdir, libdir / str(sysconfig.get_config_var("MULTIARCH")), Path(sys.base_prefix) / "lib")
    for directory in candidates:
        if (directory / library).exists():
            return directory
    raise invalid(
        "python", f"{library} was not found in {', '.join(map(str, candidates))}", "a Python built with --enable-shared"
    )


def _backend_directory(root: Path, stub: Path) -> Path:
    """A directory of links: backend library, stub and our package, which the stub puts on its path.

    The stub ignores PYTHONPATH, but always looks beside itself.
    """
    links = {
        "libtriton_python.so": root / "backends" / "python" / "libtriton_python.so",
        "triton_python_backend_utils.py": root / "backends" / "python" / "triton_python_backend_utils.py",
        STUB: stub,
        "cedar": Path(cedar.__file__).resolve().parent,
    }
    key = hashlib.sha256(repr(sorted(map(str, links.values()))).encode()).hexdigest()[:16]
    cache = cache_directory()
    target = cache / f"backends-{key}"
    if not target.is_dir():
        draft = Path(tempfile.mkdtemp(dir=cache))
        (draft / "python").mkdir()
        for name, source in links.items():
            (draft / "python" / name).symlink_to(source)
        try:
            draft.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(draft)
    return target


def cache_directory() -> Path:
    """Inside the virtual environment if it is ours to write, else the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for base in (Path(sys.prefix) / "share", home):
        try:
            (base / "cedar").mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(base / "cedar", os.W_OK | os.X_OK):
            return base / "cedar"
    raise CedarError(ErrorCode.INTERNAL, f"neither {sys.prefix}/share/cedar nor {home}/cedar can be written")


def python_environment() -> dict[str, str]:
    """What lets a stub find our package and this interpreter's libraries.

    A stub starts Python with its own idea of where it is: PATH tells it the environment, PYTHONPATH the rest.
    """
    package_root = str(Path(cedar.__file__).resolve().parents[1])
    site = sysconfig.get_path("purelib")
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, site, os.environ.get("PYTHONPATH", "")))),
        "CEDAR_PYTHON": os.environ.get("CEDAR_PYTHON", sys.executable),
    }
