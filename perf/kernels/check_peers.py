# SPDX-License-Identifier: Apache-2.0
"""Compiles what the peers compile as they run, and checks their results, before `bench` times them::

    python -m perf.kernels.check_peers --processes 14

Caches are the providers' own, on this machine, which a later `bench` finds. One line per row: what it is, its relative error or
what went wrong, and seconds. The exit status is 0 even so: a peer that is absent or wrong is a result, which `bench` says again.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time

import torch
from perf.kernels.case import Case, Unavailable
from perf.kernels.cases_peers import cases

LONGEST = 8192
"""Context of an index that is checked: longer ones run the same kernels."""


def groups(tokens: list[int] | None) -> dict[str, list[Case]]:
    """Rows by what one process does.

    Experts go by how they are computed, for the weights of each take gigabytes; DeepGEMM's in two halves, since PyTorch compiles
    three functions for every number of rows. Engram's gathers compile nothing that takes long, and are left to the benchmark.
    """
    found: dict[str, list[Case]] = {}
    for case in cases(tokens, 0):
        if case.op == "engram_gather" or int(case.facts.get("context", 0)) > LONGEST or case.facts.get("mode") == "sparse":
            continue  # a sparse row's chain is the dense one's
        part = str(case.rows)
        if case.op == "moe_fp4":
            part = f"{case.name} {case.rows > 48}" if case.name.startswith("DeepGEMM") else case.name
        found.setdefault(f"{case.op} {part}", []).append(case)
    return found


def lanes(found: dict[str, list[Case]], processes: int) -> list[list[Case]]:
    """The rows of every process: first the experts, each in a process of its own as far as there are enough."""
    shares: list[list[Case]] = [[] for _ in range(processes)]
    heavy = [key for key in found if key.startswith("moe_fp4")]
    light = [key for key in found if key not in heavy]
    alone = len(heavy) if processes > len(heavy) else 0
    for place, key in enumerate(heavy):
        shares[place % processes] += found[key]
    for place, key in enumerate(light):
        shares[alone + place % (processes - alone)] += found[key]
    return shares


def check(case: Case) -> str:
    try:
        with torch.inference_mode():
            assert case.check is not None, "a peer has a check"
            return f"ok, relative error {case.check():.1e}"
    except Unavailable as error:
        return f"unavailable: {error}"
    except Exception as error:  # a peer's failure, whatever it is, is a result
        return f"error: {type(error).__name__}: {error}"[:300].replace("\n", " ")


def work(options: argparse.Namespace, tokens: list[int] | None) -> None:
    for case in lanes(groups(tokens), options.processes)[options.number]:
        began = time.monotonic()
        result = check(case)
        facts = " ".join(f"{key}={value}" for key, value in case.facts.items())
        print(f"{case.op} {facts}, {case.name}: {result} ({time.monotonic() - began:.1f} s)", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="numbers of rows, separated by commas; those of the benchmark")
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 4) - 2))
    parser.add_argument("--number", type=int, help="only the rows of this one of the processes, in this process")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which what still runs is ended")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    tokens = [int(x) for x in options.tokens.split(",")] if options.tokens else None
    if options.number is not None:
        work(options, tokens)
        return 0
    began = time.monotonic()
    command = [sys.executable, "-m", "perf.kernels.check_peers", *sys.argv[1:], "--processes", str(options.processes), "--number"]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2"}
    running = [subprocess.Popen([*command, str(number)], env=environment) for number in range(options.processes)]
    for number, process in enumerate(running):
        try:
            code = process.wait(max(0.1, options.limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            print(f"process {number}: ended with {code}", flush=True)
    print(f"peers checked in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
