# SPDX-License-Identifier: Apache-2.0
"""The library's operations but attention and index at the release's dimensions, and the same work by PyTorch."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from perf.kernels.case import OURS, Case, Unavailable, rotate, sets_for, token_counts
from torch import Tensor

from cedar.cache.formats import e8m0_decode
from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.records import RecordPool
from cedar.cache.rows import WindowPlan, WritePlan
from cedar.ops.abi import OPERATIONS
from cedar.ops.compress import CompressorWeights, compress_store
from cedar.ops.engram import engram_gate, engram_gather, row_width, staging
from cedar.ops.mhc import Mixing, Written, mega_mhc
from cedar.ops.moe import Experts, mega_gate, moe_fp4
from cedar.ops.native import load
from cedar.ops.norm import Norm
from cedar.ops.provider import Choice, using
from cedar.ops.quant import fq8
from cedar.ops.window import window_store

BF16 = torch.bfloat16
HIDDEN, STREAMS, EXPERTS, TOP_K, INNER, HEAD, INDEX_HEAD, PAIRS = 5120, 4, 384, 6, 2304, 512, 128, 32
GROUPS, GROUP_IN, RANK = 8, 4096, 1024
COLUMNS, COLUMN = 24, 256
LINEARS = {"wq_a+wkv": (1792, 5120), "wq_b": (32768, 1280), "wo_b": (5120, 8192)}
EXPERT_BYTES = 3 * HIDDEN * INNER * 17 / 32
SHARED_BYTES = 3 * HIDDEN * INNER * 1025 / 1024
COMPILED = "torch.compile of the reference"
PINNED, HUGE = "pinned host memory", "registered huge pages"
HUGE_PAGE = 2 << 20
FEWEST_STAGED = 48
HOST_SETS = 48
"""Lists of rows that the CPU gathers in turn, so that its caches do not hold them."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=g, device="cuda", dtype=dtype)


def uniform(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=g, device="cuda")


def native(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operation by the library, without a fallback."""
    choice = Choice(set(OPERATIONS), set(OPERATIONS))

    def run(*arguments: Any) -> Any:
        with using(choice):
            return op(*arguments)

    return run


def difference(one: Tensor, other: Tensor) -> float:
    """The largest norm of a row's difference, in parts of the rows' typical norm."""
    one, other = one.double().flatten(1), other.double().flatten(1)
    return float((one - other).norm(dim=1).max() / other.norm(dim=1).mean())


def both(
    op: Any,
    facts: dict[str, int | str],
    make: Callable[[int], tuple[Any, ...]],
    compiled: bool,
    name: str | None = None,
    **floor: Any,
) -> Iterator[Case]:
    """The library's row and the compiled reference's. make(seed): the arguments."""
    sets = sets_for(floor["floor_bytes"])
    arguments = {"op": name or op.name, "facts": facts, "sets": sets, **floor}
    yield Case(name=OURS, build=lambda: rotate(make, sets, lambda inputs: native(op)(*inputs)), **arguments)
    if compiled:
        yield Case(name=COMPILED, build=lambda: _compiled(op.reference, make, sets), **arguments)


def _compiled(reference: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], sets: int) -> Callable[[int], None]:
    torch._dynamo.reset()
    fast = torch.compile(reference, dynamic=False)
    return rotate(make, sets, lambda inputs: fast(*inputs))


def hyper_connections(rows: int, compiled: bool) -> Iterator[Case]:
    @functools.cache
    def weights() -> tuple[Mixing, Norm]:
        g = seeded(0)
        fn = normal(g, 24, STREAMS * HIDDEN, dtype=torch.float32) * HIDDEN**-0.5
        mixing = Mixing(fn, uniform(g, 24), normal(g, 24, dtype=torch.float32), 1e-6, 1e-20, 20)
        return mixing, Norm(uniform(g, HIDDEN), 1e-20)

    def make(seed: int) -> tuple[Any, ...]:
        g = seeded(seed)
        written = Written(normal(g, rows, HIDDEN), 2 * uniform(g, rows, STREAMS), uniform(g, rows, STREAMS, STREAMS) / 4)
        mixing, norm = weights()
        return normal(g, rows, STREAMS, HIDDEN), written, uniform(g, rows, STREAMS), mixing._replace(fn=mixing.fn.clone()), norm

    size = 24 * STREAMS * HIDDEN * 4 + rows * HIDDEN * 2 * (2 * STREAMS + 2)
    flops = 2 * 24 * STREAMS * HIDDEN * rows
    yield from both(mega_mhc, {"T": rows}, make, compiled, floor_bytes=size, floor_flops=flops, peak="tf32")


def router(rows: int, compiled: bool) -> Iterator[Case]:
    def make(seed: int) -> tuple[Any, ...]:
        g = seeded(seed)
        weight = normal(g, EXPERTS, HIDDEN) * HIDDEN**-0.5
        return normal(g, rows, HIDDEN), weight, uniform(g, EXPERTS) / 10, TOP_K, 1.5

    size = EXPERTS * HIDDEN * 2 + rows * (HIDDEN * 2 + TOP_K * 12)
    yield from both(mega_gate, {"T": rows}, make, compiled, floor_bytes=size, floor_flops=2 * EXPERTS * HIDDEN * rows)


def stores(rows: int, compiled: bool) -> Iterator[Case]:
    def window(seed: int) -> tuple[Any, ...]:
        g = seeded(seed)
        ring = RecordPool.allocate(WindowRecords(HEAD), rows + 1, torch.device("cuda"))
        plan = WindowPlan(None, None, 1 + torch.randperm(rows, generator=g, device="cuda"))
        return normal(g, rows, HEAD), uniform(g, HEAD), 1e-20, uniform(g, rows, PAIRS), uniform(g, rows, PAIRS), ring, plan

    yield from both(window_store, {"T": rows}, window, False, floor_bytes=rows * (HEAD * 2 + PAIRS * 8 + 2 * 528))

    def entries(seed: int, ratio: int) -> tuple[Any, ...]:
        g = seeded(seed)
        groups = rows // ratio
        pools = [
            RecordPool.allocate(r, 16 * (groups // 8 + 2), torch.device("cuda"))
            for r in (GlobalRecords(HEAD), IndexKeyRecords(INDEX_HEAD))
        ]
        number = torch.arange(groups, device="cuda")
        nothing = torch.zeros(0, dtype=torch.int64, device="cuda")
        write = WritePlan(None, 1 + number, number * ratio)
        if ratio == 2:
            write = WritePlan(2 * number, 1 + number, number * 2, 2 * number, nothing, nothing, nothing, False)
        projected = normal(g, rows, HEAD * ratio, dtype=BF16 if ratio == 1 else torch.float32)
        opened = torch.ones(4, 2 * HEAD, device="cuda") if ratio == 2 else None
        weights = CompressorWeights(uniform(g, HEAD), normal(g, INDEX_HEAD, HEAD) * HEAD**-0.5, uniform(g, INDEX_HEAD), 1e-20)
        return projected, opened, write, weights, uniform(g, groups, PAIRS), uniform(g, groups, PAIRS), *pools

    for ratio, each in ((1, HEAD * 2), (2, HEAD * 8)):
        if rows < ratio:
            continue
        size = rows * each + rows // ratio * (288 + 68 + PAIRS * 8) + INDEX_HEAD * HEAD * 2
        make = functools.partial(entries, ratio=ratio)
        yield from both(compress_store, {"T": rows, "ratio": ratio}, make, False, floor_bytes=size)


def tiles(g: torch.Generator, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Random E4M3 codes and their scales, which make weights of about inputs^-1/2."""
    codes = torch.randn(outputs, inputs, generator=g, device="cuda").mul_(8).to(torch.float8_e4m3fn)
    scales = torch.randint(116, 119, (outputs // 32, inputs // 32), generator=g, device="cuda", dtype=torch.uint8)
    return codes, scales


def values(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * e8m0_decode(scales).repeat_interleave(32, 0).repeat_interleave(32, 1)


def linears(rows: int) -> Iterator[Case]:
    for layer, (outputs, inputs) in LINEARS.items():
        size = outputs * inputs * 1025 / 1024 + rows * 2 * (inputs + outputs)
        facts: dict[str, int | str] = {"T": rows, "layer": layer}
        floor: dict[str, Any] = {"floor_bytes": size, "floor_flops": 2.0 * rows * inputs * outputs}
        sets = sets_for(size)

        def make(seed: int, outputs: int = outputs, inputs: int = inputs) -> tuple[Any, ...]:
            g = seeded(seed)
            return normal(g, rows, inputs), *tiles(g, outputs, inputs), torch.empty(rows, outputs, dtype=BF16, device="cuda")

        def run(inputs: tuple[Any, ...], act_quant: bool = False) -> None:
            x, codes, scales, y = inputs
            torch.ops.cedar.mxfp8_linear.default(x, codes, scales, None, y, act_quant, 0.0)

        def check(act_quant: bool, make: Any = make, run: Any = run) -> float:
            x, codes, scales, y = inputs = make(99)
            run(inputs, act_quant)
            return difference(y, (fq8(x) if act_quant else x).float() @ values(codes, scales).T)

        for act_quant in (False, True):
            yield Case(
                "mxfp8_linear",
                OURS,
                {**facts, "x": "rounded to MXFP8"} if act_quant else facts,
                functools.partial(rotate, make, sets, functools.partial(run, act_quant=act_quant)),
                **floor,
                sets=sets,
                check=functools.partial(check, act_quant),
            )
        size = 2 * (outputs * inputs + rows * (inputs + outputs))

        def dense(seed: int, outputs: int = outputs, inputs: int = inputs) -> tuple[Tensor, Tensor]:
            g = seeded(seed)
            return normal(g, rows, inputs), normal(g, outputs, inputs)

        sets = sets_for(size)
        build = lambda dense=dense, sets=sets: rotate(dense, sets, lambda pair: torch.nn.functional.linear(*pair))  # noqa: E731
        yield Case("mxfp8_linear", "cuBLAS bf16, weights in bf16", facts, build, **floor, sets=sets)


def projection(rows: int) -> Iterator[Case]:
    def make(seed: int) -> tuple[Any, ...]:
        g = seeded(seed)
        codes, scales = tiles(g, GROUPS * RANK, GROUP_IN)
        return normal(g, rows, GROUPS, GROUP_IN), codes, scales, torch.empty(rows, GROUPS * RANK, dtype=BF16, device="cuda")

    def run(inputs: tuple[Any, ...]) -> None:
        torch.ops.cedar.wo_a.default(*inputs, GROUPS, GROUP_IN, RANK)

    def check() -> float:
        x, codes, scales, y = inputs = make(99)
        run(inputs)
        weight = values(codes, scales).view(GROUPS, RANK, GROUP_IN)
        return difference(y, torch.einsum("tgi,gri->tgr", x.float(), weight))

    size = GROUPS * RANK * GROUP_IN * 1025 / 1024 + rows * 2 * GROUPS * (GROUP_IN + RANK)
    floor: dict[str, Any] = {"floor_bytes": size, "floor_flops": 2.0 * rows * GROUPS * GROUP_IN * RANK}
    sets = sets_for(size)
    yield Case("wo_a", OURS, {"T": rows}, lambda: rotate(make, sets, run), **floor, sets=sets, check=check)

    def dense(seed: int) -> tuple[Tensor, Tensor]:
        g = seeded(seed)
        return normal(g, rows, GROUPS, GROUP_IN).transpose(0, 1), normal(g, GROUPS, RANK, GROUP_IN).transpose(1, 2)

    few = sets_for(2 * GROUPS * RANK * GROUP_IN)
    yield Case(
        "wo_a",
        "cuBLAS bf16 batched, weights in bf16",
        {"T": rows},
        lambda: rotate(dense, few, lambda pair: torch.bmm(*pair)),
        **floor,
        sets=few,
    )


@functools.cache
def expert_weights(experts: int) -> Experts:
    """Random codes of a layer's experts, whose order therefore does not matter; 7.2 GB for 384."""
    g = seeded(5)

    def some(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device="cuda", dtype=torch.uint8)

    routed = [some(0, 256, experts, 2 * INNER, HIDDEN // 2), some(0, 256, experts, HIDDEN, INNER // 2)]
    scales = [some(243, 247, experts, 2 * INNER, HIDDEN // 32), some(243, 247, experts, HIDDEN, INNER // 32)]
    (w13, s13), (w2, s2) = tiles(g, 2 * INNER, HIDDEN), tiles(g, HIDDEN, INNER)
    return Experts(routed[0], routed[1], w13, w2, 10.0, False, scales[0], scales[1], s13, s2)


def experts(rows: int) -> Iterator[Case]:
    def make(seed: int) -> tuple[Any, ...]:
        g = seeded(100 + rows + seed)
        ids = torch.rand(rows, EXPERTS, generator=g, device="cuda").argsort(-1)[:, :TOP_K].contiguous()
        weights = uniform(g, rows, TOP_K)
        return normal(g, rows, HIDDEN), ids, weights / weights.sum(-1, keepdim=True) * 1.5, expert_weights(EXPERTS)

    def used() -> float:
        return EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows)  # experts with a token, on average

    size = used() * EXPERT_BYTES + SHARED_BYTES + rows * HIDDEN * 4
    flops = 6.0 * HIDDEN * INNER * rows * (TOP_K + 1)

    def check() -> float:
        x, ids, weights, matrices = make(99)
        some = slice(0, 4)
        actual = native(moe_fp4)(x, ids, weights, matrices)[some]
        return difference(actual, moe_fp4.reference(x[some].float(), ids[some], weights[some], matrices))

    sets = min(8, sets_for(size))
    build = lambda: rotate(make, sets, lambda inputs: native(moe_fp4)(*inputs))  # noqa: E731
    yield Case("moe_fp4", OURS, {"T": rows}, build, size, flops, sets=sets, check=check, note="with the shared expert")


@functools.cache
def engram_table(place: str, gib: int) -> Tensor:
    """Rows with their scales behind them."""
    table = _bytes(place, (gib << 30) // row_width(COLUMN), row_width(COLUMN))
    table.fill_(0x34)
    table[::7].fill_(0x41)
    table[:, COLUMN:].fill_(120)
    return table


def _bytes(place: str, *shape: int) -> Tensor:
    if place == HUGE:
        return huge_pages(math.prod(shape)).view(shape)
    host: dict[str, Any] = {"pin_memory": True} if place == PINNED else {"device": "cuda"}
    return torch.empty(shape, dtype=torch.uint8, **host)


def huge_pages(count: int) -> Tensor:
    """Bytes of the host in transparent huge pages, which the GPU can read."""
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        raise Unavailable("transparent huge pages")
    size = -(-count // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE)  # kept by the tensors
    memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    start = -everything.data_ptr() % HUGE_PAGE
    found = everything[start : start + size].zero_()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
    return found[:count]


def read_by_gpu(inputs: tuple[Any, ...]) -> Tensor:
    ids, table, _, dtype, device = inputs
    out = torch.empty(*ids.shape, COLUMN, dtype=dtype, device=device)
    torch.ops.cedar.engram_gather.default(ids, table, None, out)
    return out.flatten(1)


def staged(inputs: tuple[Any, ...]) -> Tensor:
    ids, table, scales, dtype, device = inputs
    return staging(device).gather(ids, table, scales, dtype)


def lookups(rows: int, host_gib: int) -> Iterator[tuple[str, str, int, Callable[[tuple[Any, ...]], Tensor], bool]]:
    """Name, the table's place and GiB, what to run, and whether the CPU gathers: the library's choice, and each way by itself."""
    choice = lambda inputs: native(engram_gather)(*inputs)  # noqa: E731
    yield "GPU memory", "GPU memory", 16, choice, False
    if host_gib == 0:
        return
    yield PINNED, PINNED, host_gib, choice, False
    yield f"{PINNED}, ids on the CPU", PINNED, host_gib, choice, True
    yield HUGE, HUGE, host_gib, read_by_gpu, False
    for place in (PINNED, HUGE):
        if rows >= FEWEST_STAGED:
            yield f"{place}, staged", place, host_gib, staged, True


def engram(rows: int, compiled: bool, host_gib: int) -> Iterator[Case]:
    for name, place, gib, run, on_cpu in lookups(rows, host_gib):

        def make(seed: int, place: str = place, gib: int = gib, on_cpu: bool = on_cpu) -> tuple[Any, ...]:
            load()
            table = engram_table(place, gib)
            ids = torch.randint(-1, table.shape[0], (rows, COLUMNS), generator=seeded(seed), device="cuda")
            return ids.cpu() if on_cpu else ids, table, None, BF16, torch.device("cuda", torch.cuda.current_device())

        def check(make: Any = make, run: Any = run) -> float:
            inputs = make(99)
            return difference(run(inputs), engram_gather.reference(*inputs))

        sets = HOST_SETS if on_cpu else 8
        size = rows * COLUMNS * (264 + 512 + 8)
        build = lambda make=make, run=run, sets=sets: rotate(make, sets, run)  # noqa: E731
        yield Case("engram_gather", OURS, {"T": rows, "table": name}, build, size, sets=sets, check=check, host_timed=on_cpu)

    def gate(seed: int) -> tuple[Any, ...]:
        g = seeded(seed)
        return normal(g, rows, STREAMS, HIDDEN), normal(g, rows, (STREAMS + 1) * HIDDEN), uniform(g, STREAMS, HIDDEN), 1e-20

    size = rows * HIDDEN * 2 * (3 * STREAMS + 1) + STREAMS * HIDDEN * 4
    yield from both(engram_gate, {"T": rows}, gate, compiled, floor_bytes=size)


def cases(tokens: list[int] | None, compiled: bool, host_gib: int = 8) -> Iterator[Case]:
    """All rows. tokens: numbers of rows, or the default ones. compiled: the compiled references too, which take minutes."""
    for rows in token_counts(tokens):
        yield from hyper_connections(rows, compiled)
        yield from router(rows, compiled)
        yield from stores(rows, compiled)
        yield from projection(rows)
        yield from linears(rows)
        yield from engram(rows, compiled, host_gib)
        yield from experts(rows)
