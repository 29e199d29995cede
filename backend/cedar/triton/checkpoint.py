# SPDX-License-Identifier: Apache-2.0
"""Where the served checkpoint lies, for the processes that need its tokenizer but not its weights."""

from __future__ import annotations

from pathlib import Path

from cedar.config.engine import EngineConfig


def model_directory(config: EngineConfig) -> Path:
    """``config.model``, else the embedded tiny model."""
    if config.model:
        return Path(config.model)
    from cedar.model.embedded import embedded_model_dir

    return embedded_model_dir()
