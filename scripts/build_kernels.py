# SPDX-License-Identifier: Apache-2.0
"""Build what changed of the kernel library: backend/kernels to build/kernels. Run by `make setup` and the wheel build.

CEDAR_CUDA   CUDA bodies: auto (where nvcc is; the default), on (fail without) or off
CXX          the C++17 compiler; default: what CMake finds

Without CMake or a C++17 compiler there is no library, which is no error: operations run as their PyTorch references.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "backend" / "kernels"
BUILD = ROOT / "build" / "kernels"
LIBRARY = "libcedar_kernels.so"
CMAKE_MINIMUM = (3, 22)
CUDA_MINIMUM = "12.9"
_CONSEQUENCE = "operations run as PyTorch references"


def main(source: Path = SOURCE, build: Path = BUILD) -> Path | None:
    """The library, up to date; None: it cannot be built here, and a line says why. Raises `SystemExit` when a build fails."""
    cuda = os.environ.get("CEDAR_CUDA") or "auto"
    if cuda not in ("auto", "on", "off"):
        raise SystemExit(f"CEDAR_CUDA is {cuda!r}; allowed: auto, on, off")
    missing = _missing()
    if missing:
        _say(f"not built: {missing}; {_CONSEQUENCE}")
        return None
    _configure(source, build, cuda)
    _compile(build)
    library = build / LIBRARY
    _say(f"{library} ({_build_info(library)})")
    return library


def _say(text: str) -> None:
    print(f"kernel library: {text}", flush=True)


def _which(name: str) -> str | None:
    """Beside the interpreter (`pip install cmake` in a virtual environment), else on PATH."""
    return shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))))


def _missing() -> str:
    """What has to be installed first; empty: nothing."""
    if sys.platform != "linux":
        return "it needs Linux"
    needed = f"CMake {'.'.join(map(str, CMAKE_MINIMUM))} or newer"
    cmake = _which("cmake")
    if cmake is None:
        return f"install {needed}"
    version = re.search(r"(\d+)\.(\d+)", _output([cmake, "--version"])[1])
    if version is None or (int(version[1]), int(version[2])) < CMAKE_MINIMUM:
        return f"install {needed} ({cmake} is older)"
    if not _compiler():
        named = os.environ.get("CXX", "")
        return f"install a C++17 compiler, such as g++{f' (CXX={named} is none)' if named else ''}"
    return "" if _which("ninja") or _which("make") else "install Ninja or make"


def _compiler() -> list[str]:
    """The command of a C++17 compiler; empty: there is none."""
    named = os.environ.get("CXX", "")
    for compiler in [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        if _which(compiler[0]) and _output([*compiler, "-std=c++17", "-x", "c++", "-fsyntax-only", os.devnull])[0] == 0:
            return compiler
    return []


def _compilers() -> str:
    """Changes with the compilers: where they are and what they say that they are, as an update leaves them in their place."""
    text = ""
    for command in (_compiler(), shlex.split(os.environ.get("CUDACXX") or "nvcc")):
        path = _which(command[0]) if command else None
        text += f"{command} {path} {_output([*command, '--version']) if path else ''}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def _output(command: list[str]) -> tuple[int, str]:
    """Exit status and both outputs."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    return done.returncode, done.stdout


def _configure(source: Path, build: Path, cuda: str) -> None:
    """Run CMake. It keeps the compilers that it found first: a cache of others, or of other sources, is started afresh."""
    compilers = _compilers()
    if not _cache_fits(source, build, compilers):
        _forget(build)
    attempts = [cuda, cuda, "off"] if cuda == "auto" else [cuda, cuda]
    for number, mode in enumerate(attempts, 1):
        settings = ["-DCMAKE_BUILD_TYPE=Release", f"-DCEDAR_CUDA={mode}", f"-DCEDAR_COMPILERS={compilers}"]
        # The generator of a cache cannot be changed.
        if _which("ninja") and not (build / "CMakeCache.txt").exists():
            settings += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_which('ninja')}"]
        status, output = _output([str(_which("cmake")), "-S", str(source), "-B", str(build), *settings])
        if status == 0:
            if mode != cuda:
                _say(f"nvcc does not work here (CUDA {CUDA_MINIMUM} or newer is needed): CPU bodies alone")
            return
        if number < len(attempts):
            _forget(build)
    raise SystemExit(f"{output}\nkernel library: CMake failed")


def _cache_fits(source: Path, build: Path, compilers: str) -> bool:
    try:
        text = (build / "CMakeCache.txt").read_text(errors="replace")
    except OSError:
        return False
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", text, re.MULTILINE))
    found = [entries.get(name) for name in ("CMAKE_HOME_DIRECTORY", "CMAKE_CACHEFILE_DIR", "CEDAR_COMPILERS")]
    return found == [str(source), str(build), compilers]


def _forget(build: Path) -> None:
    """What CMake knows and the objects; the library stays until there is another."""
    (build / "CMakeCache.txt").unlink(missing_ok=True)
    shutil.rmtree(build / "CMakeFiles", ignore_errors=True)


def _compile(build: Path) -> None:
    """Build what changed, on all cores; in a terminal with a line of progress."""
    command = [str(_which("cmake")), "--build", str(build), "--parallel", str(len(os.sched_getaffinity(0)))]
    last: deque[str] = deque(maxlen=60)
    announced = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            step = re.match(r"\[\s*(\d+(?:/\d+|%))\] Building", line)
            if step is None:
                continue
            if not announced:
                _say(f"compiling for {_targets(build)} on {command[-1]} cores (all on 2: half a minute, CUDA: minutes)")
                announced = True
            if sys.stdout.isatty():
                print(f"\rkernel library: {step[1]}\033[K", end="", flush=True)
    if announced and sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    if process.returncode:
        hint = "CEDAR_CUDA=off builds the CPU bodies alone" if "CUDA" in _targets(build) else "see above"
        raise SystemExit(f"{''.join(last)}\nkernel library: not built; {hint}")


def _targets(build: Path) -> str:
    text = (build / "CMakeCache.txt").read_text(errors="replace")
    found = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.*)$", text, re.MULTILINE)
    with_cuda = found is not None and not found[1].endswith("NOTFOUND") and "CEDAR_CUDA:STRING=off" not in text
    return "CPU and CUDA" if with_cuda else "CPU"


def _build_info(library: Path) -> str:
    """What the library says that it holds. Raises `SystemExit` when it does not load."""
    try:
        describe = ctypes.CDLL(str(library)).cedar_build_info
    except (OSError, AttributeError) as error:
        raise SystemExit(f"kernel library: {error}") from error
    describe.restype = ctypes.c_char_p
    return bytes(describe()).decode()


if __name__ == "__main__":
    main()
