# SPDX-License-Identifier: Apache-2.0
"""`cedar cache`: the prefix cache of a running engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cedar.service.client import EngineClient

app = typer.Typer(help="The prefix cache of a running engine.", no_args_is_help=True)

Address = Annotated[str, typer.Option(help="unix:PATH or HOST:PORT; empty: CEDAR_ENGINE_ADDRESS, else the engine that runs here")]
Server = Annotated[int | None, typer.Option(help="pid of the tritonserver, where several run")]


@app.command()
def clear(address: Address = "", server: Server = None) -> None:
    """Empty the prefix cache. Running requests keep what they use."""
    with _engine(address, server) as client:
        typer.echo(f"{client.clear_cache()} tokens dropped")


@app.command()
def stats(
    address: Address = "",
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What the KV budget holds, and how much of the prompts was found since the engine started."""
    with _engine(address, server) as client:
        found = _stats(client)
    if as_json:
        typer.echo(json.dumps(found))
        return
    queried, hits = found["prefix_cache_queries"], found["prefix_cache_hits"]
    typer.echo(
        f"budget    {found['kv_bytes_total']:,} B, {found['pages_total']:,} pages\n"
        f"in use    {found['kv_bytes_used']:,} B, {found['pages_used']:,} pages, {found['sequences']:,} sequences\n"
        f"cached    {found['kv_bytes_cached']:,} B that no sequence holds\n"
        f"found     {hits:,} of {queried:,} prompt tokens ({hits / max(1, queried):.1%})\n"
        f"replayed  {found['replayed_tokens']:,} of these"
    )


def _stats(client: EngineClient) -> dict[str, Any]:
    from prometheus_client.parser import text_string_to_metric_families

    status = client.status(include_metrics=True)
    samples = {
        sample.name: int(sample.value)
        for family in text_string_to_metric_families(status.metrics.decode())
        for sample in family.samples
        if family.type == "counter" and not sample.labels
    }
    counters = ("prefix_cache_queries", "prefix_cache_hits", "replayed_tokens")
    return {
        "kv_bytes_total": status.kv_bytes_total,
        "kv_bytes_used": status.kv_bytes_used,
        "kv_bytes_cached": status.kv_bytes_cached,
        "pages_total": status.pages_total,
        "pages_used": status.pages_used,
        "sequences": status.sequences_held,
        **{name: samples[f"cedar_{name}_total"] for name in counters},
    }


@contextmanager
def _engine(address: str, server: int | None) -> Iterator[EngineClient]:
    from cedar.config.engine import EngineConfig
    from cedar.service.client import EngineClient
    from cedar.service.drain import find_address

    client = EngineClient(address or find_address(EngineConfig.load(), server))
    try:
        yield client
    finally:
        client.close()
