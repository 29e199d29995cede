# SPDX-License-Identifier: Apache-2.0
"""Generate backend/cedar/v1 (messages, service stubs and their type stubs) from protos/. Run by `make setup` and the wheel build."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run protoc with the grpc and mypy plugins; returns its exit status."""
    out = ROOT / "backend"
    (out / "cedar" / "v1").mkdir(parents=True, exist_ok=True)
    plugins = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'protos'}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        str(ROOT / "protos" / "cedar" / "v1" / "engine.proto"),
    ]
    status = protoc.main(arguments)
    (out / "cedar" / "v1" / "__init__.py").write_text('"""Generated from protos/cedar/v1; never edited."""\n')
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
