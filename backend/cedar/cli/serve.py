# SPDX-License-Identifier: Apache-2.0
"""`cedar serve`: tritonserver with the engine, in the foreground."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from dataclasses import MISSING, Field, fields
from typing import Any, Optional, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from cedar.config.engine import EngineConfig, misspelt

log = logging.getLogger("cedar.serve")


class Report:
    """What the person in front of the terminal sees."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._last_line = -1

    def loading(self, fraction: float) -> None:
        """A bar on a terminal, a line per tenth elsewhere."""
        if not self._console.is_terminal:
            tenth = int(fraction * 10)
            if tenth > self._last_line:
                self._last_line = tenth
                print(f"loading the model: {fraction:.0%}", flush=True)
            return
        if self._progress is None:
            self._progress = Progress(TextColumn("loading the model"), BarColumn(), TaskProgressColumn(), console=self._console)
            self._progress.add_task("", total=1.0)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=fraction)

    def ready(self, config: EngineConfig, status: Any) -> None:
        """The table of what is served where, then the line that scripts wait for."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=1.0)
            self._progress.stop()
            self._progress = None
        table = Table(show_header=False, box=None)
        for name, value in (
            ("model", status.model or config.model or "embedded model"),
            ("operations", status.operations),
            ("context", f"{status.max_model_len:,} tokens"),
            ("KV budget", f"{status.kv_bytes_total / 2**20:,.0f} MiB"),
            ("prefix cache", "on" if config.prefix_cache else "off"),
            ("replay", f"encoder {config.encoder_replay_mode}, decoder {config.decoder_replay_mode}"),
            ("HTTP", f"http://{config.host}:{config.http_port}"),
            ("gRPC", f"{config.host}:{config.grpc_port}"),
            ("metrics", f"http://{config.host}:{config.metrics_port}/metrics"),
            ("engine", f"process {status.pid}, version {status.version}"),
        ):
            table.add_row(name, Text(value))  # paths may have brackets, which are no markup
        self._console.print(table)
        print("Cedar is ready", flush=True)


def command(**flags: Any) -> None:
    """Serve a checkpoint from tritonserver, in the foreground. SIGTERM drains and ends with status 0.

    Settings: flag > environment CEDAR_<FLAG> > YAML (CEDAR_CONFIG, else cedar.yaml beside the model repository) > default.
    """
    from cedar.triton.logs import start_logging
    from cedar.triton.supervisor import Supervisor

    config = EngineConfig.load(flags)
    start_logging(config, "serve")
    for name, setting in misspelt(os.environ).items():
        log.warning("%s is no setting; did you mean %s?", name, setting)
    report = Report(Console(highlight=False))
    sys.exit(Supervisor(config, report.loading, report.ready).run())


def _option(setting: Field[Any], kind: Any) -> inspect.Parameter:
    """A setting as a command line option; None: not given."""
    flag = f"--{setting.name.replace('_', '-')}"
    declaration = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    choices = " | ".join(choice or "(empty)" for choice in setting.metadata["choices"])
    text = setting.metadata["help"] + (f" ({choices})" if choices else "")
    default = "" if setting.default is MISSING else f" (default: {str(setting.default).lower() or 'empty'})"
    option = typer.Option(None, declaration, help=text + default, show_default=False)
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=Optional[kind])  # noqa: UP045


# typer reads a command's options from its signature: here they are the fields of `EngineConfig`
_hints = get_type_hints(EngineConfig)
_parameters = [_option(setting, _hints[setting.name]) for setting in fields(EngineConfig)]
command.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]
command.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters}
