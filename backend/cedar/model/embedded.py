# SPDX-License-Identifier: Apache-2.0
"""The model that Cedar serves when none is named: preset ``tiny``, seed 0, made once per installation."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from cedar.config.presets import preset
from cedar.errors import invalid, unavailable
from cedar.model.make import make_checkpoint

_SEED = 0
_RECIPE_FILE = "recipe.txt"
_RECIPE_VERSION = 1
"""Raise it when the same configuration and corpus give other bytes."""
_MAKE_SECONDS = 120.0


def embedded_model_dir() -> Path:
    """The embedded checkpoint's directory, ``CEDAR_EMBEDDED_DIR`` or ``<sys.prefix>/share/cedar/tiny``; made if absent.

    It is made again when this version of Cedar would make it differently. Safe to call from several processes at once: one
    makes it, the others wait, at most two minutes. Raises `CedarError` when the directory cannot be written.
    """
    path = Path(os.environ.get("CEDAR_EMBEDDED_DIR") or Path(sys.prefix) / "share/cedar/tiny")
    recipe = _recipe()
    if not _is_made(path, recipe):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.with_name(f".{path.name}.lock")):
                if not _is_made(path, recipe):
                    make_checkpoint(preset("tiny"), path, _SEED, force=True)
                    (path / _RECIPE_FILE).write_text(recipe)
        except OSError as error:
            raise invalid("CEDAR_EMBEDDED_DIR", f"{path} cannot be written ({error})", "a writable directory") from error
    return path


def _recipe() -> str:
    corpus = resources.files("cedar.text").joinpath("data/corpus.txt").read_bytes()
    parts = json.dumps([_RECIPE_VERSION, _SEED, preset("tiny")], sort_keys=True).encode()
    return hashlib.sha256(parts + corpus).hexdigest()


def _is_made(path: Path, recipe: str) -> bool:
    file = path / _RECIPE_FILE
    return file.is_file() and file.read_text() == recipe


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An exclusive lock that dies with its process."""
    deadline = time.monotonic() + _MAKE_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise unavailable(f"another process has held {path} for {_MAKE_SECONDS:.0f} s") from None
                time.sleep(0.05)
        yield
