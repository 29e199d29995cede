# SPDX-License-Identifier: Apache-2.0
"""Building the emulated kernel library, and running the GPU tests of `tests/ops` on it.

The CUDA sources are compiled by g++ as C++: `translate.py` rewrites what is no C++, `include` stands in for CUDA's headers, and
`machine.cpp` runs threads as fibers. The library takes tensors of the CPU, so the tests have the device's name replaced.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from translate import translate

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "backend" / "kernels"
BUILD = ROOT / "build" / "cuda_emulator"
HOST = [KERNELS / "src" / name for name in ("check.h", "check.cpp", "cpu/pool.h", "cpu/pool.cpp", "cpu/pack.cpp")]
"""What the host's side of a call needs."""
FLAGS = [
    *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-mavx2", "-mfma", "-w"),
    *("-DCEDAR_WIDE_WGMMA", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-D__CUDA_ARCH__=900"),
]
ADDRESSES = ["-fsanitize=address", "--param=asan-stack=0", "-O1"]
"""Of kernels whose accesses to memory are checked; the fibers' stacks are the emulator's own affair."""


def missing() -> str | None:
    """Why nothing can be emulated here, if that is so."""
    if shutil.which("g++") is None:
        return "no g++"
    if platform.machine() not in ("x86_64", "AMD64") or "avx2" not in Path("/proc/cpuinfo").read_text():
        return "the emulator changes stacks and multiplies by instructions of x86-64 with AVX2"
    return None


def _compile(source: Path, target: Path, options: list[str]) -> None:
    """One object, unless it is there: its name tells from what it was made."""
    if target.exists():
        return
    partial = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run(["g++", *FLAGS, *options, "-c", str(source), "-o", str(partial)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    partial.rename(target)


def _digest(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _link(library: Path, jobs: list[tuple[Path, Path]], includes: list[Path], checks: list[str]) -> Path:
    """Compile (source, object) and link, unless the library is there. checks: options of kernels."""
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)

        def compile_one(job: tuple[Path, Path]) -> None:
            checked = checks if job[0].parent not in (HERE, KERNELS / "src") else []
            _compile(*job, [*checked, *(f"-I{path}" for path in includes)])

        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            list(pool.map(compile_one, jobs))
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-shared", *checks[:1], "-o", partial, *(job[1] for job in jobs)], check=True)
        partial.rename(library)
    return library


def build_mistakes() -> Path:
    """The library of `mistakes.cu` alone."""
    own = [HERE / f"{name}.cpp" for name in ("machine", "memory", "matrix", "wgmma")]
    text = translate((HERE / "mistakes.cu").read_text())
    headers = sorted([*HERE.glob("*.h"), *(HERE / "include").iterdir()])
    folder = BUILD / _digest(text, *(path.read_text() for path in [*own, *headers]), *FLAGS)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "mistakes.cpp"
    source.write_text(text)
    return _link(folder / "mistakes.so", [(path, folder / f"{path.stem}.o") for path in [source, *own]], [HERE / "include"], [])


def build(checks: list[str] | None = None) -> Path:
    """The library; objects are kept, by a digest of the sources. checks: `ADDRESSES`."""
    checks = checks or []
    cuda = {path.name: translate(path.read_text()) for path in sorted((KERNELS / "src" / "cuda").iterdir())}
    own = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), *(HERE / "include").iterdir()])
    others = [KERNELS / "include" / "cedar_kernels.h", *HOST, *own]
    headers = (text for name, text in cuda.items() if not name.endswith(".cu"))
    sources = BUILD / _digest(*headers, *(path.read_text() for path in others), *FLAGS, *checks)
    (sources / "cuda").mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[Path, Path]] = []
    for name, text in cuda.items():
        path = sources / "cuda" / re.sub(r"\.cu$", ".cpp", name)
        path.write_text(f'#line 1 "{KERNELS / "src" / "cuda" / name}"\n{text}')
        if name.endswith(".cu"):
            jobs.append((path, sources / f"{path.stem}-{_digest(text)}.o"))
    jobs += [(path, sources / f"{path.stem}.o") for path in (*HOST, *own) if path.suffix == ".cpp"]
    includes = [HERE / "include", sources, KERNELS / "include", KERNELS / "src"]
    return _link(sources / f"{_digest(*(str(job[1]) for job in jobs))}.so", jobs, includes, checks)


def on_cpu(text: str) -> str:
    """A GPU test module's text for tensors of the CPU; "cpu:0" is the CPU, and yet another name than "cpu"."""
    text = text.replace('"cuda"', '"cpu:0"').replace(".cuda()", ".cpu()").replace(".pin_memory()", "")
    text = text.replace("torch.cuda.synchronize()", "pass")
    # results that nobody has written are NaNs
    text = text.replace("\nimport torch\n", "\nimport torch\ntorch.use_deterministic_algorithms(True)\n")
    return re.sub(r"^( *)(pytestmark|gpu) = .*", r"\1\2: list[object] = []", text, flags=re.MULTILINE)


def _preloaded() -> dict[str, str]:
    """What a process needs whose library checks accesses: its allocations are to be checked too."""
    names = ("libasan.so", "libstdc++.so.6")
    paths = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True) for name in names]
    return {"LD_PRELOAD": " ".join(path.stdout.strip() for path in paths), "ASAN_OPTIONS": "detect_leaks=0,handle_segv=0"}


def run_tests(
    library: Path, module: str, selected: str, seed: int, processors: int, directory: Path, *, checked: bool = False
) -> None:
    """Those tests of `tests/ops/<module>.py` that pytest's expression selects, in a process of their own, on the library.

    checked: the library is one of kernels whose accesses are checked (`ADDRESSES`).
    """
    path = directory / f"{module}_emulated.py"
    path.write_text(on_cpu((ROOT / "tests" / "ops" / f"{module}.py").read_text()))
    variables = {
        "CEDAR_KERNELS": str(library),
        "CEDAR_EMULATOR_SEED": str(seed),
        "CEDAR_EMULATOR_PROCESSORS": str(processors),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "backend", ROOT / "client", ROOT / "tests" / "ops"))),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(directory)]
    done = subprocess.run(
        [*command, "--maxfail=3", "--tb=short", "-k", selected, str(path)],
        env={**os.environ, **variables, **(_preloaded() if checked else {})},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
