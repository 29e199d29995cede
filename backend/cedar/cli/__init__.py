# SPDX-License-Identifier: Apache-2.0
"""The command `cedar`. One file per command; heavy imports stay inside the commands, so `--help` is instant."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.text import Text

from cedar.cli import bench, cache, chat, generate, inspect, make_tiny, score, serve
from cedar.errors import CedarError

app = typer.Typer(
    name="cedar",
    help="Serve DeepSeek-V4.1-Flash from NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (serve, chat, generate, score, bench, inspect, make_tiny):
    app.command(module.__name__.rsplit(".", 1)[-1].replace("_", "-"))(module.command)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Entry point: a `CedarError` is printed as one line and ends with status 2."""
    try:
        app()
    except CedarError as error:
        # the message may quote the user's brackets, which are not ours to interpret; a line must stay one line in a log
        Console(stderr=True).print(Text("cedar: ", style="bold red").append(str(error), style="default"), soft_wrap=True)
        sys.exit(2)
