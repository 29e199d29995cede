# SPDX-License-Identifier: Apache-2.0
"""What a result file must say to be repeatable: the machine, the versions, the commit, the command."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import cedar

_PACKAGES = ("cedar-serving", "cedar-client", "torch", "numpy", "tritonclient", "grpcio", "protobuf", "nvidia-pytriton")
# An array or object that holds no other: written on one line. A line break never stands inside a JSON string, so `[` or `{`
# before one opens a container.
_LEAF = re.compile(r"[\[{]\n[^\[\]{}]*[\]}]")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, operating system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "os": _operating_system(),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Python and the packages that a measurement depends on; those that are not installed are left out."""
    found = {"python": platform.python_version(), "cedar": cedar.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def header(title: str) -> dict[str, Any]:
    """The first keys of every result file."""
    return {
        "title": title,
        "command": shlex.join(_short(arg) for arg in [*_program(), *sys.argv[1:]]),
        "date": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "commit": _commit(),
        "machine": machine(),
        "versions": versions(),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write one result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    text = json.dumps(result, indent=1, allow_nan=False)
    partial.write_text(_LEAF.sub(lambda leaf: re.sub(r"\n *", " ", leaf.group()), text) + "\n")
    partial.replace(path)


def _program() -> list[str]:
    script = Path(sys.argv[0])
    if script.name == "cedar" or script.parts[-2:] == ("cedar", "__main__.py"):
        return ["cedar"]
    module = sys.modules["__main__"].__spec__  # of python -m; its file would not find its package
    return ["python", "-m", module.name] if module else ["python", _short(sys.argv[0])]


def _short(argument: str) -> str:
    """Paths under the working directory are written relative to it: a result must not carry somebody's home directory."""
    here = f"{Path.cwd()}{os.sep}"
    return argument.removeprefix(here)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _operating_system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name}, {platform.machine()}, {' '.join(platform.libc_ver())}"


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return [line.strip() for line in _output(query).splitlines() if line.strip()]


def _commit() -> str:
    """``git describe`` of the source tree that runs, ``-dirty`` when it has changes; empty for an installed wheel."""
    root = str(Path(cedar.__file__).resolve().parents[2])
    return _output(["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12"]).strip()


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
