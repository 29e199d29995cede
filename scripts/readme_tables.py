# SPDX-License-Identifier: Apache-2.0
"""The tables of the two READMEs, made from the code that they describe: ``--write`` fills them in, ``--check`` compares.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from cedar.config.engine import EngineConfig
from cedar.triton.pbtxt import markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "backend" / "cedar"
READMES = (ROOT / "README.md", ROOT / "backend" / "README.md")
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


def modules() -> str:
    """One row per module: its path and the first line of its docstring."""
    rows = ["| file | what it is |", "|---|---|"]
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if path.name not in ("__init__.py", "__main__.py") and path.parts[0] != "v1":
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            rows.append(f"| `{path}` | {docstring.splitlines()[0] if docstring else ''} |")
    return "\n".join(rows) + "\n"


TABLES = {"tensors": markdown, "settings": settings, "modules": modules}


def rendered(text: str) -> str:
    """``text`` with every table made anew; an unknown name raises KeyError."""
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> int:
    """Exit status 1 when ``--check`` finds a difference."""
    status = 0
    for readme in READMES:
        old = readme.read_text(encoding="utf-8")
        new = rendered(old)
        if "--write" in sys.argv[1:]:
            readme.write_text(new, encoding="utf-8")
        elif new != old:
            print(f"{readme} differs from the code: python scripts/readme_tables.py --write")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
