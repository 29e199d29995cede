# SPDX-License-Identifier: Apache-2.0
"""What a measurement shows while it runs and when it is done."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def report_console() -> Console:
    """The terminal; into a file or pipe, wide enough that no table column is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=120, highlight=False)


def progress(console: Console) -> Progress:
    """Description, bar, M of N, elapsed time."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
