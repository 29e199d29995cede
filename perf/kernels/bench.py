# SPDX-License-Identifier: Apache-2.0
"""Times of the kernel library on one GPU, beside its peers, in one run::

    python -m perf.kernels.bench --output perf/results/kernels_h200.json

Every row is the median of CUDA graphs' replays, divided by the calls in a graph, with inputs that L2 does not hold. Floors come
from ceilings measured in the same run. A row that fails says why and the run goes on; the exit status is 1 if one of the
library's did.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from perf.kernels.case import EVICTING_BYTES, OURS, Case, Unavailable
from perf.kernels.peers import launch_early
from perf.tables import beside, facts_of

from cedar.ops.native import load

MOST_CALLS = 24


class Evictor:
    """Empties L2 of what a replay left there, between replays, outside of the timed interval.

    It reads: lines that it had written would have to go back to memory while the next replay is timed.
    """

    def __init__(self) -> None:
        self._memory = torch.zeros(EVICTING_BYTES // 4, device="cuda")
        self._largest = torch.zeros((), device="cuda")

    def __call__(self) -> None:
        torch.amax(self._memory, 0, out=self._largest)


def replays(graph: torch.cuda.CUDAGraph, seconds: float, between: Callable[[], None] | None) -> list[float]:
    """Microseconds of replays, for about so long, at least 10 of them and at most 300."""
    times: list[float] = []
    stop = time.monotonic() + seconds
    while len(times) < 10 or (time.monotonic() < stop and len(times) < 300):
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(5)]  # type: ignore[no-untyped-call]
        for start, end in pairs:
            if between is not None:
                between()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) * 1e3 for start, end in pairs]
    return times


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _summary(times: list[float], calls: int) -> dict[str, float]:
    times = sorted(times)
    return {
        "us": statistics.median(times),
        "p10_us": times[len(times) // 10],
        "p90_us": times[len(times) * 9 // 10],
        "replays": len(times),
        "calls": calls,
    }


def measure(call: Callable[[int], object], sets: int, seconds: float, evict: Callable[[], None] | None) -> dict[str, float]:
    """Times of one call in microseconds. evict: run between replays where the sets together would stay in L2."""
    stream = _stream()
    with torch.cuda.stream(stream):  # the library's workspace belongs to a stream: not to be made, and zeroed, in a graph
        for number in range(min(sets, 3)):
            call(number)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call(0)
        end.record()
    torch.cuda.synchronize()
    once = max(1.0, start.elapsed_time(end) * 1e3)
    calls = max(1, min(MOST_CALLS, int(30_000 / once)))
    calls = min(calls, sets) if evict else max(calls, min(sets, 8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(calls):
            call(number)
    for _ in range(2):
        graph.replay()
    return _summary([x / calls for x in replays(graph, seconds, evict)], calls)


def measure_on_host(call: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Times of one call, from its beginning until the GPU is done, in microseconds: at least 10 of them and at most 300."""
    times: list[float] = []
    stop = time.monotonic() + seconds
    for number in range(300):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(number)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
        if number >= 12 and time.monotonic() > stop:
            break
    return _summary(times[3:], 1)


def ceilings(seconds: float) -> dict[str, float]:
    """What this GPU reaches: bytes/s of a copy (read and written), flop/s of products of 8192^3 in the settled state."""
    size = 1 << 28
    one, other = (torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(2))
    copied = measure(lambda _: torch.bitwise_not(one, out=other), 1, seconds, None)["us"]
    found = {"bytes": 2 * size / copied * 1e6}
    n, flops = 8192, 2 * 8192.0**3
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["bf16"] = flops / measure(lambda _: torch.mm(a, b), 1, seconds, None)["us"] * 1e6
    wide, allowed = a.float(), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    found["tf32"] = flops / measure(lambda _: torch.mm(wide, wide), 1, seconds, None)["us"] * 1e6
    torch.backends.cuda.matmul.allow_tf32 = allowed
    codes, scale = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    product = lambda _: torch._scaled_mm(codes, codes.t(), scale, scale, out_dtype=torch.bfloat16)  # noqa: E731
    found["fp8"] = flops / measure(product, 1, seconds, None)["us"] * 1e6
    return found


def run_case(case: Case, seconds: float, evict: Evictor, ceiling: dict[str, float]) -> dict[str, Any]:
    """The row of a case: its times, or what went wrong."""
    floor = max(case.floor_bytes / ceiling["bytes"], case.floor_flops / ceiling[case.peak]) * 1e6
    row: dict[str, Any] = {"op": case.op, "name": case.name, **case.facts, "floor_us": floor, "note": case.note}
    try:
        if case.name == OURS:
            load()
        with torch.inference_mode():
            if case.check is not None:
                row["relative_error"] = case.check()
            if case.host_timed:
                row |= measure_on_host(case.build(), seconds)
            else:
                small = case.floor_bytes * case.sets < EVICTING_BYTES
                row |= measure(case.build(), case.sets, seconds, evict if small else None)
        row |= {"floor_percent": 100 * floor / row["us"], "tb_per_s": case.floor_bytes / row["us"] / 1e6}
        row["tflop_per_s"] = case.floor_flops / row["us"] / 1e6
    except Unavailable as error:
        row["unavailable"] = str(error)
    except Exception as error:  # a peer's failure, whatever it is, is a result
        row["error"] = f"{type(error).__name__}: {error}"[:400]
    gc.collect()
    torch.cuda.empty_cache()
    return row


def progress(done: int, total: int, case: Case, began: float) -> None:
    width = 24
    bar = "#" * (width * done // total)
    facts = " ".join(f"{key}={value}" for key, value in case.facts.items())
    text = f"[{bar:{width}}] {done}/{total} {time.monotonic() - began:4.0f}s {case.op} {facts} {case.name}"
    ending = "" if sys.stderr.isatty() else "\n"
    print(f"\r{text[:118]:118}", end=ending, file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """One line per operation and size: the library's time, the best peer's, the ratio, the part of the floor."""
    lines = [f"{'operation':52} {'us':>9} {'floor %':>7} {'error':>8} {'peer us':>9} {'ratio':>6}  peer"]
    for ours, peers in beside(rows):
        line = f"{title(ours):52} {ours.get('us', float('nan')):9.2f} {ours.get('floor_percent', float('nan')):7.1f} "
        line += f"{ours.get('relative_error', float('nan')):8.1e}"
        if peers and "us" in ours:
            line += f" {peers[0]['us']:9.2f} {peers[0]['us'] / ours['us']:6.2f}  {peers[0]['name']}"
        lines.append(line)
    return "\n".join([*lines, *(f"{title(row)}, {row['name']}: {row['error']}" for row in rows if "error" in row)])


def title(row: dict[str, Any]) -> str:
    """The operation and its sizes."""
    return " ".join([row["op"], f"T={row['T']}", *(f"{name}={value}" for name, value in facts_of(row).items())])


def plot(rows: list[dict[str, Any]], ceiling: dict[str, float], path: Path) -> None:
    """Time over floor of every row of the library, against its arithmetic intensity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6))
    intensities = [2.0**n for n in range(-2, 14)]
    for peak, style in (("bf16", "-"), ("fp8", "--")):
        axes.plot(
            intensities,
            [min(x * ceiling["bytes"], ceiling[peak]) / 1e12 for x in intensities],
            style,
            color="grey",
            label=f"ceiling, {peak}",
        )
    for op in dict.fromkeys(row["op"] for row in rows):
        points = [row for row in rows if row["op"] == op and row["name"] == OURS and row.get("tflop_per_s")]
        if points:
            axes.scatter(
                [row["tflop_per_s"] / row["tb_per_s"] for row in points], [row["tflop_per_s"] for row in points], label=op, s=24
            )
    axes.set(xscale="log", yscale="log", xlabel="flop per byte", ylabel="TFLOP/s", title="Kernel library on the roofline")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def collect(options: argparse.Namespace) -> list[Case]:
    found: list[Case] = []
    tokens = [int(x) for x in options.tokens.split(",")] if options.tokens else None
    for name in ("cases", "cases_attention", "cases_peers"):
        module = importlib.import_module(f"perf.kernels.{name}")
        more = {"cases": (options.compiled, options.host_gib), "cases_peers": (options.host_gib,)}.get(name, ())
        found += module.cases(tokens, *more)
    if options.ops:
        wanted = options.ops.split(",")
        found = [case for case in found if case.op in wanted]
    if options.names:
        found = [case for case in found if any(part in case.name for part in options.names.split(","))]
    if options.limit is None:
        return sorted(found, key=lambda case: case.op)
    order = list(dict.fromkeys(case.rows for case in found))
    return sorted(found, key=lambda case: order.index(case.rows))  # of every operation something, if time ends early


def save(rows: list[dict[str, Any]], ceiling: dict[str, float], path: Path) -> None:
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    document = {
        "title": "Times of the kernel library and of its peers",
        "command": shlex.join(["python", "-m", "perf.kernels.bench", *sys.argv[1:]]),
        "machine": machine,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ceilings": ceiling,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", help="operations, separated by commas; all")
    parser.add_argument("--tokens", help="numbers of rows, separated by commas; 1,8,48,128,512,4096")
    parser.add_argument("--names", help="rows whose name has one of these, separated by commas; all")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring per row")
    parser.add_argument("--limit", type=float, help="seconds after which no row is begun; smallest sizes first")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the references")
    parser.add_argument("--early", action="store_true", help="DeepGEMM's launches begin early too, as the library's do")
    parser.add_argument("--host-gib", type=int, default=8, help="Engram table in pinned host memory; 0: none")
    parser.add_argument("--output", type=Path, default=Path("perf/results/kernels_h200.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    if options.early:
        launch_early()
    began = time.monotonic()
    torch.manual_seed(0)
    ceiling = ceilings(max(0.3, options.seconds))
    chosen, evict = collect(options), Evictor()
    rows: list[dict[str, Any]] = []
    for done, case in enumerate(chosen):
        if options.limit is not None and time.monotonic() - began > options.limit:
            print(f"\n{len(chosen) - done} rows left out after {options.limit:g} seconds", file=sys.stderr)
            break
        progress(done, len(chosen), case, began)
        rows.append(run_case(case, options.seconds, evict, ceiling))
        save(rows, ceiling, options.output)  # what was measured survives whatever a later row does
    print(file=sys.stderr)
    if importlib.util.find_spec("matplotlib") is not None:
        plot(rows, ceiling, options.output.with_suffix(".png"))
    print(
        f"copy {ceiling['bytes'] / 1e12:.2f} TB/s, "
        + ", ".join(f"{k} {v / 1e12:.0f} TFLOP/s" for k, v in ceiling.items() if k != "bytes")
    )
    print(table(rows))
    return int(any("error" in row for row in rows if row["name"] == OURS))


if __name__ == "__main__":
    sys.exit(main())
