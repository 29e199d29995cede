# SPDX-License-Identifier: Apache-2.0
"""Where the served checkpoint lies, for the processes that need its tokenizer but not its weights."""

from __future__ import annotations

from pathlib import Path

from cedar.config.engine import EngineConfig
from cedar.model.embedded import embedded_model_dir


def model_directory(config: EngineConfig) -> Path:
    """``config.model``, else the embedded model."""
    return Path(config.model) if config.model else embedded_model_dir()
