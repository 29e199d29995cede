# SPDX-License-Identifier: Apache-2.0
"""The model that Cedar serves when none is named: the small trained one that comes with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from cedar.errors import invalid

NAME = "cedar-small"


def embedded_model_dir() -> Path:
    """The embedded checkpoint's directory, as it was installed; its ``README.md`` is the model card.

    Raises `CedarError` where the package is not a directory of files (a zip archive), because weights are memory-mapped.
    """
    path = resources.files("cedar.model").joinpath("data", NAME)
    if not isinstance(path, Path) or not (path / "config.json").is_file():
        raise invalid("model", f"this installation has no {NAME}", "a checkpoint directory")
    return path
