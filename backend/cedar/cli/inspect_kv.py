# SPDX-License-Identifier: Apache-2.0
"""`cedar inspect --kv`: the memory of one sequence, by allocating it, and what a KV budget buys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Console, Group
from rich.table import Table

from cedar.cli.inspect import pairs, size_text
from cedar.config.engine import EngineConfig
from cedar.errors import invalid

if TYPE_CHECKING:
    from cedar.cache.records import CacheFormats
    from cedar.cache.store import KVCache
    from cedar.config.model import ModelConfig

DEFAULT_TOKENS = 32768
GROWING = {"global_kv": "global KV", "index_keys": "index keys", "block_table": "block table"}
"""Parts of `KVCache.allocated` that grow with the longest sequence, which pages must not make much larger."""
CONSTANT = {"windows": "windows", "compressor_rows": "compressor rows"}


def describe_kv(config: ModelConfig, settings: EngineConfig, tokens: int | None = None) -> dict[str, Any]:
    """What one sequence of ``tokens`` takes in packed pools, ready for JSON; with a budget in the settings, what that buys.

    The pools are a server's, for this one sequence. On a CPU they take no memory, because nothing is written to them.
    Raises `CedarError` when the model has no sequence of this length, or the budget holds none.
    """
    import torch

    from cedar.cache.store import CacheSizes, KVCache, page_bytes, slot_bytes
    from cedar.engine.budget import cache_formats

    longest = config.max_position_embeddings
    tokens = min(DEFAULT_TOKENS, longest) if tokens is None else tokens
    if not 1 <= tokens <= longest:
        raise invalid("--tokens", f"is {tokens}", f"1 to {longest} (max_position_embeddings)")
    formats = cache_formats(config, torch.bfloat16, fake_quant=True, global_kv=settings.global_kv)
    page, slot = (measure(config, formats, settings.page_tokens) for measure in (page_bytes, slot_bytes))
    pages = -(-tokens // settings.page_tokens)
    sizes = CacheSizes((pages + 1) * page + 2 * slot, settings.page_tokens, page, slot, 0, pages, num_slots=1)
    cache = KVCache(config, formats, sizes, torch.device("cpu"))
    report = {
        **_allocation(cache, tokens),
        "window_bytes_per_sequence": cache.allocated()["windows"] // (sizes.num_slots + 1),
        "snapshot_bytes": slot,
        "seam_bytes": _seams(config, formats),
        "records": _records(formats),
    }
    if settings.kv_cache_bytes:
        report["budget"] = _budget(config, formats, settings, pages)
    return report


def _allocation(cache: KVCache, tokens: int) -> dict[str, Any]:
    """The parts, null page and null slot included, and what they take beyond ``tokens`` times the bytes of a token."""
    parts, sizes = cache.allocated(), cache.sizes
    needed = tokens * cache.kv_bytes_per_token
    return {
        "tokens": tokens,
        "page_tokens": sizes.page_tokens,
        "allocated_bytes": parts,
        "kv_bytes_per_token": cache.kv_bytes_per_token,
        "overhead_percent": round(100 * (sum(parts[name] for name in GROWING) / needed - 1), 3),
        "overhead_bytes": {
            "last_page": sizes.num_pages * sizes.page_bytes - needed,
            "null_page": sizes.page_bytes,
            "block_table": parts["block_table"],
        },
    }


def _seams(config: ModelConfig, formats: CacheFormats) -> dict[str, dict[str, int]]:
    """Bytes of the boundary rows of one sequence, by arithmetic and decoder replay mode."""
    import torch

    from cedar.engine.replay import SeamSizes
    from cedar.engine.request import DecoderReplay

    sizes = {name: SeamSizes.of(config, getattr(torch, name), formats.window) for name in ("bfloat16", "float32")}
    return {name: {mode.value: seam.bytes(mode) for mode in DecoderReplay} for name, seam in sizes.items()}


def _records(formats: CacheFormats) -> dict[str, int]:
    from cedar.cache.layout import LAYOUT_VERSION
    from cedar.cache.records import PLANAR_ROWS, record_bytes

    return {
        "layout_version": LAYOUT_VERSION,
        "window": record_bytes(formats.window),
        "global": record_bytes(formats.kv),
        "index_key": record_bytes(formats.index_key),
        "index_key_block": PLANAR_ROWS * record_bytes(formats.index_key),
    }


def _budget(config: ModelConfig, formats: CacheFormats, settings: EngineConfig, pages: int) -> dict[str, Any]:
    """How a server with these settings would divide its budget."""
    from cedar.engine.budget import plan_cache
    from cedar.engine.device import resolve_device, resolve_dtype

    dtype = resolve_dtype(settings, resolve_device(settings))
    sizes = plan_cache(config, formats, settings, dtype, settings.kv_cache_bytes)
    running = min(sizes.num_slots, settings.max_num_seqs)
    return {
        "kv_cache_bytes": sizes.budget_bytes,
        "max_num_seqs": settings.max_num_seqs,
        "dtype": str(dtype).removeprefix("torch."),
        "decoder_replay": settings.decoder_replay_mode,
        "sequences": running,
        "snapshots": sizes.num_slots - running,
        "pages": sizes.num_pages,
        "tokens": sizes.num_pages * sizes.page_tokens,
        "sequences_of_this_length": min(running, sizes.num_pages // pages),
        "boundary_bytes": sizes.boundary_bytes,
    }


def tables_kv(name: str, report: dict[str, Any]) -> str:
    """The report for people."""
    console = Console()
    with console.capture() as capture:
        console.print(f"[bold]{name}[/]", highlight=False)
        console.print(_parts(report), _facts(report), _seam_table(report["seam_bytes"]))
        if "budget" in report:
            console.print(pairs("What the budget buys", _bought(report["budget"], report["tokens"])))
    return capture.get()


def _parts(report: dict[str, Any]) -> Table:
    parts: dict[str, int] = report["allocated_bytes"]
    table = Table(title=f"One sequence of {report['tokens']:,} tokens, null page and slot included")
    table.add_column("part")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("")
    total = sum(parts.values())
    for part, label in (GROWING | CONSTANT).items():
        size = parts[part]
        table.add_row(label, f"{size:,}", f"{size / total:.1%}", Bar(total, 0, size, width=30))
    table.add_row("all", f"{total:,}", "", "", style="bold")
    return table


def _facts(report: dict[str, Any]) -> Group:
    records, over = report["records"], report["overhead_bytes"]
    memory = {
        "global KV of a token": f"{report['kv_bytes_per_token']:g} B",
        f"overhead of pages of {report['page_tokens']} tokens": f"{report['overhead_percent']:.2f} %",
        "  tokens missing in the last page": f"{over['last_page']:,.0f} B",
        "  null page": f"{over['null_page']:,} B",
        "  block table": f"{over['block_table']:,} B",
        "windows of a running sequence": _mib(report["window_bytes_per_sequence"]),
        "a snapshot (encoder replay off)": _mib(report["snapshot_bytes"]),
    }
    layout = {
        "window record": f"{records['window']} B",
        "global record": f"{records['global']} B",
        "index key": f"{records['index_key']} B, in planar blocks of {records['index_key_block']} B",
    }
    return Group(pairs("Memory of a sequence", memory), pairs(f"Records, layout version {records['layout_version']}", layout))


def _seam_table(seams: dict[str, dict[str, int]]) -> Table:
    table = Table(title="Boundary rows, until the first token")
    table.add_column("decoder replay")
    for dtype in seams:
        table.add_column(dtype, justify="right", no_wrap=True)
    for mode in next(iter(seams.values())):
        table.add_row(mode, *(size_text(sizes[mode]) for sizes in seams.values()))
    return table


def _bought(budget: dict[str, Any], tokens: int) -> dict[str, str]:
    running = f"{budget['sequences']:,} (max_num_seqs {budget['max_num_seqs']:,}), {budget['dtype']}"
    rows = {
        "budget": size_text(budget["kv_cache_bytes"]),
        "sequences at a time": f"{running}, decoder replay {budget['decoder_replay']}",
        f"sequences of {tokens:,} tokens at a time": f"{budget['sequences_of_this_length']:,}",
        "tokens in pages": f"{budget['tokens']:,}",
        "kept for boundary rows": size_text(budget["boundary_bytes"]),
    }
    return rows | ({"slots for snapshots": f"{budget['snapshots']:,}"} if budget["snapshots"] else {})


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB ({size:,} B)"
