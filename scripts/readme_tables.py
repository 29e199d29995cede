# SPDX-License-Identifier: Apache-2.0
"""The README's tables, made from the code that they describe: ``--write`` fills them in, ``--check`` (the default) compares.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from cedar.config.engine import EngineConfig
from cedar.triton.pbtxt import markdown

README = Path(__file__).resolve().parents[1] / "README.md"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def settings() -> str:
    """One row per field of `EngineConfig`, in its order."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for field in fields(EngineConfig):
        flag = field.name.replace("_", "-")
        if isinstance(field.default, bool):
            name, default = f"--[no-]{flag}", "on" if field.default else "off"
        else:
            assert field.default is not MISSING
            name, default = f"--{flag}", f"`{field.default}`" if field.default != "" else "(empty)"
        choices = " \\| ".join(f"`{choice}`" for choice in field.metadata["choices"] if choice)
        rows.append(f"| `{name}` | {default} | {field.metadata['help']}{f' ({choices})' if choices else ''} |")
    return "\n".join(rows) + "\n"


TABLES = {"tensors": markdown, "settings": settings}


def rendered(text: str) -> str:
    """``text`` with every table made anew; an unknown name raises KeyError."""
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> int:
    """Exit status 1 when ``--check`` finds a difference."""
    old = README.read_text(encoding="utf-8")
    new = rendered(old)
    if "--write" in sys.argv[1:]:
        README.write_text(new, encoding="utf-8")
    elif new != old:
        print("README.md differs from the code: python scripts/readme_tables.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
