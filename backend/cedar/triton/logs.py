# SPDX-License-Identifier: Apache-2.0
"""Log lines of the supervisor and of the steps, which share the server's output."""

from __future__ import annotations

import logging
import sys

from cedar.config.engine import EngineConfig


def start_logging(config: EngineConfig, name: str) -> None:
    """Lines begin with level and time, and ``name`` says which process wrote them."""
    logging.basicConfig(format=f"%(levelname).1s %(asctime)s {name}: %(message)s", stream=sys.stderr)
    logging.getLogger("cedar").setLevel(config.log_level.upper())
    if config.log_level != "debug":  # every process connects at every start
        logging.getLogger("cedar.service.client").setLevel(logging.WARNING)
