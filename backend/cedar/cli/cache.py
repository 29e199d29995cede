# SPDX-License-Identifier: Apache-2.0
"""`cedar cache`: the prefix cache of a running engine."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

app = typer.Typer(help="The prefix cache of a running engine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group even while it has one command."""


@app.command()
def clear(
    address: Annotated[
        str, typer.Option(help="unix:PATH or HOST:PORT; empty: CEDAR_ENGINE_ADDRESS, else the engine that runs here")
    ] = "",
    server: Annotated[Optional[int], typer.Option(help="pid of the tritonserver, where several run")] = None,  # noqa: UP045
) -> None:
    """Empty the prefix cache. Running requests keep what they use."""
    from cedar.config.engine import EngineConfig
    from cedar.service.client import EngineClient
    from cedar.service.drain import find_address

    client = EngineClient(address or find_address(EngineConfig.load(), server))
    try:
        typer.echo(f"{client.clear_cache()} tokens dropped")
    finally:
        client.close()
