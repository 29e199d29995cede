# SPDX-License-Identifier: Apache-2.0
"""Obtain a perf_analyzer that runs here: the 2.51.0 binary out of its wheel, with the two libraries that it links."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "perf_analyzer" / "2.51.0"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# The wheels' platform tags; both run on any x86-64 Linux with glibc 2.34 or later.
_PLATFORMS = ("manylinux1_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_B64, _CUDART = "libb64.so.0d", "libcudart.so.12"


class Unavailable(Exception):
    """No perf_analyzer can be had here; the message says why and what to do."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """An executable with the library directories that it needs."""

    path: Path
    libraries: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        known = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
        return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*map(str, self.libraries), *known])}

    def version(self) -> str:
        """Its own word; raises `Unavailable` with the loader's message when it does not start."""
        try:
            done = subprocess.run([self.path, "--version"], env=self.environment(), capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{self.path} does not run: {error}") from error
        if done.returncode:
            raise Unavailable(f"{self.path} does not run here: {done.stderr.strip() or done.stdout.strip()}")
        # Which of the two streams it is printed on differs between releases.
        return (done.stdout + done.stderr).strip().removeprefix("Perf Analyzer Version ")


def obtain(given: Path | None = None) -> PerfAnalyzer:
    """The one given, else the cached one, else the one out of the wheel. Raises `Unavailable`."""
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise Unavailable(f"--perf-analyzer {given}: not an executable file")
        return PerfAnalyzer(Path(found))
    machine = platform.machine()
    if platform.system() != "Linux" or machine != "x86_64":
        raise Unavailable(f"our perf_analyzer is for x86-64 Linux, not {platform.system()} {machine}: use --perf-analyzer")
    binary, libraries = CACHE / "bin" / "perf_analyzer", CACHE / "lib"
    if not binary.is_file() or not (_loads(_CUDART, libraries) and _loads(_B64, libraries)):
        _fetch_wheels(binary, libraries)
        if not _loads(_B64, libraries):
            _fetch_libb64(libraries)
    return PerfAnalyzer(binary, (libraries,))


def _loads(library: str, directory: Path) -> bool:
    """Whether the dynamic loader finds the library, on the system or in our directory."""
    for name in (library, str(directory / library)):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def _fetch_wheels(binary: Path, libraries: Path) -> None:
    """perf_analyzer out of tritonclient's wheel, libcudart out of the CUDA runtime's; both checked against their hashes."""
    with _scratch() as folder:
        platforms = [part for name in _PLATFORMS for part in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        _run([*command, *platforms, "--dest", str(folder), "--requirement", str(REQUIREMENTS)], "pip download of perf_analyzer")
        binary.parent.mkdir(parents=True, exist_ok=True)
        libraries.mkdir(parents=True, exist_ok=True)
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.endswith("/bin/perf_analyzer"):
                        _extract(archive, member, binary)
                    elif member.endswith(f"/{_CUDART}"):
                        _extract(archive, member, libraries / _CUDART)


def _fetch_libb64(libraries: Path) -> None:
    """libb64 out of the distribution's package, without installing it. The package lists may be absent (a bare container)."""
    advice = "install libb64 (Debian and Ubuntu: libb64-0d), or name another binary with --perf-analyzer"
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Unavailable(f"perf_analyzer needs {_B64}: {advice}")
    with _scratch() as folder:
        download = ["apt-get", "-qq", "download", "libb64-0d"]
        try:
            _run(download, "apt-get download libb64-0d", folder)
        except Unavailable:
            _run(["apt-get", "-qq", "update"], "apt-get update", folder)
            _run(download, f"apt-get download libb64-0d ({advice})", folder)
        for package in folder.glob("libb64-0d*.deb"):
            _run(["dpkg-deb", "--extract", str(package), str(folder / "files")], "dpkg-deb --extract")
        found = next((folder / "files").rglob(_B64), None)
        if found is None:
            raise Unavailable(f"the package libb64-0d holds no {_B64}: {advice}")
        shutil.copyfile(found, libraries / _B64)


def _extract(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    with archive.open(member) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    partial.chmod(0o755)
    partial.replace(target)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as name:
        yield Path(name)


def _run(command: list[str], what: str, folder: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{what}: {done.stderr.strip()[-2000:]}")
